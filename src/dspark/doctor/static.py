"""The static part: everything that files alone tell about a pair. Nothing is run; of the target no weight is read."""

from __future__ import annotations

from collections.abc import Iterator

from dspark.doctor.blocks import check_block, check_layout, check_weights
from dspark.doctor.draft import DraftFacts, read_draft
from dspark.doctor.facts import TargetFacts, target_facts
from dspark.doctor.findings import Finding
from dspark.doctor.identity import check_layer_ids, check_name, check_shape
from dspark.doctor.positions import check_golden, check_length, check_rotary
from dspark.doctor.support import check_engine, check_loader, engine_version
from dspark.doctor.template import check_prompt_recipe
from dspark.doctor.tokens import check_map, check_mask, check_vocabulary


def static_checks(
    target: str, draft: str, engine: str | None = None, context: int | None = None, n: int | None = None
) -> list[Finding]:
    """Every static finding about a pair, in the order of the checks.

    target: `embedded`, a folder, a hub name (its config and tokenizer only; what cannot be had is skipped and said).
    draft: `embedded`, a folder of any form, a .gguf file, or a recipe's name. engine: vllm, sglang or llamacpp, with
    ==VERSION for another release than the known one. context: tokens of a request; n: draft tokens a round.
    Raises DsparkError for an engine or a target that does not exist; a fault of the draft is a finding.
    """
    facts = target_facts(target)
    return findings_of(read_draft(draft, facts), facts, engine, context, n)


def findings_of(
    draft: DraftFacts,
    target: TargetFacts,
    engine: str | None,
    context: int | None,
    n: int | None,
    pending: bool = False,
) -> list[Finding]:
    """As `static_checks`, of a pair that was read. pending: the draft will be converted before anything loads it.

    Raises DsparkError for an engine that does not exist.
    """
    if engine is not None:
        engine_version(engine)
    found = list(draft.findings)
    if draft.config is None:
        return [*found, Finding("config", "skipped", "the draft could not be read, so nothing else was checked")]
    if engine is None and not pending:
        found += check_loader(draft)
    return [*found, *_checks(draft, target, engine, context, n)]


def _checks(
    draft: DraftFacts, target: TargetFacts, engine: str | None, context: int | None, n: int | None
) -> Iterator[Finding]:
    config = draft.config
    assert config is not None
    yield from check_shape(config, target)
    yield check_name(config, target)
    yield check_layer_ids(config, target)
    yield check_layout(draft, config)
    yield check_block(config, n)
    yield check_mask(config, target)
    yield check_vocabulary(draft, config, target)
    yield from check_map(draft, config)
    yield from check_weights(draft)
    yield check_golden()
    yield check_rotary(config, target)
    yield from check_length(config, target, context)
    yield check_prompt_recipe(config, target)
    if engine is not None:
        yield from check_engine(draft, target, engine)

"""`dspark bench` without a server: from names of drafts and suites to a report."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from dspark.bench.assemble import Findings, assemble, prompts_sha256
from dspark.bench.contenders import PLAIN, BenchSettings, Contender, EngineContender
from dspark.bench.longcontext import retrieved
from dspark.bench.prompts import Missing, Suite
from dspark.bench.report import Drafter, Rendered, Report
from dspark.bench.run import Bench
from dspark.bench.samples import Journal, Sample
from dspark.bench.transformers_column import transformers_columns
from dspark.checkpoints.builtin import draft_folder, load_named_draft
from dspark.checkpoints.native import PROMPTS_FILE, weights_sha256
from dspark.data.chat import ChatRenderer
from dspark.data.prompts import Prompt, read_prompt_hashes
from dspark.decoding.proposers import NoProposer, make_proposer
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.kernels.library import kind as kernels
from dspark.machine import describe_machine
from dspark.targets.base import Target

PROBE = "What is a number?"
_WIDTHS = re.compile(r"(?P<place>.+)@(?P<ns>\d+(,\d+)*)")


@dataclass(frozen=True)
class NamedDraft:
    """A draft to compare: the name its columns carry, where it lies, and the widths asked of it."""

    name: str
    place: str
    ns: tuple[int, ...]


def parse_draft(text: str, ns: Sequence[int]) -> NamedDraft:
    """NAME=PATH or NAME=PATH@3,7; without widths, `ns`. Raises DsparkError."""
    name, equals, place = (part.strip() for part in text.partition("="))
    if not equals or not name.strip() or not place.strip():
        raise DsparkError("draft", text, "must be NAME=PATH, or NAME=PATH@3,7 to choose its widths")
    if name == PLAIN:
        raise DsparkError("draft", text, "`plain` is plain decoding; give another name")
    found = _WIDTHS.fullmatch(place)
    if found is None:
        return NamedDraft(name, place, tuple(ns))
    return NamedDraft(name, found["place"], parse_numbers("draft", found["ns"]))


def parse_numbers(field: str, text: str) -> tuple[int, ...]:
    """Different numbers of at least 1, with commas between them. Raises DsparkError."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise DsparkError(field, text, "must be different numbers of at least 1 with commas between them, e.g. 3,7")
    return numbers


def kind_of(draft: nn.Module) -> str:
    """What a draft is called in a report."""
    if isinstance(draft, DSparkDraft):
        return "dspark" if draft.markov_head is not None or draft.confidence_head is not None else "dflash"
    attention = getattr(draft.config, "attention", "gqa")
    return "eagle3-mla" if attention == "mla" else "eagle3"


def engine_contenders(target: Target, drafts: Sequence[NamedDraft], plainly: str | None = None) -> list[Contender]:
    """Plain decoding, then every draft at each of its widths. plainly: the draft that is to use the target's own head
    rows, not those rounded ones its file may carry, so that Transformers can run the same.

    Raises DsparkError for a draft of another target, or a width it was not trained for.
    """
    names = [one.name for one in drafts]
    if len(set(names)) < len(names):
        raise DsparkError(
            "draft", ", ".join(names), "must have different names; give one draft's widths as NAME=PATH@3,7"
        )
    plain = Drafter(name=PLAIN, kind="plain", n=0)
    found: list[Contender] = [EngineContender(plain, target, NoProposer(), frozenset())]
    for named in drafts:
        draft = load_named_draft(named.place)
        if named.name == plainly and isinstance(draft, DSparkDraft):
            draft.own_head_rows = None
        known = known_prompts(named.place)
        digest, parameters = weights_sha256(draft), sum(p.numel() for p in draft.parameters())
        config = hashlib.sha256(draft.config.model_dump_json().encode()).hexdigest()
        for n in named.ns:
            drafter = Drafter(
                name=f"{named.name} n = {n}",
                kind=kind_of(draft),
                n=n,
                draft="/".join(Path(named.place).parts[-2:]),
                weights_sha256=digest,
                config_sha256=config,
                parameters=parameters,
                trained_on=known is not None,
            )
            found.append(EngineContender(drafter, target, make_proposer(target, draft, n), known))
    return found


def transformers_contenders(
    target: Target, drafts: Sequence[NamedDraft], contenders: Sequence[Contender], name: str
) -> list[Contender]:
    """Transformers alone, and with the DFlash draft called `name`. Raises DsparkError when there is none."""
    named = next((one for one in drafts if one.name == name), None)
    if named is None:
        raise DsparkError("transformers", name, f"must be one of the drafts: {', '.join(one.name for one in drafts)}")
    draft = load_named_draft(named.place)
    width = f"{name} n = {draft.config.gamma}"
    own = next((one.drafter for one in contenders if one.drafter.name == width), None)
    if own is None or not isinstance(draft, DSparkDraft):
        raise DsparkError(
            "transformers", name, f"needs a DFlash draft that is also run here at n = {draft.config.gamma}"
        )
    return [*transformers_columns(target, draft, own, name)]


def known_prompts(place: str) -> frozenset[str] | None:
    """Hashes of the prompts that a draft was trained on; None when it does not tell."""
    path = draft_folder(place) / PROMPTS_FILE
    return read_prompt_hashes(path) if path.is_file() else None


def fitting(suite: Suite, renderer: ChatRenderer, target: Target, settings: BenchSettings) -> tuple[Suite, list[str]]:
    """The suite without the prompts whose first turn leaves less room than an answer takes in the target's context,
    and their ids."""
    kept: list[Prompt] = []
    left_out = []
    for prompt in suite.prompts:
        ids = renderer.prompt_ids([*settings.opening(), {"role": "user", "content": prompt.turns[0]}])
        if len(ids) + settings.max_tokens <= target.max_context:
            kept.append(prompt)
        else:
            left_out.append(prompt.id)
    source = suite.source + (f", {len(left_out)} of them left out" if left_out else "")
    return Suite(suite.name, kept, source), left_out


@torch.no_grad()
def fingerprint(target: Target, ids: Sequence[int]) -> str:
    """Which target this is, told by what it says after a fixed text: sha256 over its logits, 16 digits."""
    tokens = torch.tensor(list(ids))
    logits = target.forward([(target.new_state(len(tokens)), tokens)], logits="last").logits[-1].float().contiguous()
    return hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16]


def bench_in_process(
    target: Target,
    renderer: ChatRenderer,
    contenders: list[Contender],
    suites: Sequence[Suite],
    missing: Sequence[Missing],
    settings: BenchSettings,
    out: Path,
    *,
    chosen: dict[str, Any],
    progress: Callable[[str, int], None],
    texts: int = 1,
    answers: Mapping[str, Sequence[str]] | None = None,
) -> Report:
    """Run what the journal in `out` does not hold yet and make the report.

    chosen: settings for the report and the journal's header, beside those known here; answers: what a long prompt asks
    for, by its id. Raises DsparkError when no prompt is left, and what a request raises.
    """
    notes, missing, kept = [], list(missing), []
    for suite in suites:
        inside, left_out = fitting(suite, renderer, target, settings)
        if left_out:
            notes.append(
                f"{suite.name}: {len(left_out)} of {len(suite.prompts)} prompts leave no room for an answer of "
                f"{settings.max_tokens} tokens in the target's context of {target.max_context}, left out: "
                + ", ".join(left_out[:5])
                + (" ..." if len(left_out) > 5 else "")
            )
        if inside.prompts:
            kept.append(inside)
        else:
            missing.append(Missing(suite.name, f"no prompt fits the target's context of {target.max_context} tokens"))
    if not kept:
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in missing)
        raise DsparkError("suite", ", ".join(one.name for one in missing), f"none can be had: {reasons}")
    described = {
        **chosen,
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "kernels": kernels() or "none",
        "template": renderer.recipe()["template_sha256"],
        "thinking": renderer.thinking,
        **{key: value for key, value in asdict(settings).items() if key not in ("sampling", "batches", "speed_limit")},
        "batches": list(settings.batches),
        "sampling": _sampling(settings),
    }
    machine = describe_machine()
    rendered = _rendered(kept[0], renderer, settings)
    probe = renderer.prompt_ids([{"role": "user", "content": PROBE}])
    header = {
        **described,
        "fingerprint": fingerprint(target, probe),
        "machine": machine,
        "drafters": [[one.drafter.name, one.drafter.weights_sha256, one.drafter.config_sha256] for one in contenders],
        "prompts": {one.name: prompts_sha256(one.prompts) for one in kept},
    }
    bench = Bench(target, renderer, contenders, settings, Journal(out / "samples.jsonl", header), progress)
    samples: list[Sample] = []
    for suite in kept:
        found_here, left = bench.run(suite)
        samples += found_here
        notes += left
    found = Findings(
        kind="in process",
        target=target.name,
        settings={**described, "speed_limit": settings.speed_limit},
        drafters=[one.drafter for one in contenders],
        suites=kept,
        missing=missing,
        samples=samples,
        known={one.drafter.name: one.known for one in contenders},
        rendered=rendered,
        notes=[*notes, *_retrieval(samples, answers or {})],
        tokenizer=target.tokenizer,
    )
    return assemble(found, texts)


def _retrieval(samples: Sequence[Sample], answers: Mapping[str, Sequence[str]]) -> list[str]:
    """How much of what long prompts ask for is in plain decoding's answers."""
    plain = [one for one in samples if one.drafter == PLAIN and one.seconds is None and one.question in answers]
    if not plain:
        return []
    share = fmean(retrieved(answers[one.question], one.text or "") for one in plain)
    return [f"{plain[0].suite}: plain decoding's {len(plain)} answers hold {share:.0%} of what they are asked for"]


def _sampling(settings: BenchSettings) -> str:
    one = settings.sampling
    if one.greedy:
        return "greedy"
    return (
        f"temperature {one.temperature:g}, top_k {one.top_k}, top_p {one.top_p:g}, min_p {one.min_p:g}, seed {one.seed}"
    )


def _rendered(suite: Suite, renderer: ChatRenderer, settings: BenchSettings) -> Rendered:
    """The first prompt of a suite as the target reads it."""
    prompt = suite.prompts[0]
    ids = renderer.prompt_ids([*settings.opening(), {"role": "user", "content": prompt.turns[0]}])
    text = renderer.tokenizer.decode(ids)
    return Rendered(suite=suite.name, question=prompt.id, tokens=len(ids), text=text)

"""`dspark bench --endpoint`: from live servers and suites to a report.

The journal keeps what cannot be had again beside the samples: what counters told, the notes, and that a server changed.
So the same command typed again gives the same report, or the same refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark.bench.assemble import Findings, assemble, prompts_sha256
from dspark.bench.endpoint import ALL_TOKENS, Endpoint
from dspark.bench.endpoint_metrics import Counters, ServerChanged, added
from dspark.bench.in_process import known_prompts
from dspark.bench.live import LiveSettings, run_live
from dspark.bench.live_pairs import (
    BASELINE,
    ENDPOINT,
    Unit,
    cache_notes,
    check_prompt_tokens,
    counted_figures,
    facts,
    greedy_differences,
    place,
)
from dspark.bench.prompts import Missing, Suite
from dspark.bench.report import Drafter, Report
from dspark.bench.samples import Journal, Sample, unit_key
from dspark.checkpoints.builtin import EMBEDDED_DRAFT
from dspark.errors import DsparkError

NOTES, CHANGED = "notes", "server changed"
"""Names of facts in the journal."""


def bench_live(
    endpoint: Endpoint,
    baseline: Endpoint | None,
    suites: Sequence[Suite],
    missing: Sequence[Missing],
    settings: LiveSettings,
    out: Path,
    *,
    chosen: dict[str, Any],
    progress: Callable[[str, int], None],
) -> Report:
    """Ask what the journal in `out` does not hold yet and make the report. chosen: settings for the report and the
    journal's header, beside those known here. Raises DsparkError as `run_live` does, when the journal is of servers
    that are not these, and when no suite is left."""
    if not suites:
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in missing)
        raise DsparkError("suite", ", ".join(one.name for one in missing), f"none can be had: {reasons}")
    about = {name: one.check() for name, one in ((BASELINE, baseline), (ENDPOINT, endpoint)) if one is not None}
    addresses = {"endpoint": endpoint.url, "baseline": baseline.url if baseline else None}
    described = {**chosen, **addresses, "engine": endpoint.engine, "model": endpoint.model, **_settings(settings)}
    header = {
        **described,
        **{f"{side} {name}": value for side, told in about.items() for name, value in facts(told).items()},
        "prompts": {one.name: prompts_sha256(one.prompts) for one in suites},
    }
    journal = Journal(out / "samples.jsonl", header)
    _refuse_changed(journal)
    before = list(journal.samples())
    done = {(one.suite, one.group, one.drafter) for one in before}

    def keep(samples: list[Sample]) -> None:
        first = samples[0]
        journal.add(unit_key(first.suite, "live", first.group, first.drafter), samples)

    def ended(sample: Sample) -> None:
        progress(sample.suite, 1)

    def counted(unit: Unit, delta: Counters) -> None:
        journal.keep(_counts_of(*unit), delta.rows())

    def noted(text: str) -> None:
        known = journal.facts.get(NOTES, [])
        if text not in known:
            journal.keep(NOTES, [*known, text])

    for sample in before:
        ended(sample)
    try:
        prompts = {one.name: one.prompts for one in suites}
        run_live(prompts, endpoint, baseline, settings, ended, keep, done, counted, noted)
    except ServerChanged as error:
        journal.keep(CHANGED, [error.field, str(error.value), error.remedy])
        _refuse_changed(journal)
    samples = list(journal.samples())
    check_prompt_tokens(samples)
    units = dict.fromkeys((one.suite, one.group, one.drafter) for one in samples)
    server, gaps = counted_figures(samples, _counted(journal, units))
    known = {name: known_prompts(EMBEDDED_DRAFT) for name, told in about.items() if _is_embedded(told)}
    return assemble(
        Findings(
            kind="live",
            target=str(about[ENDPOINT].get("model")),
            settings={**described, **{f"server {name}": str(told) for name, told in about.items()}},
            drafters=[
                Drafter(
                    name=name,
                    kind="endpoint",
                    draft=_draft(told),
                    trained_on=True if known.get(name) is not None else None,
                )
                for name, told in about.items()
            ],
            suites=list(suites),
            missing=list(missing),
            samples=samples,
            known=known,
            baseline=BASELINE if baseline is not None else None,
            server=server,
            differences={} if settings.ask.temperature else greedy_differences(samples),
            notes=[*journal.facts.get(NOTES, []), *gaps, *cache_notes(samples), *_failures(samples)],
        )
    )


def _refuse_changed(journal: Journal) -> None:
    """Raises DsparkError where the journal says that a server changed while it was measured."""
    found = journal.facts.get(CHANGED)
    if found is not None:
        field, value, remedy = found
        remedy = f"{remedy}; what {journal.path} holds is of both, so give another --out or remove it"
        raise ServerChanged(field, value, remedy)


def _settings(settings: LiveSettings) -> dict[str, Any]:
    """What was chosen, without what means nothing beside it."""
    values = asdict(settings)
    values |= values.pop("ask")
    values["top_k"] = 0 if settings.ask.top_k == ALL_TOKENS else settings.ask.top_k
    unused = ["concurrency"] if settings.rate is not None else ["rate", "arrivals", "arrival_seed"]
    unused += ["limit"] if settings.limit is None else []
    return {name: value for name, value in values.items() if name not in unused}


def _draft(about: Mapping[str, Any]) -> str | None:
    """What the server says of its draft."""
    return ", ".join(f"{key} {value}" for key, value in about["speculative"].items() if value is not None) or None


def _is_embedded(about: Mapping[str, Any]) -> bool:
    """Whether it drafts with the draft that comes with this package."""
    return about["engine"] == "dspark" and about["speculative"].get("draft") == EMBEDDED_DRAFT


def _counted(journal: Journal, units: Iterable[Unit]) -> dict[Unit, Counters]:
    """What was counted while those groups were asked, as far as it was."""
    found = {}
    for suite, group, drafter in units:
        rows = journal.facts.get(_counts_of(suite, group, drafter))
        if rows is not None:
            try:
                found[suite, group, drafter] = added([rows])
            except (TypeError, ValueError):
                raise DsparkError("out", str(journal.path), "is damaged; remove it, or give another --out") from None
    return found


def _counts_of(suite: str, group: int, drafter: str) -> str:
    return unit_key(suite, "counted", group, drafter)


def _failures(samples: Sequence[Sample]) -> list[str]:
    return [f"failed: {place(one)}, {one.drafter}: {one.error}" for one in samples if one.error is not None]

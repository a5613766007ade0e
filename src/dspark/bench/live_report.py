"""`dspark bench --endpoint`: from live servers and suites to a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark.bench.assemble import Findings, assemble, prompts_sha256
from dspark.bench.endpoint import Endpoint
from dspark.bench.live import LiveRun, LiveSettings, run_live
from dspark.bench.live_pairs import BASELINE, ENDPOINT, greedy_differences
from dspark.bench.prompts import Missing, Suite
from dspark.bench.report import Drafter, Report
from dspark.bench.samples import Journal, Sample
from dspark.errors import DsparkError


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
    journal's header, beside those known here. Raises DsparkError as `run_live` does, and when no suite is left."""
    if not suites:
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in missing)
        raise DsparkError("suite", ", ".join(one.name for one in missing), f"none can be had: {reasons}")
    servers = {"endpoint": endpoint.url, "baseline": baseline.url if baseline else None}
    described = {**chosen, **servers, "engine": endpoint.engine, "model": endpoint.model, **_settings(settings)}
    header = {**described, "prompts": {one.name: prompts_sha256(one.prompts) for one in suites}}
    journal = Journal(out / "samples.jsonl", header)
    before = list(journal.samples())
    done = {(one.suite, one.group, one.drafter) for one in before}

    def keep(samples: list[Sample]) -> None:
        first = samples[0]
        journal.add(f"{first.suite} live {first.group} {first.drafter}", samples)

    def ended(sample: Sample) -> None:
        progress(sample.suite, 1)

    for sample in before:
        ended(sample)
    run = run_live({one.name: one.prompts for one in suites}, endpoint, baseline, settings, ended, keep, done)
    samples = list(journal.samples())
    drafters = [Drafter(name=name, kind="endpoint", draft=_draft(run, name)) for name in run.about]
    return assemble(
        Findings(
            kind="live",
            target=str(run.about[ENDPOINT].get("model")),
            settings={**described, **{f"server {name}": str(about) for name, about in run.about.items()}},
            drafters=drafters,
            suites=list(suites),
            missing=list(missing),
            samples=samples,
            baseline=BASELINE if baseline is not None else None,
            server={(suite, name): one for suite, told in run.server.items() for name, one in told.items()},
            differences={} if settings.ask.temperature else greedy_differences(samples),
            notes=[*run.notes, *_resumed(before, run), *_failures(samples)],
        )
    )


def _settings(settings: LiveSettings) -> dict[str, Any]:
    values = asdict(settings)
    return {**{key: value for key, value in values.items() if key != "ask"}, **values["ask"]}


def _draft(run: LiveRun, name: str) -> str | None:
    """What the server says of its draft."""
    told = run.about[name].get("speculative") or {}
    return ", ".join(f"{key} {value}" for key, value in told.items() if value is not None) or None


def _resumed(before: Sequence[Sample], run: LiveRun) -> list[str]:
    """Counters know the requests of this run alone."""
    suites = {one.suite for one in before} & set(run.server)
    return [f"{name}: the server's counters cover only the requests after the run was taken up" for name in suites]


def _failures(samples: Sequence[Sample]) -> list[str]:
    failed = [one for one in samples if one.error is not None]
    return [f"failed: {one.suite} {one.question} turn {one.turn + 1}, {one.drafter}: {one.error}" for one in failed]

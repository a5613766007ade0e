"""report.json: what a run of `dspark bench` found, complete, in one versioned schema (docs/method.md section 6).

Words: `acceptance length` counts the bonus, `accepted` does not. `macro`: mean over questions of the mean over their
requests; `micro`: 1 + accepted / rounds; `completion per round`: output tokens / rounds, which counts the prefill's
token and loses what a stop cut off, so it is never mixed with the other two. A figure over nothing is null.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dspark.data.prompts import write_text
from dspark.errors import DsparkError

FORMAT: Literal["dspark-bench"] = "dspark-bench"
VERSION: Literal[1] = 1


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Ratio(_Part):
    """A ratio with its percentile bootstrap interval over prompts; no interval from fewer than two groups of them."""

    value: float
    low: float | None = None
    high: float | None = None
    level: float = 0.95


class Spread(_Part):
    """Of something measured many times, in seconds."""

    mean: float
    p50: float
    p99: float


class Slot(_Part):
    """Conditional acceptance of one slot (1-based): of the rounds in which every earlier slot was accepted and this one
    was verified, those that accepted it."""

    slot: int
    accepted: int
    verified: int
    rate: float | None


class LengthBucket(_Part):
    """Questions whose answers have low <= output tokens < high (None: no end); shortest, longest: the actual range."""

    label: str
    low: int
    high: int | None
    questions: int
    shortest: int | None = None
    longest: int | None = None
    macro_length: float | None = None


class DepthBucket(_Part):
    """Rounds whose anchor has low <= tokens before it < high."""

    label: str
    low: int
    high: int | None
    rounds: int
    micro_length: float | None = None


class Acceptance(_Part):
    """Every acceptance figure of one drafter on one suite.

    source: `replay` walks the draft over plain decoding's answers, `served` counts a decode's own rounds, `server` is
    what a live engine told of itself (figures it does not tell are null).
    histogram[k]: rounds that accepted k draft tokens. without_rounds: requests that ended at the prefill's token.
    """

    source: Literal["replay", "served", "server"]
    questions: int
    requests: int
    without_rounds: int = 0
    looping: int = 0
    rounds: int
    unscheduled_rounds: int = 0
    macro_length: float | None
    micro_length: float | None
    completion_per_round: float | None
    macro_length_without_loops: float | None = None
    micro_length_without_loops: float | None = None
    completion_per_round_without_loops: float | None = None
    histogram: list[int] = []
    conditional: list[Slot] = []
    by_output_length: list[LengthBucket] = []
    by_context_depth: list[DepthBucket] = []
    partitions: dict[str, float | None] = {}
    partition_questions: dict[str, int] = {}


class Speed(_Part):
    """Speed of one drafter on one suite with `batch` requests in flight; ratios are over plain decoding (or the
    baseline endpoint) of the same prompts in the same run, paired.

    time_per_token: of each request (t_last - t_first) / (n - 1); inter_token: the gaps between its chunks, which hold
    more than one token where a round does. draft_seconds, verify_seconds: a round's; engine_share: of the time between
    a request's first and last token, what lay outside the models' passes; bench_share: of the same, what lay outside
    the engine, the bench's own overhead.
    """

    batch: int
    questions: int
    requests: int
    failed: int = 0
    tokens: int
    tokens_per_s: float | None
    decode_tokens_per_s: float | None
    speedup: Ratio | None = None
    decode_speedup: Ratio | None = None
    first_token: Spread | None = None
    time_per_token: Spread | None = None
    inter_token: Spread | None = None
    latency: Spread | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    engine_share: float | None = None
    bench_share: float | None = None


class Drafter(_Part):
    """A column. kind: plain, dspark, dflash, eagle3, eagle3-mla, endpoint, or transformers and transformers-dflash (not
    our engine). n: draft tokens a round (0: plain; None: the server's own). trained_on: whether the draft lists the
    prompts it was trained on."""

    name: str
    kind: str
    n: int | None = None
    draft: str | None = None
    weights_sha256: str | None = None
    config_sha256: str | None = None
    parameters: int | None = None
    trained_on: bool | None = None


class Column(_Part):
    """What one drafter did on one suite. failed: requests that ended in an error (never repeated); compared,
    replay_checked: served requests whose ids were set beside plain decoding's, whose rounds beside the replay's."""

    acceptance: Acceptance | None = None
    speed: list[Speed] = []
    failed: int = 0
    compared: int = 0
    replay_checked: int = 0
    note: str | None = None


class SuiteReport(_Part):
    """One suite. flagged: its prompts that are in some draft's training set, reported apart as the suite
    `NAME (trained on)` and in no mean. lossless: differences from plain decoding that are no ties, and the ties.
    shortest_prompt, longest_prompt: the prompts' true span in tokens, as the target read them."""

    name: str
    source: str
    prompts_sha256: str
    questions: int
    speed_questions: int
    shortest_prompt: int | None = None
    longest_prompt: int | None = None
    looping: int = 0
    apart: bool = False
    flagged: list[str] = []
    ties: list[str] = []
    not_lossless: list[str] = []
    replay_checked: int = 0
    replay_ties: list[str] = []
    replay_faults: list[str] = []
    columns: dict[str, Column]


class MissingSuite(_Part):
    """A suite that was asked for and could not be had."""

    name: str
    reason: str


class Overall(_Part):
    """Simple unweighted means over the suites that are not `apart`, speed at the smallest `batch`; null where one suite
    lacks the figure, and for acceptance over fewer prompts than the others'."""

    drafter: str
    suites: int
    batch: int | None = None
    mean_speedup: float | None = None
    mean_decode_speedup: float | None = None
    mean_macro_length: float | None = None
    mean_macro_length_without_loops: float | None = None


class Change(_Part):
    """One draft's mean speedup at the run's smallest and largest width and the relative change, as the published table
    has it; null where the draft was not run at one of them."""

    draft: str
    low_n: int
    high_n: int
    low: float | None
    high: float | None
    change: float | None


class Piece(_Part):
    """Text of one round by its owner; round 0 is the prompt's pass."""

    text: str
    round: int
    owner: Literal["draft", "target"]
    accepted: int = 0
    scheduled: int = 0


class Answer(_Part):
    """One answer as text, cut into rounds."""

    suite: str
    question: str
    drafter: str
    prompt: str
    pieces: list[Piece]
    length: float | None


class Rendered(_Part):
    """One prompt as the target read it."""

    suite: str
    question: str
    tokens: int
    text: str


class Report(_Part):
    """A whole run. settings: label -> value, everything that was chosen; machine: what it ran on; notes: what could
    not be measured, and why."""

    format: Literal["dspark-bench"] = FORMAT
    version: Literal[1] = VERSION
    created: str
    dspark: str
    kind: Literal["in process", "live"]
    target: str
    settings: dict[str, Any]
    machine: dict[str, str]
    baseline: str | None = "plain"
    drafters: list[Drafter]
    suites: list[SuiteReport]
    missing: list[MissingSuite] = []
    overall: list[Overall] = []
    changes: list[Change] = []
    rendered: Rendered | None = None
    answers: list[Answer] = []
    notes: list[str] = []


def write_report(report: Report, path: Path) -> None:
    """Write report.json atomically."""
    write_text(path, report.model_dump_json(indent=1) + "\n")


def read_report(path: str | Path) -> Report:
    """Read report.json, or the one in a folder. Raises DsparkError when it is none, or of another version."""
    path = Path(path)
    path = path / "report.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DsparkError("report", str(path), "is not there; give a report.json written by `dspark bench`") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DsparkError("report", str(path), f"cannot be read as JSON ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise DsparkError("report", str(path), "is not a report of `dspark bench`")
    if values.get("version") != VERSION:
        raise DsparkError("version", values.get("version"), f"this dspark reads version {VERSION}; bench again")
    try:
        return Report.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DsparkError("report", f"{path}: {place}", first["msg"]) from None

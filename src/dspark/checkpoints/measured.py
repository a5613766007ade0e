"""What a model card says of a draft's figures: the parts of a report.json (`dspark bench`) that are about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.checkpoints.native import load_draft, weights_sha256
from dspark.errors import DsparkError

Json = Mapping[str, Any]
UNKNOWN = "not recorded"


def dig(value: Any, *keys: str) -> Any:
    """value[key][key]..., None where one is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def said(value: Any, form: str = "") -> str:
    """A value as text; None is `not recorded`, a path is its last name."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) and value.startswith("/"):
        return Path(value).name
    if isinstance(value, (list, tuple)):
        return ", ".join(said(one) for one in value)
    return format(value, form)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object. Raises DsparkError when the file is missing or holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise DsparkError(path.name, str(path), f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DsparkError(path.name, str(path), f"is not JSON ({error}); make it again") from None
    if not isinstance(found, dict):
        raise DsparkError(path.name, str(path), "must hold one JSON object; make it again")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def read_measured(path: str | Path, folder: str | Path) -> dict[str, Any]:
    """The report (version 1) at `path` with the columns of the draft in `folder` alone. Raises DsparkError when it has
    none: it is of another draft, or does not tell."""
    report = read_json(Path(path))
    if report.get("format") != "dspark-bench" or report.get("version") != 1:
        raise DsparkError("measured", str(path), "is no report.json of `dspark bench` that this version reads")
    again = f"measure this draft: dspark bench --draft mine={folder} --data DIR"
    drafters = [one for one in report.get("drafters") or [] if isinstance(one, Mapping) and one.get("weights_sha256")]
    if not drafters:
        raise DsparkError("measured", str(path), f"does not say which weights it measured; {again}")
    digest = weights_sha256(load_draft(folder))
    own = [one for one in drafters if one["weights_sha256"] == digest and one.get("kind") in ("dspark", "dflash")]
    if not own:
        names = sorted({str(one.get("draft")) for one in drafters})
        raise DsparkError("measured", str(path), f"holds figures of other weights, of {', '.join(names)}; {again}")
    return {**report, "drafters": own}


def measured_section(report: Json | None) -> str:
    """The section `Measured`."""
    if report is None:
        return f"## Measured\nAcceptance and speedup on public suites are {UNKNOWN}."
    settings = report.get("settings") or {}
    rows = [
        _row(suite, drafter, suite["columns"].get(drafter["name"]) or {})
        for suite in report["suites"]
        for drafter in report["drafters"]
    ]
    headers = ("suite", "n", "acceptance", "without loops", "end to end", "decode only", "accepted at slot 1, 2, ...")
    machine = "; ".join(f"{label} {value}" for label, value in (report.get("machine") or {}).items()) or UNKNOWN
    return f"""## Measured
Acceptance length: tokens a round, bonus counted, macro over prompts; without loops: answers that end in a loop left
out. Slot k: accepted among the rounds that accepted those before it, bonus not counted. Speedup: over plain decoding,
paired, with a 95 % bootstrap interval over prompts.

{table(headers, rows)}

{_means(report)}

Both sides: the same engine and process, target {said(report.get("target"))} in {said(settings.get("dtype"))}
(weights kept {said(settings.get("storage"))}), {said(settings.get("threads"))} threads,
{said(settings.get("sampling"))}, up to {said(settings.get("max_tokens"))} new tokens,
{said(settings.get("limit"))} prompts of each suite at most. Plain: no draft, one token a pass.

Machine and versions: {machine}."""


def _row(suite: Json, drafter: Json, column: Json) -> list[str]:
    accepted = column.get("acceptance")
    speed = next(iter(column.get("speed") or []), None)
    rates = [slot["rate"] for slot in dig(accepted, "conditional") or []]
    return [
        f"{suite['name']} ({suite['looping']} of {suite['questions']} loop, {suite['speed_questions']} timed)",
        said(drafter.get("n")),
        said(dig(accepted, "macro_length"), ".2f"),
        said(dig(accepted, "macro_length_without_loops"), ".2f"),
        _interval(dig(speed, "speedup")),
        _interval(dig(speed, "decode_speedup")),
        " ".join("-" if rate is None else f"{rate:.2f}" for rate in rates),
    ]


def _interval(value: Json | None) -> str:
    if value is None:
        return UNKNOWN
    ends = "" if value.get("low") is None else f" [{value['low']:.2f}, {value['high']:.2f}]"
    return f"{value['value']:.2f}x{ends}"


def _means(report: Json) -> str:
    """Unweighted means over the suites."""
    names = {one["name"] for one in report["drafters"]}
    rows = []
    for one in report.get("overall") or []:
        if one["drafter"] in names:
            speedup = one["mean_speedup"]
            rows.append(
                [
                    f"mean over {one['suites']} suites, {one['drafter']}",
                    said(one["mean_macro_length"], ".2f"),
                    said(one["mean_macro_length_without_loops"], ".2f"),
                    UNKNOWN if speedup is None else f"{speedup:.2f}x",
                ]
            )
    return table(("unweighted", "acceptance", "without loops", "end to end"), rows)


def measured_limits(report: Json | None) -> list[str]:
    """Lines of the section `Limits`."""
    if report is None:
        return [f"What it gains on prompts of other kinds is {UNKNOWN}."]
    suites, names = report["suites"], [one["name"] for one in report["drafters"]]
    columns = [suite["columns"].get(name) or {} for suite in suites for name in names]

    def lines(field: str) -> int:
        return sum(any(f", {name}," in line for name in names) for suite in suites for line in suite[field])

    compared, faults, ties = sum(one.get("compared", 0) for one in columns), lines("not_lossless"), lines("ties")
    ids = f"All ids of {compared} timed answers equal plain decoding's."
    if not compared:
        ids = "Its ids were not compared with plain decoding's in this run: nothing was timed."
    elif faults or ties:
        ids = f"Answers whose ids left plain decoding's: {ties} at ties of the target, {faults} others, of {compared}."
    apart = sum(one["questions"] for one in suites if one["apart"])
    asked = sum(one["questions"] for one in suites)
    known = f"{apart} of {asked} prompts are in the draft's training set"
    if not all(one.get("trained_on") for one in report["drafters"]):
        known = "whether they are in the draft's training set is not recorded"
    checked = sum(one.get("replay_checked", 0) for one in columns)
    parted = lines("replay_ties") + lines("replay_faults")
    return [
        "Speed holds for the machine and settings above; acceptance for these prompts and this length of answers.",
        ids,
        f"Measured prompts: {known}.",
        f"Replay equals served on {checked - parted} of {checked} answers, round by round.",
    ]

"""From what is stored of a pair to the schedule its engine runs by, and the line that says which one it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dspark.calibration.cost import CostProfile
from dspark.calibration.profiles import changes, profile_path
from dspark.calibration.stored import Calibration, read_calibration
from dspark.checkpoints.native import weights_sha256
from dspark.decoding.planner import Mode, Planner, Schedule, Threshold
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError
from dspark.targets.base import Target

Choice = Literal["auto", "fixed", "early-stop", "delayed"]
CHOICES: tuple[Choice, ...] = ("auto", "fixed", "early-stop", "delayed")


@dataclass(frozen=True)
class Known:
    """What is stored of a draft: its calibration and a profile that holds here, and why one of them is missing."""

    calibration: Calibration | None
    profile: CostProfile | None
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Chosen:
    """schedule: for the engine (None: all n); scaling: of confidences, for the proposer; line: which, and why."""

    schedule: Schedule | None
    scaling: tuple[tuple[float, float], ...] | None
    line: str


def know(target: Target, draft: Draft, folder: Path, n: int, sha256: str) -> Known:
    """Read what is stored; what does not fit is named in `missing`, never used."""
    calibration, profile, missing = None, None, []
    try:
        if _rates(draft):
            calibration = read_calibration(folder)
            if calibration is None:
                missing.append("no calibration.json beside the draft")
            else:
                calibration.check(sha256, draft.config.gamma)
    except DsparkError as error:
        calibration = None
        missing.append(str(error))
    path = profile_path(target, sha256)
    try:
        profile = CostProfile.load(path) if path.is_file() else None
        if profile is None:
            missing.append("no cost profile of this pair on this machine")
        elif found := changes(profile, target, n):
            profile = None
            missing.append(f"the cost profile was measured otherwise ({', '.join(found)})")
    except DsparkError as error:
        missing.append(str(error))
    return Known(calibration, profile, tuple(missing))


def choose_schedule(
    target: Target,
    draft: Draft | None,
    folder: Path,
    n: int | None = None,
    choice: str = "auto",
    threshold: float | None = None,
    domain: str | None = None,
) -> Chosen:
    """The schedule for an engine of this pair. To be called before `make_proposer`, which packs the draft's weights.

    `auto` schedules when there are temperatures (where the draft has a confidence head) and costs, and else verifies
    all n; the other choices raise DsparkError then. threshold: a static one instead.
    """
    if choice not in CHOICES:
        raise DsparkError("schedule", choice, f"must be one of {', '.join(CHOICES)}")
    if draft is None:
        if choice in ("early-stop", "delayed") or threshold is not None:
            raise DsparkError("schedule", choice, "plain decoding has no drafts to schedule; leave it out")
        return Chosen(None, None, "plain decoding")
    whole = draft.config.gamma if n is None else n
    if threshold is not None:
        return _static(draft, folder, whole, choice, threshold)
    if choice == "fixed":
        return Chosen(None, None, f"fixed: all {whole} drafts are verified")
    known = know(target, draft, folder, whole, weights_sha256(draft))
    if known.missing:
        why = "; ".join(known.missing)
        remedy = f"dspark calibrate{' --profile-only' if known.calibration or not _rates(draft) else ''} makes it anew"
        if choice != "auto":
            raise DsparkError("schedule", choice, f"cannot be: {why}; {remedy}")
        return Chosen(None, None, f"fixed: all {whole} drafts are verified ({why}; {remedy})")
    assert known.profile is not None  # nothing is missing
    mode: Mode = "auto" if choice == "auto" else "delayed" if choice == "delayed" else "early-stop"
    scaling = None if known.calibration is None else known.calibration.of(domain)
    by = "past acceptance, without a confidence head" if scaling is None else "calibrated confidences"
    line = f"scheduled ({mode}): up to {whole} drafts, by {by}"
    return Chosen(Planner(known.profile, whole, mode), scaling, line)


def _static(draft: Draft, folder: Path, n: int, choice: str, threshold: float) -> Chosen:
    if choice not in ("auto", "fixed"):
        raise DsparkError("schedule", choice, "does not go with --confidence-threshold; give one of the two")
    if not 0 <= threshold <= 1:
        raise DsparkError("confidence_threshold", threshold, "must be in 0..1")
    if not _rates(draft):
        raise DsparkError("confidence_threshold", threshold, "this draft has no confidence head to hold against it")
    found = read_calibration(folder)
    if found is not None:
        found.check(weights_sha256(draft), draft.config.gamma)
    kind = "raw" if found is None else "calibrated"
    scaling = None if found is None else found.scaling
    return Chosen(
        Threshold(threshold),
        scaling,
        f"static: up to {n} drafts, while their {kind} confidence is at least {threshold:g}",
    )


def _rates(draft: Draft) -> bool:
    """Whether the draft has a confidence head."""
    return isinstance(draft, DSparkDraft) and draft.confidence_head is not None

"""Whether the draft was made for this target: its depth, width and name, and the layers that it taps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dspark.doctor.facts import TargetFacts, recipe_drafts
from dspark.doctor.findings import Finding
from dspark.drafts.kinds import Config


def check_shape(config: Config, target: TargetFacts) -> Iterator[Finding]:
    """target-depth and target-width: the numbers that a layer id and a tap's width depend on."""
    for check, what, mine, theirs in (
        ("target-depth", "layers", config.num_target_layers, target.depth),
        ("target-width", "wide", config.hidden_size, target.width),
    ):
        if theirs is None:
            yield Finding(check, "skipped", f"the draft is for a target of {mine} {what}; {target.missing}")
        elif mine != theirs:
            yield Finding(
                check,
                "broken",
                f"the draft is for a target of {mine} {what}, {target.name} has {theirs}: not its draft",
            )
        else:
            yield Finding(check, "ok", f"{mine} {what}, as the target")


def check_name(config: Config, target: TargetFacts) -> Finding:
    """target-name. A folder has no name of its own, so only two hub names can contradict each other."""
    mine, theirs = config.target_name, target.name
    if _stem(mine) == _stem(theirs):
        return Finding("target-name", "ok", f"made for {mine}")
    text = f"the draft was made for {mine!r}, the target is {theirs!r}"
    if _is_place(mine) or _is_place(theirs):
        return Finding("target-name", "note", f"{text}: by the name it cannot be told whether they are the same")
    return Finding("target-name", "loses", f"{text}: another target of the same shape is guessed worse")


def _stem(name: str) -> str:
    return Path(name.replace(":", "/")).name.lower()


def _is_place(name: str) -> bool:
    return Path(name).is_dir() or name.startswith(("/", ".", "~")) or name.count("/") > 1


def check_layer_ids(config: Config, target: TargetFacts) -> Finding:
    """layer-ids: inside the target (read so already), in order, and not all one off from what others tap."""
    taps, depth = list(config.target_layer_ids), target.depth or config.num_target_layers
    shown = f"taps {taps} of layers 0..{depth - 1}"
    outside = [tap for tap in taps if tap >= depth]
    if outside:
        return Finding("layer-ids", "broken", f"{shown}: {outside[0]} is no layer of the target")
    if taps != sorted(taps):
        text = f"{shown}: not ascending, and engines hand them over in ascending order; dspark convert sorts them"
        return Finding("layer-ids", "note", text)
    shift, source = _shifted(taps, config, target)
    if shift:
        moved = [tap - shift for tap in taps]
        text = (
            f"{shown}: exactly {shift:+d} from {moved}, {source}; ids may count a layer's input instead of its output"
        )
        return Finding("layer-ids", "note", text)
    return Finding("layer-ids", "ok", shown)


def _shifted(taps: Sequence[int], config: Config, target: TargetFacts) -> tuple[int, str]:
    """By how much (+1 or -1) the taps are off from a published draft's or the usual ones, and whose those are."""
    known = {f"of the recipe {name}": list(one.target_layer_ids) for name, one in recipe_drafts(target.name).items()}
    known |= {"the usual ones for this depth": usual_taps(config.num_target_layers, len(taps))}
    if list(taps) in known.values():
        return 0, ""
    for source, ids in known.items():
        for shift in (1, -1):
            if list(taps) == [tap + shift for tap in ids]:
                return shift, source
    return 0, ""


def usual_taps(depth: int, count: int) -> list[int]:
    """Evenly spaced from layer 1 to depth - 3, as DFlash's and DeepSpec's training code does without other orders."""
    if count == 1:
        return [depth // 2]
    return [round(1 + index * (depth - 4) / (count - 1)) for index in range(count)]

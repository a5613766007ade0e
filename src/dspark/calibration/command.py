"""`dspark calibrate`: rounds on prompts that the draft was not trained on, temperatures, costs, and exports of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from dspark.calibration.cost import CostProfile
from dspark.calibration.export import export
from dspark.calibration.figures import reliability_png, write_page
from dspark.calibration.profiles import changes, measure_profile, profile_path
from dspark.calibration.rounds import Rounds, collect_rounds, joined, rounds_of_rows
from dspark.calibration.schedule import know
from dspark.calibration.stored import Calibration, Measured, slots
from dspark.calibration.temperature import assess, fit_scaling, fit_temperatures, of_temperatures
from dspark.checkpoints.builtin import EMBEDDED_DRAFT, draft_folder, load_named_draft
from dspark.checkpoints.native import PROMPTS_FILE, weights_sha256
from dspark.data.chat import ChatRenderer
from dspark.data.notes import read_notes
from dspark.data.prompts import Prompt, demo_prompts, prompt_hash, read_prompt_hashes, read_prompts
from dspark.data.rows import check_ids, read_rows
from dspark.decoding.drafting import DraftProposer
from dspark.decoding.proposers import make_proposer
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError
from dspark.targets.base import Target
from dspark.targets.embedded import EMBEDDED
from dspark.targets.transformers import load_target
from dspark.training.features import feature_source

console = Console(stderr=True, soft_wrap=True)
ENOUGH = 1000
"""Rounds below which a fit is mostly noise: it is done, and said."""


def calibrate_command(
    target: Annotated[str, typer.Option(help="Model folder, hub name, or the embedded target.")] = EMBEDDED,
    draft: Annotated[str, typer.Option(help="Draft folder, or `embedded` (the shipped one).")] = EMBEDDED_DRAFT,
    suite: Annotated[
        str | None, typer.Option(help="Data sets to fit on: gsm8k,mbpp (`demo`: the shipped one).")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of <suite>.jsonl files; all of them without --suite.")
    ] = None,
    unseen: Annotated[str | None, typer.Option(help="Data sets to report on without fitting on them.")] = None,
    unseen_data: Annotated[Path | None, typer.Option(help="Folder of those; default: that of --data.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each data set at most, in the order of a hash.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=2, help="Answer tokens at most.")] = 256,
    rows: Annotated[
        list[Path] | None,
        typer.Option(help="Rows that the target wrote greedily, with their features if kept: in place of prompts."),
    ] = None,
    by_domain: Annotated[bool, typer.Option("--by-domain", help="Temperatures of each data set as well.")] = False,
    rounds: Annotated[Path | None, typer.Option(help="Rounds collected before (rounds.npz): fit on them.")] = None,
    unseen_rounds: Annotated[Path | None, typer.Option(help="Such a file to report on without fitting.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for rounds and reliability diagrams.")] = None,
    profile_only: Annotated[bool, typer.Option("--profile-only", help="Measure costs, fit nothing.")] = False,
    no_profile: Annotated[bool, typer.Option("--no-profile", help="Fit temperatures, measure no costs.")] = False,
    save_to: Annotated[Path | None, typer.Option(help="Folder for calibration.json; default: the draft's.")] = None,
    export_for: Annotated[
        Literal["sglang", "vllm"] | None, typer.Option("--export", help="Write an engine's files of what is stored.")
    ] = None,
    export_out: Annotated[Path | None, typer.Option(help="Folder for them.")] = None,
    n: Annotated[int | None, typer.Option("-n", help="For --export: draft tokens a round there; default: all.")] = None,
) -> None:
    """Calibrate a draft's confidences and measure what passes cost here, for scheduled verification."""
    if profile_only and no_profile:
        raise DsparkError("profile_only", True, "cannot be combined with --no-profile")
    folder, drafted = draft_folder(draft), load_named_draft(draft)
    sha256 = weights_sha256(drafted)
    if export_for is not None:
        if save_to is not None:
            remedy = "is not for --export, which reads what lies with the --draft; copy it there first"
            raise DsparkError("save_to", str(save_to), remedy)
        return _export(export_for, export_out, target, drafted, n, folder, sha256)
    if n is not None:
        raise DsparkError("n", n, "is for --export alone; all of the draft's slots are calibrated")
    ways = [name for name, given in (("rounds", rounds), ("rows", rows), ("suite", suite or data)) if given]
    if len(ways) != 1 and not profile_only:
        named = " and ".join(ways) or None
        raise DsparkError("suite", named, "give one of --suite (or --data), --rows and --rounds, or --profile-only")
    if not profile_only and save_to is None and folder == draft_folder(EMBEDDED_DRAFT):
        remedy = "give a folder: the shipped draft keeps its own. To use another one, calibrate a copy of the draft"
        raise DsparkError("save_to", None, f"{remedy} (dspark convert embedded --to native COPY)")
    known = _trained_on(folder)
    asked = {} if profile_only or rounds or rows else _suites(suite, data, limit, known)
    others = _suites(unseen, unseen_data or data, limit, known) if unseen or unseen_data else {}
    loaded = load_target(target)
    if not profile_only:
        used = (
            _of_rows(rows, loaded, drafted, known, out)
            if rows
            else _rounds(rounds, loaded, drafted, asked, max_tokens, out, "rounds.npz")
        )
        apart = _rounds(unseen_rounds, loaded, drafted, others, max_tokens, out, "unseen.npz")
        found = _fit(used, apart, by_domain, sha256, loaded.name, out)
        path = found.save(save_to or folder)
        typer.echo(f"temperatures {slots(found.temperatures, '.2f', 1)}, written to {path}")
    if not no_profile:
        typer.echo(_profile(loaded, drafted, draft, sha256))


def _suites(names: str | None, data: Path | None, limit: int, known: frozenset[str] | None) -> dict[str, list[Prompt]]:
    """Prompts by data set, those left out that the draft was trained on. Raises DsparkError when none is left."""
    if names is None and data is not None:
        names = ",".join(file.stem for file in sorted(data.glob("*.jsonl")))
    found = {}
    for name in (names or "").split(","):
        prompts = (
            demo_prompts()
            if name == "demo" and data is None
            else read_prompts(f"hub:{name}" if data is None else data / f"{name}.jsonl", seed=0)
        )
        kept = [one for one in prompts if known is None or prompt_hash(one.turns[0]) not in known]
        if not kept:
            raise DsparkError("suite", name, "the draft was trained on all of its prompts; name others")
        if len(kept) < len(prompts):
            console.print(f"{name}: {len(prompts) - len(kept)} of {len(prompts)} prompts were trained on, left out")
        found[name] = kept[:limit]
    return found


def _trained_on(folder: Path) -> frozenset[str] | None:
    path = folder / PROMPTS_FILE
    if path.is_file():
        return read_prompt_hashes(path)
    console.print("this draft does not list the prompts it was trained on: whether these are held out is not known")
    return None


def _rounds(
    stored: Path | None,
    target: Target,
    draft: Draft,
    suites: dict[str, list[Prompt]],
    max_tokens: int,
    out: Path | None,
    name: str,
) -> Rounds | None:
    if stored is not None:
        found = Rounds.load(stored)
        if found.logits.shape[1] != draft.config.gamma:
            remedy = (
                f"are of {found.logits.shape[1]} slots, the draft predicts {draft.config.gamma}; collect them again"
            )
            raise DsparkError("rounds", str(stored), remedy)
        return found
    if not suites:
        return None
    proposer = make_proposer(target, draft, confidence=True)
    assert isinstance(proposer, DraftProposer)  # a draft was given
    count = sum(map(len, suites.values()))
    with console.status("rounds") as status:
        found = collect_rounds(
            target,
            proposer,
            ChatRenderer(target.tokenizer),
            suites,
            max_tokens,
            lambda prompts, made: status.update(f"{prompts} of {count} prompts answered, {made:,} rounds"),
        )
    if out is not None:
        found.save(out / name)
    return found


def _of_rows(files: list[Path], target: Target, draft: Draft, known: frozenset[str] | None, out: Path | None) -> Rounds:
    """Rounds of rows whose prompts the draft was not trained on. Raises DsparkError when there are none to walk."""
    proposer = make_proposer(target, draft, confidence=True)
    assert isinstance(proposer, DraftProposer)  # a draft was given
    parts = []
    for file in files:
        notes, rows = read_notes(file), [row for row in read_rows(file) if len(row.answer_ids) > 1]
        check_ids(rows, target.vocab_size)
        if notes is not None and notes.target not in (None, target.name):
            raise DsparkError("rows", str(file), f"was written by {notes.target!r}, not by {target.name!r}")
        if any(row.temperature > 0 for row in rows):
            raise DsparkError("rows", str(file), "has sampled answers; confidences are calibrated on greedy ones")
        kept = [row for row in rows if known is None or row.prompt_hash not in known]
        if not kept:
            raise DsparkError("rows", str(file), "has no answer to a prompt that the draft was not trained on")
        console.print(f"{file}: {len(kept):,} of {len(rows):,} rows are held out")
        source = feature_source(file, target, proposer.taps)
        with console.status("rounds") as status:
            parts.append(
                rounds_of_rows(
                    proposer,
                    kept,
                    source,
                    target.max_context,
                    lambda answers, made: status.update(f"{answers:,} of {len(kept):,} answers, {made:,} rounds"),  # noqa: B023
                )
            )
    found = joined(parts)
    if out is not None:
        found.save(out / "rounds.npz")
    return found


def _fit(
    used: Rounds | None,
    apart: Rounds | None,
    by_domain: bool,
    sha256: str,
    target: str,
    out: Path | None,
) -> Calibration:
    """Fit on one half of the prompts of every data set, report on the other and on data sets not fitted on."""
    assert used is not None  # asked for, or refused before
    fit, held_out = used.halves()
    if len(fit) < ENOUGH:
        console.print(f"{len(fit)} rounds are few to fit on; give more prompts (--limit)")
    temperatures, scaling = fit_temperatures(fit), fit_scaling(fit)
    names = sorted(set(used.domain.tolist()))
    domains = {name: fit_scaling(fit.where(fit.domain == name)) for name in names} if by_domain else {}
    raw, scaled = of_temperatures([1.0] * len(temperatures)), of_temperatures(temperatures)
    measured, pictures = {}, {}
    sets = {"all": held_out, **{name: held_out.where(held_out.domain == name) for name in names}}
    if apart is not None:
        sets |= {f"{name} (not fitted on)": apart.where(apart.domain == name) for name in sorted(set(apart.domain))}
        sets["not fitted on, together"] = apart
    for name, rounds in sets.items():
        if len(rounds):
            before, after = assess(rounds, raw), assess(rounds, domains.get(name, scaling))
            pictures[name] = reliability_png(before, after) if out is not None else b""
            measured[name] = Measured(
                rounds=len(rounds),
                prompts=len(set(zip(rounds.domain.tolist(), rounds.prompt.tolist(), strict=True))),
                ece_before=tuple(one.error for one in before),
                ece_temperatures=tuple(one.error for one in assess(rounds, scaled)),
                ece_after=tuple(one.error for one in after),
                ece_after_low=tuple(one.low for one in after),
                ece_after_high=tuple(one.high for one in after),
                auc=tuple(one.auc for one in after),
            )
            typer.echo(_line(name, measured[name]))
    found = Calibration(
        weights_sha256=sha256,
        target=target,
        temperatures=temperatures,
        scaling=scaling,
        domains=domains,
        datasets=tuple(names),
        rounds=len(fit),
        prompts=len(set(zip(fit.domain.tolist(), fit.prompt.tolist(), strict=True))),
        measured=measured,
    )
    if out is not None:
        for path in write_page(out, found, pictures):
            typer.echo(f"written to {path}")
    return found


def _line(name: str, one: Measured) -> str:
    return (
        f"{name}: {one.rounds:,} rounds of {one.prompts} prompts; ECE, % by slot: raw {slots(one.ece_before)}, "
        f"temperatures {slots(one.ece_temperatures)}, scaled {slots(one.ece_after)} "
        f"(95 %: up to {slots(one.ece_after_high)}); AUC {slots(one.auc, '.2f', 1)}"
    )


def _profile(target: Target, draft: Draft, name: str, sha256: str) -> str:
    """Measure the costs and store them; a line that says where, and what had changed since the last time."""
    path = profile_path(target, sha256)
    before = ""
    if path.is_file():
        try:
            changed = changes(CostProfile.load(path), target, draft.config.gamma)
            before = f" (measured again: {', '.join(changed)})" if changed else " (measured again, nothing had changed)"
        except DsparkError as error:
            before = f" (measured again: {error})"
    with console.status("costs of passes"):
        profile = measure_profile(target, draft, Path(name).name)
    profile.save(path)
    one, eight = profile.verify_seconds(1), profile.verify_seconds(8)
    return (
        f"costs{before}: a pass of 1 token {1e3 * one:.1f} ms, of 8 tokens {1e3 * eight:.1f} ms; a draft of "
        f"{profile.settings.n} {1e3 * profile.draft_seconds(1):.1f} ms; written to {path}"
    )


def _export(
    engine: Literal["sglang", "vllm"],
    out: Path | None,
    target: str,
    draft: Draft,
    n: int | None,
    folder: Path,
    sha256: str,
) -> None:
    if out is None:
        raise DsparkError("export_out", None, "give the folder that the files go to")
    width = draft.config.gamma if n is None else n
    draft.config.slots(width)
    known = know(load_target(target), draft, folder, width, sha256)
    for line in known.missing:
        console.print(f"left out: {line}")
    paths, notes = export(engine, out, str(folder), width, known.calibration, known.profile)
    for path in paths:
        typer.echo(f"written to {path}")
    for note in notes:
        typer.echo(note)

"""How much of the draft is accepted, and whether the files read otherwise would accept more: the other slot layout,
layer ids one off, another depth, thinking on or off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

import torch

from dspark.checkpoints.record import read_training
from dspark.data.chat import ChatRenderer
from dspark.decoding.request import Round
from dspark.decoding.text import decode
from dspark.doctor.blocks import states_fp16
from dspark.doctor.draft import DraftFacts
from dspark.doctor.findings import Finding
from dspark.doctor.states import first_draft
from dspark.doctor.template import Mode
from dspark.doctor.trial import Answers, Interval, answer, conversation, lengths, macro, mean_interval, render, walk
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.kinds import Config, Draft
from dspark.errors import DsparkError
from dspark.targets.base import Target

NOTHING, LOW = 1.05, 1.5
"""Acceptance lengths below which a draft guesses nothing, and below which the other slot layout is tried."""
_RECORDED = 0.75
"""Share of the acceptance length recorded in training below which, beyond chance, something happened to the draft."""
_FALL = 0.6
"""Share of the accepted tokens (bonus not counted) that another condition may leave before it is named."""


def check_first_draft(target: Target, draft: DraftFacts, answers: Answers) -> Iterator[Finding]:
    """first-draft: finite and not constant, in float32 and where the file says so in float16."""
    if not isinstance(draft.config, DraftConfig):
        return
    for dtype in (torch.float32, *((torch.float16,) if states_fp16(draft) else ())):
        model = draft.build(dtype)
        assert isinstance(model, DSparkDraft)
        fault = first_draft(target, model, answers, dtype)
        if fault:
            yield Finding("first-draft", "broken", f"{fault}; bfloat16 has the range of float32")
            return
    yield Finding("first-draft", "ok", "finite, and different for different contexts")


def check_emitted(config: Config, answers: Answers) -> Iterator[Finding]:
    """mask-token: never in the target's own answers."""
    if isinstance(config, DraftConfig):
        count = sum(one.answer_ids.count(config.mask_token_id) for one in answers.rows)
        if count:
            text = f"{config.mask_token_id} is in the target's answers, {count} times; a mask must never be emitted"
            yield Finding("mask-token", "loses", text)


def check_acceptance(rounds: Sequence[Sequence[Round]], n: int, recorded: float | None = None) -> Finding:
    """acceptance: the macro acceptance length, bonus counted, at the draft's full block. recorded: the one that its
    training recorded at the same n, on other prompts."""
    found = mean_interval(lengths(rounds))
    text = f"{found} tokens a round at n = {n}, bonus counted, macro over {len(rounds)} prompts"
    if found.value < NOTHING:
        return Finding("acceptance", "broken", f"{text}: the draft guesses nothing")
    if recorded is not None and found.value < _RECORDED * recorded and found.high < recorded:
        text += f"; {recorded:.2f} when it was trained, on other prompts: not the weights that were trained?"
        return Finding("acceptance", "loses", text)
    return Finding("acceptance", "ok", text)


def recorded_acceptance(draft: DraftFacts, n: int) -> float | None:
    """The acceptance at n that training.json has for the step these weights are of; None when it has none."""
    if draft.place is None or not draft.place.is_dir():
        return None
    try:
        training = read_training(draft.place) or {}
        step, best = training["draft"]["step"], training["best"]
        found = {one["step"]: one["replay_acceptance"] for one in training["curve"]}[step]
        comparable = best["n"] == n and best["bonus"] == "counted"
    except (DsparkError, KeyError, TypeError):
        return None
    return float(found) if comparable and isinstance(found, int | float) else None


def check_loops(answers: Answers, rounds: Sequence[Sequence[Round]]) -> Finding:
    """loops: answers that repeat themselves are easy to draft."""
    count = sum(answers.looping)
    if not count:
        return Finding("loops", "ok", f"none of {len(answers.looping)} answers ends in a loop")
    straight = [one for one, loops in zip(rounds, answers.looping, strict=True) if not loops]
    without = f"{macro(straight):.2f} without them" if straight else "there are no others"
    text = f"{count} of {len(answers.looping)} answers end in a loop, which is easy to draft: {without}"
    return Finding("loops", "note", text)


def better(other: Sequence[float], stated: Sequence[float]) -> Interval | None:
    """By how much, when `other` is better on the same prompts beyond chance (paired, 95 %) and by 0.03 at least."""
    found = mean_interval([a - b for a, b in zip(other, stated, strict=True)])
    return found if found.low > 0 and found.value >= 0.03 else None


def check_layouts(
    target: Target, draft: DraftFacts, answers: Answers, rounds: Sequence[Sequence[Round]]
) -> Iterator[Finding]:
    """layout: the same tensors read in the other layout, when the file does not say or little is accepted."""
    config, stated = draft.config, macro(rounds)
    if not isinstance(config, DraftConfig) or (stated >= LOW and not draft.unsure_layout):
        return
    mine, other = ("anchor-first", "bonus-anchor")[:: 1 if config.sample_from_anchor else -1]
    try:
        turned = draft.build(sample_from_anchor=not config.sample_from_anchor)
        found = walk(target, turned, answers)
    except DsparkError as error:
        yield Finding("layout", "skipped", f"the {other} layout cannot be tried: {error}")
        return
    compared = f"acceptance {macro(found):.2f} read as {other} against {stated:.2f} as {mine}"
    if better(lengths(found), lengths(rounds)):
        value = str(not config.sample_from_anchor).lower()
        yield Finding("layout", "broken", f"{compared}: sample_from_anchor must be {value}")
    elif draft.unsure_layout and better(lengths(rounds), lengths(found)):
        value = str(config.sample_from_anchor).lower()
        yield Finding("layout", "note", f"{compared}: state sample_from_anchor {value}")
    else:
        yield Finding("layout", "ok", compared)


def shifted_layers(taps: Sequence[int], depth: int) -> dict[int, tuple[int, ...]]:
    """The taps one layer later (+1) and earlier (-1), where all of them are layers."""
    moved = {shift: tuple(tap + shift for tap in taps) for shift in (1, -1)}
    return {shift: ids for shift, ids in moved.items() if min(ids) >= 0 and max(ids) < depth}


def check_shifts(
    target: Target, model: Draft, answers: Answers, rounds: Sequence[Sequence[Round]]
) -> Iterator[Finding]:
    """layer-ids: the outputs of the layers beside the stated ones, handed over in their place."""
    stated, shown = macro(rounds), []
    for shift, layers in shifted_layers(model.config.target_layer_ids, target.num_layers).items():
        if not set(layers) <= set(answers.layers):
            continue
        found = walk(target, model, answers, layers=layers)
        shown.append(f"{macro(found):.2f} with {shift:+d}")
        if better(lengths(found), lengths(rounds)):
            text = f"layer ids look off by one: acceptance {shown[-1]} against {stated:.2f} as stated"
            yield Finding("layer-ids", "loses", text)
            return
    if shown:
        yield Finding("layer-ids", "ok", f"acceptance {stated:.2f} as stated, {' and '.join(shown)}")


def check_depth(
    target: Target,
    model: Draft,
    renderer: ChatRenderer,
    texts: Sequence[str],
    short: tuple[Answers, Sequence[Sequence[Round]]],
    depth: int,
    tokens: int,
    count: int = 6,
) -> Finding:
    """depth: the same questions alone and at the end of a long conversation, paired."""
    answers, rounds = short
    replies = [decode(target.tokenizer, one.answer_ids) or "." for one in answers.rows]
    texts = [texts[i] for i in answers.asked]
    chosen = sorted({round(i * (len(replies) - 1) / max(count - 1, 1)) for i in range(count)})
    prompts = [conversation(renderer, texts, replies, i, depth) for i in chosen]
    alone = [lengths(rounds)[i] for i in chosen]
    if sum(map(len, prompts)) < 2 * sum(len(answers.rows[i].prompt_ids) for i in chosen):
        return Finding("depth", "skipped", f"no conversation much longer than the questions fits in {depth} tokens")
    deep = lengths(walk(target, model, answer(target, prompts, tokens, model.config.target_layer_ids)))
    if len(deep) < len(alone):
        return Finding("depth", "skipped", "the target answers long conversations with a single token")
    text = (
        f"acceptance {fmean(deep):.2f} at {max(map(len, prompts))} tokens against {fmean(alone):.2f} of the same "
        f"{len(alone)} questions alone"
    )
    if _falls(deep, alone):
        return Finding("depth", "loses", f"{text}: it falls with the context")
    return Finding("depth", "ok", text)


def _falls(other: Sequence[float], usual: Sequence[float]) -> bool:
    """Whether less than _FALL of the accepted tokens are left, beyond chance (paired)."""
    apart = mean_interval([a - b for a, b in zip(other, usual, strict=True)])
    return fmean(other) - 1 < _FALL * (fmean(usual) - 1) and apart.high < 0


def check_thinking(
    target: Target, model: Draft, texts: Sequence[str], room: int, tokens: int, count: int = 6
) -> Finding:
    """thinking: acceptance with the template's switch on and off; only for a template that has it."""
    found: dict[str, list[float]] = {}
    modes: tuple[Mode, ...] = ("on", "off")
    for mode in modes:
        renderer = ChatRenderer(target.tokenizer, thinking=mode)
        answers = answer(target, render(renderer, texts, room)[0][:count], tokens, model.config.target_layer_ids)
        found[mode] = lengths(walk(target, model, answers))
    worse, best = sorted(found, key=lambda mode: fmean(found[mode]))
    text = f"acceptance {fmean(found['on']):.2f} with thinking on, {fmean(found['off']):.2f} with it off"
    if len(found["on"]) == len(found["off"]) and _falls(found[worse], found[best]):
        return Finding("thinking", "loses", f"{text}: the draft does not know thinking {worse}; serve it {best}")
    return Finding("thinking", "ok", text)

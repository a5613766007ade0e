"""A whole diagnosis: what files tell, then, where the target can be run, what the pair does, and what it would gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.data.chat import ChatRenderer
from dspark.data.prompts import demo_prompts, read_prompts
from dspark.decoding.request import Round
from dspark.doctor.acceptance import (
    check_acceptance,
    check_depth,
    check_emitted,
    check_first_draft,
    check_layouts,
    check_loops,
    check_shifts,
    check_thinking,
    recorded_acceptance,
    shifted_layers,
)
from dspark.doctor.costs import OWN, EngineCosts, measure_here, read_costs
from dspark.doctor.draft import DraftFacts, read_draft
from dspark.doctor.facts import TargetFacts, target_facts
from dspark.doctor.findings import BROKEN, LOSES, Finding, exit_code
from dspark.doctor.forecast import Forecast, forecast
from dspark.doctor.llamacpp import measure_llamacpp
from dspark.doctor.memory import lacking_memory
from dspark.doctor.served import check_served
from dspark.doctor.states import check_head, check_states
from dspark.doctor.static import findings_of
from dspark.doctor.support import engine_version
from dspark.doctor.template import thinking_modes
from dspark.doctor.trial import answer, render, walk
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError
from dspark.machine import describe_machine
from dspark.targets.base import Target
from dspark.targets.transformers import load_target

STEPS = 9
"""Steps that the dynamic part announces."""
DEEP, DEEPEST = 1200, 4096
"""Tokens of context that are cheap to try, and with a context asked for."""
SERVED = 6
"""Answers that are served and compared; each takes as long as a user would wait."""
MEASURED = 8
"""Prompts that an engine in another process answers for its costs, plainly and with every width."""
_COST_CONTEXT = 256
_UNRUNNABLE = ("target-depth", "target-width", "vocabulary", "files", "config")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What was asked. tokens: of an answer; prompts: a JSONL file or folder (None: those that come with dspark);
    profile: costs from a file; engine_python: an interpreter with xllamacpp; engine_target: the target's .gguf file."""

    target: str
    draft: str
    engine: str | None = None
    context: int | None = None
    n: int | None = None
    static: bool = False
    tokens: int = 64
    prompts: str | None = None
    profile: str | None = None
    engine_python: str | None = None
    engine_target: str | None = None

    @property
    def engine_name(self) -> str:
        """Of whom the forecast is: an engine, or the built-in one. Raises DsparkError for an unknown one."""
        return OWN if self.engine is None else engine_version(self.engine)[0]


@dataclass
class Diagnosis:
    """findings in the order they were made; forecast: None when there is none, and a finding says why."""

    settings: Settings
    findings: list[Finding]
    forecast: Forecast | None = None

    @property
    def code(self) -> int:
        """0 good, 1 works but will lose, 2 broken."""
        code = exit_code(self.findings)
        return max(code, LOSES) if self.forecast is not None and not self.forecast.worth_it else code

    @property
    def verdict(self) -> str:
        """One line."""
        bad = {level: [one.check for one in self.findings if one.level == level] for level in ("broken", "loses")}
        if self.code == BROKEN:
            return f"broken: {', '.join(dict.fromkeys(bad['broken']))}"
        parts = [f"works but loses: {', '.join(dict.fromkeys(bad['loses']))}"] if bad["loses"] else []
        parts += [self.forecast.advice] if self.forecast is not None else []
        return "; ".join(parts) or "nothing is wrong in what could be checked; what it gains was not measured"

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "version": 1,
            "verdict": self.verdict,
            "exit_code": self.code,
            "findings": [asdict(one) for one in self.findings],
            "forecast": None if self.forecast is None else self.forecast.to_json(),
            "versions": describe_machine(),
            "settings": asdict(self.settings),
        }


def diagnose(settings: Settings, say: Say = lambda step: None) -> Diagnosis:
    """Check a pair. say: told what is being done, STEPS times when it is run.

    Raises DsparkError for settings that mean nothing and a target that does not exist; what is wrong with the draft is
    a finding.
    """
    if settings.tokens < 8:
        raise DsparkError("tokens", settings.tokens, "must be at least 8: rounds need tokens")
    facts = target_facts(settings.target)
    draft = read_draft(settings.draft, facts)
    engine = settings.engine_name
    found = Diagnosis(settings, findings_of(draft, facts, settings.engine, settings.context, settings.n))
    costs = None
    if settings.profile is not None and draft.config is not None:
        costs = read_costs(settings.profile, engine, draft.config.gamma)
    if settings.static:
        return found
    reason = _why_not(draft, facts, found.findings)
    if reason:
        found.findings.append(Finding("run", "skipped", f"{reason}, so nothing was run"))
        return found
    _Run(settings, facts, draft, found, say, costs).go()
    return found


def _why_not(draft: DraftFacts, target: TargetFacts, findings: Sequence[Finding]) -> str:
    """Why the pair cannot be run here, "" when it can."""
    wrong = [one.check for one in findings if one.level == "broken" and one.check in _UNRUNNABLE]
    if draft.config is None or wrong:
        return f"the pair does not fit ({', '.join(dict.fromkeys(wrong)) or 'the draft cannot be read'})"
    if draft.tensors is None:
        return "the draft has no weights here"
    return lacking_memory(target) if target.runnable else f"the weights of {target.name} are not here"


class _Run:
    """The dynamic part, step by step; every step adds findings."""

    def __init__(
        self,
        settings: Settings,
        facts: TargetFacts,
        draft: DraftFacts,
        found: Diagnosis,
        say: Say,
        costs: EngineCosts | None,
    ) -> None:
        self.settings, self.facts, self.draft, self.found = settings, facts, draft, found
        self.say, self.costs = say, costs
        self.model: Draft = draft.build()
        self.config = self.model.config

    def go(self) -> None:
        """Everything, until something is so wrong that the rest means nothing."""
        self.say("loading the target")
        target = load_target(self.facts.name)
        self._open(target)
        self.say("the target answers plainly")
        self.answers = answer(target, self.prompts, self.settings.tokens, self._layers(target))
        self._step("captured states against the logits", lambda: check_states(target, self.answers))
        self._step("the first draft", lambda: self._first(target))
        try:
            self.say("replaying the draft")
            self.rounds = walk(target, self.model, self.answers)
        except DsparkError as error:
            self.found.findings.append(Finding("first-draft", "broken", str(error)))
            return
        self.found.findings += [
            *check_emitted(self.config, self.answers),
            check_acceptance(self.rounds, self.config.gamma, recorded_acceptance(self.draft, self.config.gamma)),
            check_loops(self.answers, self.rounds),
        ]
        self._step("other layouts and layer ids", lambda: self._readings(target))
        self._step("serving with the draft", lambda: self._served(target))
        self._step("long conversations, thinking", lambda: self._conditions(target))
        self.say("what passes cost")
        self._forecast(target)

    def _step(self, label: str, work: Callable[[], Iterator[Finding]]) -> None:
        """One step; a fault that is raised is a finding."""
        self.say(label)
        try:
            self.found.findings += list(work())
        except DsparkError as error:
            self.found.findings.append(Finding("run", "broken", str(error)))

    def _open(self, target: Target) -> None:
        """The questions, rendered as the draft was trained where the template allows it."""
        trained = self.config.prompt_recipe["thinking"]
        thinking = next((mode for mode in thinking_modes(self.facts) if mode == trained), None)
        has_template = getattr(target.tokenizer, "chat_template", None)
        self.renderer = ChatRenderer(target.tokenizer, thinking, "chat" if has_template else "none")
        given = self.settings.prompts
        asked = demo_prompts() if given is None else read_prompts(given, limit=64)
        self.texts = [prompt.turns[0] for prompt in asked]
        self.room = target.max_context - self.settings.tokens - self.config.gamma - 1
        self.prompts, self.texts = render(self.renderer, self.texts, self.room)

    def _layers(self, target: Target) -> list[int]:
        taps = self.config.target_layer_ids
        moved = shifted_layers(taps, target.num_layers)
        return [*taps, *(layer for ids in moved.values() for layer in ids)]

    def _first(self, target: Target) -> Iterator[Finding]:
        yield from check_head(target, self.draft)
        yield from check_first_draft(target, self.draft, self.answers)

    def _readings(self, target: Target) -> Iterator[Finding]:
        yield from check_layouts(target, self.draft, self.answers, self.rounds)
        yield from check_shifts(target, self.model, self.answers, self.rounds)

    def _served(self, target: Target) -> Iterator[Finding]:
        return check_served(target, self.model, self.answers, self.rounds, SERVED)

    def _conditions(self, target: Target) -> Iterator[Finding]:
        asked, tokens = self.settings.context, self.settings.tokens
        depth = min(self.room, self.config.training_length if asked is None else asked)
        depth = min(depth, DEEP if asked is None else DEEPEST) - (tokens if asked is None else 0)
        short = self.answers, self.rounds
        yield check_depth(target, self.model, self.renderer, self.texts, short, depth, tokens)
        if thinking_modes(self.facts):
            yield check_thinking(target, self.model, self.texts, self.room, tokens)

    def _forecast(self, target: Target) -> None:
        """Every n replayed, and the engine's costs: read, measured, or missing and said so."""
        try:
            costs = self.costs or self._measure(target)
        except DsparkError as error:
            self.found.findings.append(Finding("forecast", "skipped", str(error)))
            return
        walked: dict[int, Sequence[Sequence[Round]]] = {
            n: self.rounds if n == self.config.gamma else walk(target, self.model, self.answers, n)
            for n in costs.rounds
            if n <= self.config.gamma
        }
        self.found.forecast = forecast(self.answers, walked, costs)

    def _measure(self, target: Target) -> EngineCosts:
        """Raises DsparkError when this engine's costs cannot be measured with what was given."""
        engine = self.settings.engine_name
        if engine == OWN:
            ids = max((self.answers.row(i).ids for i in range(len(self.answers.rows))), key=len)
            return measure_here(target, self.model, ids[: min(_COST_CONTEXT, self.room)])
        if engine == "llamacpp" and self.settings.engine_python is not None:
            weights = self.settings.engine_target or self.facts.name
            return measure_llamacpp(self.settings.engine_python, weights, self.draft, self.prompts[:MEASURED])
        option = "engine_python" if engine == "llamacpp" else "profile"
        remedy = "a Python with xllamacpp measures it" if engine == "llamacpp" else "a file of its costs"
        raise DsparkError(option, None, f"{engine} has costs of its own: give {remedy}, or --profile")


def save_costs(found: Diagnosis, path: str | Path) -> None:
    """Keep the costs of a forecast for --profile. Raises DsparkError when there was no forecast."""
    if found.forecast is None:
        raise DsparkError("save_costs", str(path), "there is no forecast, so no costs to keep")
    found.forecast.costs.save(path)

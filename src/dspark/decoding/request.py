"""A request as a user states it, and the state the engine keeps for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from dspark.decoding.grammar import Constraint
from dspark.decoding.text import StopText
from dspark.errors import DsparkError
from dspark.targets.base import TargetState

if TYPE_CHECKING:
    from dspark.decoding.process import LogitsProcessor

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingSettings:
    """How a token is chosen. temperature 0 is greedy. seed None: accept rule `rejection`; a seed: `coupled`.

    presence_penalty, frequency_penalty (OpenAI: of the answer's tokens), repetition_penalty (Transformers, vLLM: of the
    prompt's too, 1 = none) and logit_bias (pairs of id and what is added) change the logits first: see
    `process.LogitsProcessor`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0 or self.temperature == float("inf"):
            raise DsparkError("temperature", self.temperature, "must be a finite number >= 0 (0 is greedy)")
        if self.top_k < 0:
            raise DsparkError("top_k", self.top_k, "must be >= 0 (0 keeps every token)")
        if not 0.0 < self.top_p <= 1.0:
            raise DsparkError("top_p", self.top_p, "must be in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise DsparkError("min_p", self.min_p, "must be in [0, 1]")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise DsparkError("seed", self.seed, "must be an integer in [0, 2**63)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise DsparkError(name, getattr(self, name), "must be in [-2, 2]")
        if not 0.01 <= self.repetition_penalty <= 100.0:
            raise DsparkError("repetition_penalty", self.repetition_penalty, "must be in [0.01, 100] (1: none)")
        for token, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise DsparkError("logit_bias", f"{token}: {bias}", "a bias must be in [-100, 100]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Whether tokens that came before count."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def shapes_logits(self) -> bool:
        """Whether logits are changed before a law is made of them."""
        return self.penalises or bool(self.logit_bias)


@dataclass(frozen=True)
class Request:
    """One prompt as ids, and what is asked of its answer.

    stop_ids: ids that end it (the target's own when None; none with ignore_eos); min_tokens: tokens before a stop id or
    string may end it; stop: strings that end it, in the text up to there (include_stop: with the string or the stop
    token's text); logprobs: None, or how many alternatives beside each token's own (the target's raw
    log-probabilities, before this request's settings); constraint: a grammar; timeout: seconds from `Engine.add`;
    speculate: False decodes this request plainly, whoever proposes for the others.
    """

    prompt_ids: Sequence[int]
    max_tokens: int = 256
    sampling: SamplingSettings = SamplingSettings()
    stop_ids: frozenset[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None
    constraint: Constraint | None = None
    timeout: float | None = None
    speculate: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise DsparkError("max_tokens", self.max_tokens, "must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise DsparkError("min_tokens", self.min_tokens, f"must be in 0..max_tokens ({self.max_tokens})")
        if any(not stop for stop in self.stop):
            raise DsparkError("stop", "", "a stop string cannot be empty")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise DsparkError("logprobs", self.logprobs, f"must be in 0..{MAX_LOGPROBS}")
        if self.constraint is not None and self.min_tokens:
            raise DsparkError("min_tokens", self.min_tokens, "cannot be combined with a grammar, which ends by itself")
        if self.timeout is not None and not self.timeout > 0:
            raise DsparkError("timeout", self.timeout, "must be more than 0 seconds")


@dataclass(frozen=True)
class Round:
    """One draft pass and one verification pass.

    proposed: tokens the draft gave; scheduled: how many of them the target verified;
    accepted: how many became part of the output (bonus not counted; a run cut by a stop id or
    the token limit counts only what was kept).
    """

    proposed: int
    scheduled: int
    accepted: int


@dataclass(frozen=True)
class TokenLogprob:
    """Raw log-probability of a token under the target, and its most probable alternatives, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass
class Result:
    """What became of a request. output_ids include the stop id, or the ids that completed the stop string.

    text: the answer's text, without special tokens ("" for a target without a tokenizer); stop_reason: the id or
    string that ended it; logprobs: one entry an output id, when asked for; cached_tokens: prompt tokens that were not
    read again; preemptions: how often it made room for others; error: what went wrong, with finish_reason "error".
    """

    request: Request
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    rounds: list[Round] = field(default_factory=list)
    text: str = ""
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0
    error: Exception | None = None


Rule = Literal["greedy", "rejection", "coupled"]


class NoState:
    """The target's side of a request that holds no memory: waiting, preempted or over."""

    length = capacity = 0

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on."""
        self.length = length

    def grow(self, capacity: int) -> None:
        """Raises DsparkError: memory comes from the target's `new_state`."""
        raise DsparkError("capacity", capacity, "the request holds no memory")

    def copy_prefix(self, other: Any, length: int) -> None:
        """Raises DsparkError: memory comes from the target's `new_state`."""
        self.grow(length)


@dataclass(eq=False)
class Active:
    """A request being served. Only committed tokens are in `ids`; the last of them, the anchor, is not yet read.

    state: the target's K/V of ids[:-1]; context: whatever the proposer keeps (a draft's context K/V); limit: output
    tokens at most; longest: tokens of memory it can ever need; processor: what it changes in logits (None: nothing);
    words: its text so far (None: the target has no tokenizer); pending: taps of committed tokens that `context` does
    not hold yet; outlook: what the schedule expects of it
    """

    index: int
    request: Request
    rule: Rule
    seed: int
    ids: list[int]
    limit: int
    stop_ids: frozenset[int]
    state: TargetState
    context: Any = None
    longest: int = 0
    processor: LogitsProcessor | None = None
    words: StopText | None = None
    cancelled: bool = False
    result: Result = field(init=False)
    captured: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pending: list[Tensor] = field(default_factory=list)
    outlook: Any = None
    added: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.result = Result(self.request)

    @property
    def round_index(self) -> int:
        """The round that comes next, from 1; the prompt's own token is made in round 0. Keys the noise: no two draws
        of a request may have the same."""
        return len(self.result.rounds) + bool(self.result.output_ids)

    @property
    def unread(self) -> int:
        """Tokens that the target must read before a round: the prompt, or after a preemption all but the anchor."""
        return len(self.ids) - bool(self.result.output_ids) - self.state.length

    @property
    def finished(self) -> bool:
        """Whether it is over, for whatever reason."""
        return self.result.finish_reason is not None

    def shaped(self, logits: Tensor, drafts: Sequence[int]) -> Tensor:
        """Logits [V] at the position after `drafts`, as this request wants them."""
        return logits if self.processor is None else self.processor(logits, drafts)

    def commit(self, tokens: Sequence[int]) -> list[int]:
        """Take tokens one at a time until a stop id, a stop string, the end of the grammar or the limit; returns those
        kept."""
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            self.ids.append(token)
            self.result.output_ids.append(token)
            if self.processor is not None:
                self.processor.commit(token)
            self._settle(token)
            if self.finished:
                break
        if self.words is not None:
            if self.finished:
                self.words.close()
            self.result.text = self.words.text
        return kept

    def _settle(self, token: int) -> None:
        """Whether the answer ends with this token, and why."""
        result, made = self.result, len(self.result.output_ids)
        at_stop = token in self.stop_ids
        stop = None
        if self.words is not None and (not at_stop or self.request.include_stop):
            stop = self.words.push(token, search=made > self.request.min_tokens)
        if at_stop or stop is not None:
            result.finish_reason, result.stop_reason = "stop", token if at_stop else stop
        elif self.processor is not None and self.processor.ended:
            result.finish_reason = "stop"
        elif made >= self.limit:
            result.finish_reason = "length"

    def end(self, reason: FinishReason, error: Exception | None = None) -> None:
        """It ends from outside: cancelled, out of time, or failed."""
        self.result.finish_reason, self.result.error = reason, error
        if self.words is None:
            return
        try:
            self.words.close()
        except Exception as failure:  # the tokenizer: that must reach the caller, and this request must end
            self.result.error = error or failure
        self.result.text = self.words.text

    def release(self) -> None:
        """Hold no memory any more."""
        self.state, self.context = NoState(), None
        self.pending.clear()


def rule_of(sampling: SamplingSettings) -> Rule:
    """greedy at temperature 0, `coupled` when the request gives a seed, `rejection` otherwise."""
    if sampling.greedy:
        return "greedy"
    return "rejection" if sampling.seed is None else "coupled"

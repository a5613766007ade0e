"""The engine: admit, draft, verify, commit, for a batch of requests of any lengths and settings.

A request's output does not depend on who else is in the batch, on the proposer or on n, on being preempted or on what
the prefix cache holds: greedy and seeded requests give the ids of plain decoding, unseeded sampled ones the same law
(method: verification).
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dspark.decoding.drafting import Proposal
from dspark.decoding.grammar import GrammarCompiler
from dspark.decoding.memory import Memory
from dspark.decoding.planner import Fixed, Schedule
from dspark.decoding.process import LogitsProcessor
from dspark.decoding.proposers import NoProposer, Proposer
from dspark.decoding.request import Active, FinishReason, NoState, Request, Result, Round, TokenLogprob, rule_of
from dspark.decoding.text import StopText
from dspark.decoding.verify import verify_coupled, verify_greedy, verify_largest, verify_rejection
from dspark.errors import DsparkError
from dspark.kernels.library import own_threads
from dspark.targets.base import Target, TargetOutput

PREFILL_TOKENS = 2048
"""Prompt tokens that go through the target in one pass."""
PENDING_TOKENS = 256
"""Committed tokens whose taps may wait, while their request does not draft, to be written to its context at once."""

Capture = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True)
class Step:
    """What one pass added to one request: the kept ids, and the round they came from (None: the prompt's pass, or an
    end that came from outside).

    The first round.accepted of new_ids are the draft's tokens; one that follows is the target's own. text: what became
    safe to show; confidence: the draft's, of each scheduled slot, where the proposer gives it.
    """

    new_ids: list[int]
    round: Round | None
    text: str = ""
    confidence: list[float] = field(default_factory=list)


class Engine:
    """Serves requests with one target and one proposer.

    max_batch: requests in flight; capture_taps: layers whose outputs `capture` is given (see `run`); kv_tokens: tokens
    of memory for all requests and the prefix cache (None: whatever they ask for); prefill_tokens: prompt tokens a pass;
    prefix_cache: keep what finished requests have read; max_waiting: requests that may wait (None: any number);
    schedule: who drafts, and how much of it is verified (None: everyone, everything).

    `add` and `step` are for servers, `run` and `stream` serve whole lists and single requests. All are for one thread.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        max_batch: int = 1,
        capture_taps: tuple[int, ...] = (),
        *,
        kv_tokens: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        prefix_cache: bool = False,
        max_waiting: int | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        if max_batch < 1:
            raise DsparkError("max_batch", max_batch, "must be at least 1")
        if prefill_tokens < 1:
            raise DsparkError("prefill_tokens", prefill_tokens, "must be at least 1")
        if capture_taps and (kv_tokens is not None or prefix_cache):
            raise DsparkError(
                "capture_taps", capture_taps, "a request that is read twice or in part cannot be captured"
            )
        self.target = target
        self.proposer: Proposer = proposer or NoProposer()
        self.schedule: Schedule = schedule or Fixed()
        self.max_batch, self.capture_taps = max_batch, tuple(capture_taps)
        self.prefill_tokens, self.max_waiting = prefill_tokens, max_waiting
        self.memory = Memory(target, self.proposer, kv_tokens, prefix_cache)
        self.waiting: deque[Active] = deque()
        self.running: list[Active] = []
        self._taps = tuple(dict.fromkeys((*self.proposer.taps, *self.capture_taps)))
        self.grammars = GrammarCompiler(target.tokenizer, target.vocab_size)
        self._added = 0
        self._capturing = False

    # Whole lists, and single requests

    def run(self, requests: Iterable[Request], capture: Capture | None = None) -> Iterator[tuple[int, Result]]:
        """Serve all requests (pulled lazily); yields (index, result) as each one finishes.

        capture(index, taps [T, m * d], last_hidden [T, d] pre-norm) is called just before a result is yielded, for
        the T = prompt + output - 1 tokens that the target read. Raises DsparkError on a request that cannot be
        served, and whatever went wrong in a pass; nothing is silently shortened.
        """
        self._capturing = capture is not None
        for active, _ in self._serve(requests):
            if active.result.error is not None:
                raise active.result.error
            if active.finished:
                if capture is not None:
                    taps, last = (torch.cat(parts) for parts in zip(*active.captured, strict=True))
                    capture(active.index, taps, last)
                yield active.index, active.result

    def stream(self, request: Request) -> Iterator[Step]:
        """Serve one request, step by step. `last_result` is its Result afterwards."""
        self._capturing = False
        for active, step in self._serve([request]):
            if active.result.error is not None:
                raise active.result.error
            self.last_result = active.result
            yield step

    def _serve(self, requests: Iterable[Request]) -> Iterator[tuple[Active, Step]]:
        waiting = enumerate(requests)
        exhausted = False
        try:
            while self.busy or not exhausted:
                while not exhausted and len(self.running) + len(self.waiting) < self.max_batch:
                    entry = next(waiting, None)
                    exhausted = entry is None
                    if entry is not None:
                        self.add(entry[1], entry[0])
                yield from self.step()
        finally:
            self.drop_all()  # an iteration given up half-way leaves nothing to the next one

    # One request among others

    @property
    def busy(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self.waiting or self.running)

    @property
    def max_context(self) -> int:
        """Tokens that one request can have, prompt and answer."""
        return min(self.target.max_context, self.memory.budget or self.target.max_context)

    def add(self, request: Request, index: int | None = None) -> Active:
        """Queue a request; it joins at a following step. Raises DsparkError on one that cannot be served."""
        if self.max_waiting is not None and len(self.waiting) >= self.max_waiting:
            raise DsparkError("requests", len(self.waiting), "are waiting already; try again later")
        active = self._accept(request, self._added if index is None else index)
        self._added += 1
        self.waiting.append(active)
        return active

    def cancel(self, active: Active) -> None:
        """End a request at the next step; its memory is free then. May be called from another thread."""
        active.cancelled = True

    def drop_all(self) -> None:
        """Forget every request; their results stay as they are."""
        for active in (*self.waiting, *self.running):
            self.memory.release(active)
        self.waiting.clear()
        self.running.clear()

    def step(self) -> list[tuple[Active, Step]]:
        """One pass: requests join, every running one drafts and verifies or reads a part of its prompt, those that end
        leave. Gives what was added to each; a request whose part failed ends with `result.error`, and when the pass
        itself fails, every request in it does."""
        steps = self._end_from_outside()
        steps += self._admit()
        try:
            self._make_room()
            if self.running:
                with own_threads():
                    self._pass(steps)
        except Exception as error:
            steps += [self._end(active, "error", error) for active in self.running if not active.finished]
        for active in [active for active in self.running if active.finished]:
            self.running.remove(active)
            self.memory.retire(active)
        return steps

    # Admission

    def _accept(self, request: Request, index: int) -> Active:
        target, length, context = self.target, len(request.prompt_ids), self.max_context
        if length == 0:
            raise DsparkError("prompt", "", f"request {index} is empty; give at least one token")
        if length >= context:
            raise DsparkError("prompt", f"{length} tokens", f"the target has a context of {context} tokens here")
        self._check_ids(request)
        limit = min(request.max_tokens, context - length)
        sampling = request.sampling
        stop_ids = target.stop_ids if request.stop_ids is None else request.stop_ids
        stop_ids = frozenset() if request.ignore_eos else stop_ids
        words = None
        if target.tokenizer is not None:
            words = StopText(target.tokenizer, request.stop, request.include_stop)
        elif request.stop:
            raise DsparkError("stop", request.stop[0], f"{target.name} has no tokenizer, so no text to find it in")
        processor = None
        if LogitsProcessor.needed(sampling, request.min_tokens, request.constraint is not None):
            grammar = None if request.constraint is None else self.grammars.compile(request.constraint)
            processor = LogitsProcessor(sampling, request.prompt_ids, stop_ids, request.min_tokens, grammar)
        return Active(
            index=index,
            request=request,
            rule=rule_of(sampling),
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            ids=list(request.prompt_ids),
            limit=limit,
            stop_ids=stop_ids,
            state=NoState(),
            longest=min(context, length + limit + self.proposer.n),
            processor=processor,
            words=words,
        )

    def _check_ids(self, request: Request) -> None:
        vocabulary = self.target.vocab_size
        named = {"prompt": request.prompt_ids, "logit_bias": [token for token, _ in request.sampling.logit_bias]}
        for name, ids in named.items():
            if ids and (min(ids) < 0 or max(ids) >= vocabulary):
                bad = min(ids) if min(ids) < 0 else max(ids)
                raise DsparkError(name, bad, f"token ids of the target are 0..{vocabulary - 1}")

    def _admit(self) -> list[tuple[Active, Step]]:
        """Let waiting requests in, first come first served, while there is room; one that cannot be let in at all (the
        machine has no memory left, say) ends with the error."""
        steps = []
        while self.waiting and len(self.running) < self.max_batch:
            active = self.waiting[0]
            try:
                if not self.memory.start(active, self.running):
                    break
                self.running.append(active)
            except Exception as error:
                self.memory.release(active)
                steps.append(self._end(active, "error", error))
            self.waiting.popleft()
        return steps

    def _make_room(self) -> None:
        """Give every request that is due for a round the memory of its block; the youngest make way if they must."""
        for active in list(self.running):
            while active in self.running and not self.memory.extend(active, self.running):
                youngest = self.running.pop()
                self.memory.release(youngest)
                youngest.result.preemptions += 1
                self.waiting.appendleft(youngest)

    def _end_from_outside(self) -> list[tuple[Active, Step]]:
        """End the requests that were cancelled or have run out of time."""
        steps, now = [], time.monotonic()
        for active in (*self.waiting, *self.running):
            timeout = active.request.timeout
            if active.cancelled:
                steps.append(self._end(active, "cancelled"))
            elif timeout is not None and now - active.added > timeout:
                steps.append(self._end(active, "timeout"))
        if steps:
            self.waiting = deque(active for active in self.waiting if not active.finished)
            for active in [active for active in self.running if active.finished]:
                self.running.remove(active)
                self.memory.retire(active)
        return steps

    def _end(self, active: Active, reason: FinishReason, error: Exception | None = None) -> tuple[Active, Step]:
        active.end(reason, error)
        return active, Step([], None, "" if active.words is None else active.words.take())

    # A pass

    def _pass(self, steps: list[tuple[Active, Step]]) -> None:
        """One draft pass and one target pass: a verification block of every request in a round, and a part of the
        prompt of those that still read theirs. What was committed is in `steps` even when something fails later."""
        began = time.perf_counter()
        ready = [active for active in self.running if not active.unread]
        reading, chunks = self._chunks()
        drafting, n = self.schedule.choose(ready, sum(map(len, chunks)), len(self.running) - len(ready))
        drafted = self._propose(drafting, n)
        proposals = [drafted.get(active) or Proposal() for active in ready]
        proposed = [len(proposal.tokens) for proposal in proposals]
        for active, proposal in zip(ready, proposals, strict=True):
            proposal.cut(active.state.capacity - len(active.ids))  # the context ends inside the block: verify less
        self.schedule.cut(list(drafted), list(drafted.values()))
        blocks = [[active.ids[-1], *proposal.tokens] for active, proposal in zip(ready, proposals, strict=True)]
        wanted = [len(block) for block in blocks]
        wanted += [int(len(chunk) == active.unread) for active, chunk in zip(reading, chunks, strict=True)]
        batch = [
            (active.state, torch.tensor(ids))
            for active, ids in zip((*ready, *reading), (*blocks, *chunks), strict=True)
        ]
        out = self.target.forward(batch, self._taps, logits=wanted)
        rows, chosen = _spans(len(ids) for _, ids in batch), _spans(wanted)
        count = len(ready)
        observed = []
        for i, (active, proposal) in enumerate(zip(ready, proposals, strict=True)):
            step = self._commit(active, out, chosen[i], proposal, proposed[i])
            steps.append((active, step))
            observed.append((active, slice(rows[i].start, rows[i].start + len(step.new_ids))))
        for i, active in enumerate(reading, count):
            observed.append((active, rows[i]))
            if wanted[i] and not active.result.output_ids:
                steps.append((active, self._commit(active, out, chosen[i], Proposal(), None)))
        self._observe(observed, out)
        self.schedule.took(time.perf_counter() - began)

    def _propose(self, drafting: list[Active], n: int | None) -> dict[Active, Proposal]:
        """One draft pass of n tokens for the requests that draft; the others propose nothing."""
        self._catch_up(drafting)
        return dict(zip(drafting, self.proposer.propose(drafting, n) if drafting else [], strict=True))

    def _catch_up(self, actives: Iterable[Active]) -> None:
        """Write the contexts of requests up to their anchor, in one pass."""
        behind = [(active, torch.cat(active.pending)) for active in actives if active.pending]
        if behind:
            self.proposer.observe(behind)
        for active, _ in behind:
            active.pending.clear()

    def _chunks(self) -> tuple[list[Active], list[list[int]]]:
        """Which requests read a part of their prompt in this pass, and which ids."""
        reading, chunks, budget = [], [], self.prefill_tokens
        for active in self.running:
            count = min(active.unread, budget)
            if count:
                start = active.state.length
                reading.append(active)
                chunks.append(active.ids[start : start + count])
                budget -= count
        return reading, chunks

    def _commit(self, active: Active, out: TargetOutput, rows: slice, proposal: Proposal, proposed: int | None) -> Step:
        """Verify one request's block from its 1 + scheduled rows of logits and take what survives; proposed None: the
        prompt's own first token, which is no round. What goes wrong here ends this request alone."""
        logits = out.logits[rows]
        try:
            accepted, own = _verify(active, logits, proposal, None if out.best is None else out.best[rows])
            kept = active.commit([*proposal.tokens[:accepted], *own])
            if active.request.logprobs is not None:
                active.result.logprobs += _logprobs(logits, kept, active.request.logprobs)
        except Exception as error:
            active.state.truncate(min(active.state.length, len(active.ids) - 1))
            return self._end(active, "error", error)[1]
        record = None
        if proposed is not None:
            active.state.truncate(len(active.ids) - 1)
            record = Round(proposed, len(proposal.tokens), min(accepted, len(kept)))
            active.result.rounds.append(record)
            self.schedule.learn(active, proposal, record)
        return Step(kept, record, "" if active.words is None else active.words.take(), proposal.confidence)

    def _observe(self, observed: list[tuple[Active, slice]], out: TargetOutput) -> None:
        """Keep the taps of committed tokens for the proposer, and hand them to the capture."""
        taps = out.taps
        if taps is None:
            return
        if self.proposer.taps:
            width = len(self.proposer.taps) * self.target.hidden_size  # the proposer's own taps come first
            for active, rows in observed:
                if active.request.speculate and (self.memory.caches or not active.finished):
                    own = taps[rows, :width]
                    active.pending.append(own if 2 * len(own) >= len(taps) else own.clone())  # keep no others' rows
            # a finished request's context goes into the prefix cache, and one that waits long takes too much memory
            waiting = (active for active, _ in observed if active.pending)
            self._catch_up(a for a in waiting if (a.finished and self.memory.caches) or _behind(a) > PENDING_TOKENS)
        if self._capturing:
            chosen = self._select_captured(taps)
            for active, rows in observed:
                active.captured.append((chosen[rows].clone(), out.last_hidden[rows].clone()))

    def _select_captured(self, taps: Tensor) -> Tensor:
        if self._taps == self.capture_taps:
            return taps
        d = self.target.hidden_size
        places = [self._taps.index(tap) for tap in self.capture_taps]
        return torch.cat([taps[:, p * d : (p + 1) * d] for p in places], dim=-1)


def _spans(counts: Iterable[int]) -> list[slice]:
    return [slice(start, end) for start, end in pairwise(accumulate(counts, initial=0))]


def _behind(active: Active) -> int:
    """Tokens that the target has read and the draft's context does not hold."""
    return active.state.length - active.context.length


def _verify(active: Active, logits: Tensor, proposal: Proposal, best: Sequence[int] | None) -> tuple[int, list[int]]:
    """Apply the request's accept rule to target logits [1 + scheduled, V] (best: the largest of each row, where known):
    how many drafts are accepted, and the target's own token.

    Where the request's settings fail after accepted drafts, those stand and no token follows them: what fails is then
    the next round's first token, as in plain decoding. Raises what fails before any draft is accepted.
    """
    tokens, sampling, reached = proposal.tokens, active.request.sampling, 0

    def shaped(row: Tensor, drafts: Sequence[int]) -> Tensor:
        nonlocal reached
        reached = len(drafts)  # a rule looks at a slot only when the drafts before it are accepted
        return active.shaped(row, drafts)

    try:
        if active.rule == "greedy" and active.processor is None and best is not None and min(best) >= 0:
            accepted, token = verify_largest(best, tokens)
        elif active.rule == "greedy":
            accepted, token = verify_greedy(logits, tokens, shaped)
        elif active.rule == "coupled":
            accepted, token = verify_coupled(logits, tokens, sampling, active.seed, len(active.ids), shaped)
        else:
            noise = active.seed, active.round_index
            accepted, token = verify_rejection(logits, tokens, proposal.laws, sampling, *noise, shaped)
    except Exception:
        if not reached:
            raise
        return reached, []
    return accepted, [token]


def _logprobs(logits: Tensor, kept: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """The target's raw log-probabilities of kept tokens, from the logits [>= kept, V] that they were chosen by."""
    logs = torch.log_softmax(logits[: len(kept)].float(), dim=-1)
    best = logs.topk(alternatives, dim=-1)
    return [
        TokenLogprob(token, float(row[token]), list(zip(ids, values, strict=True)))
        for token, row, ids, values in zip(kept, logs, best.indices.tolist(), best.values.tolist(), strict=True)
    ]

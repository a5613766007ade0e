"""The engine: admit, draft, verify, commit, for a batch of requests of any lengths and settings.

A request's output does not depend on who else is in the batch, on the proposer or on n: greedy and seeded requests
give the ids of plain decoding, unseeded sampled ones the same law (method: verification).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.decoding.proposers import NoProposer, Proposal, Proposer
from dspark.decoding.request import Active, Request, Result, Round, rule_of
from dspark.decoding.verify import verify_coupled, verify_greedy, verify_rejection
from dspark.errors import DsparkError
from dspark.targets.base import Target

PREFILL_TOKENS = 2048
"""Prompt tokens of newly admitted requests that go through the target in one pass (one request at least)."""

Capture = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True)
class Step:
    """What one pass added to one request: the kept ids, and the round they came from (None: the prompt's pass).

    The first round.accepted of new_ids are the draft's tokens; one that follows is the target's own.
    """

    new_ids: list[int]
    round: Round | None


class Engine:
    """Serves requests with one target and one proposer.

    max_batch: requests in flight; capture_taps: layers whose outputs `capture` is given (see `run`).
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        max_batch: int = 1,
        capture_taps: tuple[int, ...] = (),
    ) -> None:
        if max_batch < 1:
            raise DsparkError("max_batch", max_batch, "must be at least 1")
        self.target = target
        self.proposer: Proposer = proposer or NoProposer()
        self.max_batch, self.capture_taps = max_batch, tuple(capture_taps)
        self._taps = tuple(dict.fromkeys((*self.proposer.taps, *self.capture_taps)))

    def run(self, requests: Iterable[Request], capture: Capture | None = None) -> Iterator[tuple[int, Result]]:
        """Serve all requests (pulled lazily); yields (index, result) as each one finishes.

        capture(index, taps [T, m * d], last_hidden [T, d] pre-norm) is called just before a result is yielded, for
        the T = prompt + output - 1 tokens that the target read. Raises DsparkError on a request that cannot be
        served; nothing is silently shortened.
        """
        for active, _ in self._serve(requests, capture is not None):
            if active.result.finish_reason is not None:
                if capture is not None:
                    taps, last = (torch.cat(parts) for parts in zip(*active.captured, strict=True))
                    capture(active.index, taps, last)
                yield active.index, active.result

    def stream(self, request: Request) -> Iterator[Step]:
        """Serve one request, step by step. `last_result` is its Result afterwards."""
        for active, step in self._serve([request], False):
            self.last_result = active.result
            yield step

    def _serve(self, requests: Iterable[Request], capture: bool) -> Iterator[tuple[Active, Step]]:
        waiting = enumerate(requests)
        running: list[Active] = []
        exhausted = False
        while running or not exhausted:
            admitted: list[Active] = []
            tokens = 0
            while not exhausted and len(running) + len(admitted) < self.max_batch and tokens < PREFILL_TOKENS:
                entry = next(waiting, None)
                if entry is None:
                    exhausted = True
                    break
                admitted.append(self._admit(*entry))
                tokens += len(admitted[-1].ids)
            if admitted:
                yield from self._prefill(admitted, capture)
                running += admitted
            elif running:
                yield from self._round(running, capture)
            running = [active for active in running if active.result.finish_reason is None]

    def _admit(self, index: int, request: Request) -> Active:
        length, context = len(request.prompt_ids), self.target.max_context
        if length == 0:
            raise DsparkError("prompt", "", f"request {index} is empty; give at least one token")
        if length >= context:
            raise DsparkError("prompt", f"{length} tokens", f"{self.target.name} has a context of {context} tokens")
        if request.max_tokens < 1:
            raise DsparkError("max_tokens", request.max_tokens, "must be at least 1")
        low, high = min(request.prompt_ids), max(request.prompt_ids)
        if low < 0 or high >= self.target.vocab_size:
            bad = low if low < 0 else high
            raise DsparkError("prompt", bad, f"token ids of {self.target.name} are 0..{self.target.vocab_size - 1}")
        limit = min(request.max_tokens, context - length)
        capacity = min(context, length + limit + self.proposer.n)
        stop_ids = self.target.stop_ids if request.stop_ids is None else request.stop_ids
        seed = request.sampling.seed
        active = Active(
            index=index,
            request=request,
            rule=rule_of(request.sampling),
            seed=secrets.randbits(63) if seed is None else seed,
            ids=list(request.prompt_ids),
            limit=limit,
            stop_ids=frozenset() if request.ignore_eos else stop_ids,
            state=self.target.new_state(capacity),
        )
        self.proposer.start(active, capacity)
        return active

    def _prefill(self, admitted: list[Active], capture: bool) -> Iterator[tuple[Active, Step]]:
        """Read the prompts; the target's first token of each is committed (no round)."""
        batch = [(active.state, torch.tensor(active.ids)) for active in admitted]
        out = self.target.forward(batch, self._taps, logits="last")
        counts = [len(ids) for _, ids in batch]
        observed = []
        for active, logits, rows in zip(admitted, out.logits, _spans(counts), strict=True):
            observed.append((active, rows))
            _, token = _verify(active, logits[None], Proposal())
            active.commit([token])
        self._observe(observed, out.taps, out.last_hidden, capture)
        for active in admitted:
            yield active, Step(active.result.output_ids[-1:], None)

    def _round(self, running: list[Active], capture: bool) -> Iterator[tuple[Active, Step]]:
        """One draft pass and one verification pass for every running request."""
        proposals = self.proposer.propose(running)
        batch, widths, proposed = [], [], []
        for active, proposal in zip(running, proposals, strict=True):
            proposed.append(len(proposal.tokens))
            room = active.state.capacity - len(active.ids)  # the context ends inside the block: verify less
            del proposal.tokens[room:], proposal.laws[room:]
            batch.append((active.state, torch.tensor([active.ids[-1], *proposal.tokens])))
            widths.append(1 + len(proposal.tokens))
        out = self.target.forward(batch, self._taps)
        observed, steps = [], []
        for active, proposal, given, rows in zip(running, proposals, proposed, _spans(widths), strict=True):
            accepted, token = _verify(active, out.logits[rows], proposal)
            kept = active.commit([*proposal.tokens[:accepted], token])
            active.state.truncate(len(active.ids) - 1)
            record = Round(given, len(proposal.tokens), min(accepted, len(kept)))
            active.result.rounds.append(record)
            observed.append((active, slice(rows.start, rows.start + len(kept))))
            steps.append((active, Step(kept, record)))
        self._observe(observed, out.taps, out.last_hidden, capture)
        yield from steps

    def _observe(
        self, observed: list[tuple[Active, slice]], taps: Tensor | None, last_hidden: Tensor, capture: bool
    ) -> None:
        """Hand the taps of committed tokens to the proposer (requests that go on) and to the capture."""
        if self.proposer.taps and taps is not None:
            width = len(self.proposer.taps) * self.target.hidden_size  # the proposer's own taps come first
            going = [(a, taps[rows, :width]) for a, rows in observed if a.result.finish_reason is None]
            if going:
                self.proposer.observe(going)
        if capture and taps is not None:
            chosen = self._select_captured(taps)
            for active, rows in observed:
                active.captured.append((chosen[rows].clone(), last_hidden[rows].clone()))

    def _select_captured(self, taps: Tensor) -> Tensor:
        if self._taps == self.capture_taps:
            return taps
        d = self.target.hidden_size
        places = [self._taps.index(tap) for tap in self.capture_taps]
        return torch.cat([taps[:, p * d : (p + 1) * d] for p in places], dim=-1)


def _spans(counts: Iterable[int]) -> Iterator[slice]:
    start = 0
    for count in counts:
        yield slice(start, start + count)
        start += count


def _verify(active: Active, logits: Tensor, proposal: Proposal) -> tuple[int, int]:
    """Apply the request's accept rule to target logits [1 + scheduled, V]: (accepted, the target's own token)."""
    if active.rule == "greedy":
        return verify_greedy(logits, proposal.tokens)
    sampling = active.request.sampling
    if active.rule == "coupled":
        return verify_coupled(logits, proposal.tokens, sampling, active.seed, len(active.ids))
    return verify_rejection(logits, proposal.tokens, proposal.laws, sampling, active.seed, active.round_index)

"""The cost profile: seconds of a verification pass against its tokens, and of a draft pass against its requests.

Measured once a machine and pair, kept as one JSON file, and read by whoever weighs a longer block against its price
(method: scheduling; SPS(B) = 1 / verify_seconds(B)).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from scipy.optimize import isotonic_regression

from dspark.calibration.passes import Passes, time_in_turns
from dspark.data.prompts import write_text
from dspark.decoding.drafting import DraftProposer
from dspark.decoding.proposers import Proposer, make_proposer
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError
from dspark.machine import describe_machine
from dspark.targets.base import Target

TOKENS = (1, 2, 4, 8, 16, 32, 64)
REQUESTS = (1, 2, 4, 8, 16)
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=1e-9, le=1e6, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CostSettings(_Frozen):
    """What was measured. context: tokens every request had read; n: draft tokens a round at most; threads: PyTorch's;
    weight_bytes: of the target, as it is stored (None: it does not tell)."""

    target: str
    draft: str
    dtype: str
    threads: Count
    context: Count
    n: Count
    repeats: Count
    weight_bytes: Count | None = None


class VerifyPoint(_Frozen):
    """Median seconds of one target pass; counts: new tokens of each request in it."""

    counts: Annotated[tuple[Count, ...], Field(min_length=1)]
    seconds: Seconds

    @property
    def tokens(self) -> int:
        return sum(self.counts)


class DraftPoint(_Frozen):
    """Median seconds of one draft pass for so many requests, with writing the context of two tokens of each.

    n: draft tokens it gave each (None: as many as the settings say).
    """

    requests: Count
    seconds: Seconds
    n: Count | None = None


class CostProfile(_Frozen):
    """Measured curves, and what lies between the points.

    A verification pass is taken to cost f(tokens) + requests * c: the linear layers see tokens only, attention runs
    request by request. c comes from batches of equal tokens and other spread, f is the isotonic fit of the rest (more
    tokens never cost less; what noise or a kernel says otherwise is pooled), linear between measured points, constant
    below the first and going on with the mean slope from first to last above the last. context_token: seconds for a
    token of a draft context that is written late, many tokens at once.
    """

    version: Literal[1] = 1
    machine: dict[str, str]
    settings: CostSettings
    verify: Annotated[tuple[VerifyPoint, ...], Field(min_length=1)]
    draft: Annotated[tuple[DraftPoint, ...], Field(min_length=1)]
    context_token: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _each_once(self) -> CostProfile:
        whole = self.settings.n
        widths = [point.n or whole for point in self.draft]
        if len({(point.requests, n) for point, n in zip(self.draft, widths, strict=True)}) != len(widths):
            raise ValueError("draft must have every number of requests once")
        if max(widths) != whole:
            raise ValueError(f"draft must have points of {whole} tokens, and none of more")
        return self

    def verify_seconds(self, tokens: int, requests: int | None = None) -> float:
        """One target pass over `tokens` new tokens of `requests` requests (None: as few as blocks of n + 1 allow).

        Raises DsparkError unless 1 <= requests <= tokens.
        """
        if requests is None:
            requests = -(-tokens // (self.settings.n + 1))
        if not 1 <= requests <= tokens:
            raise DsparkError("requests", requests, f"must be 1..{tokens}, every one has a new token at least")
        return _read(self._verify_curve, tokens) + requests * self.request_seconds

    def steps_per_second(self, tokens: int) -> float:
        """The paper's SPS(B): passes a second with B tokens in the batch. It never rises with B."""
        return 1.0 / self.verify_seconds(tokens)

    def verify_table(self, requests: int, most: int) -> np.ndarray:
        """Seconds of a pass over 0, 1, ..., `most` new tokens of `requests` requests, [most + 1], a step a token; the
        entries below `requests`, which no pass has, are those of `requests` tokens."""
        tokens = np.maximum(np.arange(most + 1), max(requests, 1))
        xs, ys = self._verify_curve
        slope = (ys[-1] - ys[0]) / (xs[-1] - xs[0]) if len(xs) > 1 else 0.0
        inside = np.interp(tokens, xs, ys) + np.maximum(tokens - xs[-1], 0) * slope
        return inside + requests * self.request_seconds

    def draft_seconds(self, requests: int, n: int | None = None) -> float:
        """One draft pass for `requests` requests: as many slots as asked for (None: all), or, where that was not
        measured, the next more. Raises DsparkError unless requests >= 1."""
        if requests < 1:
            raise DsparkError("requests", requests, "must be at least 1")
        widths = self.widths
        width = widths[-1] if n is None else next((one for one in widths if one >= n), widths[-1])
        return _read(self._draft_curves[width], requests)

    def context_seconds(self, tokens: int) -> float:
        """Writing so many tokens to a draft context that had fallen behind."""
        return tokens * self.context_token

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The numbers of draft tokens a round that were measured, ascending."""
        return tuple(sorted({point.n or self.settings.n for point in self.draft}))

    @cached_property
    def request_seconds(self) -> float:
        """c: what one more request adds to a pass of the same tokens (0 when no two points tell)."""
        found = []
        for _, group in groupby(sorted(self.verify, key=lambda p: (p.tokens, len(p.counts))), key=lambda p: p.tokens):
            same = list(group)
            few, many = same[0], same[-1]
            if len(many.counts) > len(few.counts):
                found.append((many.seconds - few.seconds) / (len(many.counts) - len(few.counts)))
        most = min(point.seconds / len(point.counts) for point in self.verify)  # so that f stays above 0
        return min(max(0.0, median(found)), most) if found else 0.0

    @cached_property
    def _verify_curve(self) -> tuple[np.ndarray, np.ndarray]:
        return _monotone((p.tokens, p.seconds - len(p.counts) * self.request_seconds) for p in self.verify)

    @cached_property
    def _draft_curves(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        return {
            n: _monotone((p.requests, p.seconds) for p in self.draft if (p.n or self.settings.n) == n)
            for n in self.widths
        }

    def save(self, path: str | Path) -> None:
        """Write the file, whole."""
        write_text(path, json.dumps(self.model_dump(mode="json"), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostProfile:
        """Raises DsparkError when the file is missing, or the first thing in it that is wrong."""
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise DsparkError("cost", str(path), f"cannot be read ({error.strerror}); measure it first") from None
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the file"
            raise DsparkError("cost", str(path), f"{field}: {first['msg']}; measure it again") from None


def _monotone(points: Iterable[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """(x, seconds) -> x ascending, and the non-decreasing seconds nearest to the means at each x."""
    ordered = sorted(points)
    means = {x: fmean(y for _, y in group) for x, group in groupby(ordered, key=lambda point: point[0])}
    fitted = isotonic_regression(list(means.values())).x
    return np.array(list(means), dtype=np.float64), np.asarray(fitted)


def _read(curve: tuple[np.ndarray, np.ndarray], x: int) -> float:
    xs, ys = curve
    if x <= xs[-1] or len(xs) == 1:
        return float(np.interp(x, xs, ys))
    return float(ys[-1] + (x - xs[-1]) * (ys[-1] - ys[0]) / (xs[-1] - xs[0]))


def spread(tokens: int, widest: int) -> tuple[int, ...]:
    """`tokens` over as few requests as hold at most `widest` each: 20 by 8 -> (8, 8, 4)."""
    whole, rest = divmod(tokens, widest)
    return (widest,) * whole + ((rest,) if rest else ())


@torch.inference_mode()
def measure_cost(
    target: Target,
    draft: Draft,
    ids: Sequence[int],
    *,
    draft_name: str,
    tokens: Sequence[int] = TOKENS,
    requests: Sequence[int] = REQUESTS,
    n: int | None = None,
    widths: Sequence[int] = (),
    repeats: int = 20,
) -> CostProfile:
    """Measure both curves and the price of a late context, in turns, every request with the context `ids`.

    Every number of tokens is measured over as few requests as a round of n has, and over one request a token as far
    as `requests` goes. widths: shorter draft passes to measure as well, those below n. Raises DsparkError for a draft
    of another target, n > gamma, a context without room, or numbers below 1.
    """
    for field, values in (("tokens", tokens), ("requests", requests)):
        if not values or min(values) < 1:
            raise DsparkError(field, list(values), "must be numbers of at least 1")
    proposers: dict[int | None, Proposer] = {None: make_proposer(target, draft, n)}
    whole = proposers[None].n
    proposers |= {one: make_proposer(target, draft, one) for one in sorted(set(widths)) if one < whole}
    widest, alone = whole + 1, max(requests)
    batches = {spread(count, widest): None for count in tokens}
    batches |= {(1,) * count: None for count in tokens if count <= alone}
    most = max(alone, *map(len, batches))
    passes = {one: Passes(target, _drafting(proposer), ids, most, widest) for one, proposer in proposers.items()}
    jobs = {counts: partial(passes[None].verify, counts) for counts in batches}
    drafts = {(one, count): partial(passes[one].draft, count) for one in passes for count in requests}
    writing: dict[object, Callable[[], None]] = {"context": passes[None].write}
    seconds = {key: median(taken) for key, taken in time_in_turns({**jobs, **drafts, **writing}, repeats).items()}
    return CostProfile(
        machine=describe_machine(),
        settings=CostSettings(
            target=target.name,
            draft=draft_name,
            dtype=str(target.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            context=len(ids),
            n=whole,
            repeats=repeats,
            weight_bytes=getattr(target, "weight_bytes", None),
        ),
        verify=tuple(VerifyPoint(counts=counts, seconds=seconds[counts]) for counts in jobs),
        draft=tuple(DraftPoint(requests=count, seconds=seconds[one, count], n=one) for one, count in drafts),
        context_token=seconds["context"] / len(ids),
    )


def _drafting(proposer: Proposer) -> DraftProposer:
    assert isinstance(proposer, DraftProposer)  # a draft was given
    return proposer

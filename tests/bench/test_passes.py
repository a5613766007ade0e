"""Pass times are of the passes that decoding makes, and leave the context as it was."""

from __future__ import annotations

import pytest

from dspark.bench.compare import Question
from dspark.bench.passes import measure_passes, median_ratio
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget


def test_widths_and_shares(target: TransformersTarget, draft: DSparkDraft, questions: list[Question]) -> None:
    ids = list(questions[3].ids)
    times = measure_passes(target, draft, ids, widths=(1, 8), n=7, repeats=3)
    assert (times.context, times.n, [row.tokens for row in times.verify]) == (len(ids), 7, [1, 8])
    assert times.verify[0].ratio == 1.0 and all(row.seconds > 0 for row in times.verify)
    assert times.draft_share == pytest.approx(times.draft_seconds / times.verify[0].seconds)


def test_a_context_without_room_is_refused(target: TransformersTarget, draft: DSparkDraft) -> None:
    with pytest.raises(DsparkError, match="context of 256"):
        measure_passes(target, draft, [5] * 250, repeats=1)


def test_a_ratio_of_medians_is_paired_by_turn() -> None:
    base = [1.0, 1.1, 0.9, 10.0, 1.0]  # one turn was slow on both sides
    same = median_ratio(base, [2 * one for one in base])
    assert (same.value, same.low, same.high) == pytest.approx((2.0, 2.0, 2.0))
    wide = median_ratio(base, [2.0, 3.0, 2.5, 20.0, 1.8])
    assert wide.low is not None and wide.high is not None and wide.low < wide.value < wide.high
    assert median_ratio([1.0], [3.0]).low is None
    with pytest.raises(DsparkError, match="same turns"):
        median_ratio([1.0], [])

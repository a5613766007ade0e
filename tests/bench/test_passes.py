"""Pass times are of the passes that decoding makes, and leave the context as it was."""

from __future__ import annotations

import pytest

from dspark.bench.compare import Question
from dspark.bench.passes import measure_passes
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

"""The cost profile: measured on a real pair, kept in a file, read as curves that never fall."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.calibration.cost import CostProfile, CostSettings, DraftPoint, VerifyPoint, measure_cost, spread
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget

SETTINGS = CostSettings(target="t", draft="d", dtype="float32", threads=2, context=256, n=7, repeats=3)


def profile(verify: dict[tuple[int, ...], float], draft: dict[int, float] | None = None) -> CostProfile:
    return CostProfile(
        machine={"processor": "none"},
        settings=SETTINGS,
        verify=tuple(VerifyPoint(counts=counts, seconds=seconds) for counts, seconds in verify.items()),
        draft=tuple(DraftPoint(requests=count, seconds=seconds) for count, seconds in (draft or {1: 1.0}).items()),
    )


def test_measured_on_a_pair(target: TransformersTarget, draft: DSparkDraft, tmp_path: Path) -> None:
    ids = [5 + i % 90 for i in range(60)]
    found = measure_cost(target, draft, ids, draft_name="tiny", tokens=(1, 4, 8), requests=(1, 2, 4), n=3, repeats=2)
    assert [point.counts for point in found.verify] == [(1,), (4,), (4, 4), (1, 1, 1, 1)]
    assert [point.requests for point in found.draft] == [1, 2, 4]
    settings = found.settings
    assert (settings.context, settings.n, settings.repeats, settings.dtype) == (60, 3, 2, "float32")
    assert found.machine["torch"] and found.verify_seconds(5) > 0 and found.draft_seconds(3) > 0
    assert found.context_seconds(60) == pytest.approx(60 * found.context_token) and found.context_token > 0
    path = tmp_path / "runs" / "cost.json"
    found.save(path)
    assert CostProfile.load(path) == found
    assert [one.name for one in path.parent.iterdir()] == ["cost.json"]


def test_between_the_points() -> None:
    found = profile({(1,): 0.010, (2,): 0.016, (4,): 0.012, (8,): 0.020}, {1: 0.002, 2: 0.003, 4: 0.004})
    assert found.request_seconds == 0.0  # no two points tell
    # 2 tokens took longer than 4: noise, so both cost their mean
    assert [found.verify_seconds(t) for t in (1, 2, 3, 4, 6, 8)] == pytest.approx([0.010, *[0.014] * 3, 0.017, 0.020])
    assert found.verify_seconds(15, requests=2) == pytest.approx(0.030)  # the mean slope goes on
    assert [found.draft_seconds(r) for r in (1, 3, 7)] == pytest.approx([0.002, 0.0035, 0.006])


def test_requests_have_a_price_of_their_own() -> None:
    measured = {(1,): 0.011, (4,): 0.014, (1,) * 4: 0.017, (8,): 0.018, (1,) * 8: 0.025, (8, 8): 0.027}
    found = profile(measured)
    assert found.request_seconds == pytest.approx(0.001)
    assert [found.verify_seconds(sum(counts), len(counts)) for counts in measured] == pytest.approx(
        [*measured.values()]
    )
    assert found.verify_seconds(16) == pytest.approx(0.027)  # two requests of n + 1 tokens
    assert found.verify_seconds(8, 3) == pytest.approx(0.020)


@given(
    st.dictionaries(st.integers(1, 64), st.floats(1e-4, 1.0), min_size=1),
    st.dictionaries(st.integers(1, 64), st.floats(1e-4, 1.0)),
)
def test_more_never_costs_less(few: dict[int, float], many: dict[int, float]) -> None:
    verify = {spread(tokens, 8): seconds for tokens, seconds in few.items()}
    found = profile({**verify, **{(1,) * tokens: seconds for tokens, seconds in many.items()}}, few)
    for read in (found.verify_seconds, found.draft_seconds):
        times = [read(count) for count in range(1, 100)]
        assert times[0] > 0
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))


def test_spread() -> None:
    assert [spread(t, 8) for t in (1, 8, 20)] == [(1,), (8,), (8, 8, 4)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("verify"), "verify: Field required"),
        (lambda d: d["verify"][0].update(seconds=-1.0), "verify.0.seconds: Input should be greater than"),
        (lambda d: d["settings"].update(extra=1), "settings.extra"),
        (lambda d: d.update(version=2), "version: Input should be 1"),
        (lambda d: d["verify"][0].update(seconds=1e308), "verify.0.seconds: Input should be less than"),
        (
            lambda d: d["draft"][0].update(n=9),
            "the file: Value error, draft must have points of 7 tokens, and none of more",
        ),
        (
            lambda d: d["draft"].append(d["draft"][0]),
            "the file: Value error, draft must have every number of requests once",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "cost.json"
    values = profile({(1,): 0.01}).model_dump(mode="json")
    change(values)  # type: ignore[operator]
    path.write_text(json.dumps(values))
    with pytest.raises(DsparkError, match=f"cost = '{path}': {message}.*measure it again"):
        CostProfile.load(path)


def test_no_file_and_no_numbers(target: TransformersTarget, draft: DSparkDraft, tmp_path: Path) -> None:
    with pytest.raises(DsparkError, match=r"cannot be read .*measure it first"):
        CostProfile.load(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"version": 1, "mach')
    with pytest.raises(DsparkError, match="the file: Invalid JSON"):
        CostProfile.load(tmp_path / "torn.json")
    found = profile({(1,): 0.01})
    for call in (lambda: found.verify_seconds(2, 3), lambda: found.verify_seconds(0), lambda: found.draft_seconds(0)):
        with pytest.raises(DsparkError, match="requests = "):
            call()
    with pytest.raises(DsparkError, match=r"tokens = \[0\]"):
        measure_cost(target, draft, [5] * 9, draft_name="tiny", tokens=[0])

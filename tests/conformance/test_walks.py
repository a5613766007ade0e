"""The comparison itself: what is equal, what is a tie, and what is a fault."""

from __future__ import annotations

from tests.conformance.walks import Seen, Walk, compare, their_walk

IDS = [5, 6, 7, 8, 9]
CLEAR, CLOSE = 1.0, 1e-4


def ours(margins: list[float] | None = None, drafts: list[float] | None = None) -> Walk:
    """Two rounds: after one token [6, 7] of which both stay, after four [9, 0] of which one does."""
    rounds = [Seen(1, [6, 7], 2, drafts or [CLEAR] * 2), Seen(4, [9, 0], 1, [CLEAR] * 2)]
    return Walk(IDS, rounds, margins or [CLEAR] * 5)


def theirs(first: list[int], ids: list[int] = IDS, kept: int = 2) -> Walk:
    return Walk(ids, [Seen(1, first, kept), Seen(4, [9, 0], 1)])


def test_rounds_as_an_engine_tells_them() -> None:
    walk = their_walk(IDS, [([6, 7], [6, 7, 8]), ([9, 0], [9, 3]), ([1, 1], [1])])
    assert walk.rounds == [Seen(1, [6, 7], 2), Seen(4, [9, 0], 1)]  # the answer ended inside the second


def test_equal() -> None:
    found = compare([ours()], [theirs([6, 7])])
    assert (found.same_answers, found.rounds, found.equal, found.ours, found.theirs) == (1, 2, 2, 3, 3)
    assert not found.faults and not found.ties and not found.alone


def test_another_draft_token_is_a_tie_only_where_ours_was_close() -> None:
    assert len(compare([ours()], [theirs([6, 3])]).faults) == 1
    found = compare([ours(drafts=[CLEAR, CLOSE])], [theirs([6, 3])])
    assert len(found.ties) == 1 and not found.faults and found.equal == 1
    assert len(compare([ours(drafts=[CLEAR, CLOSE])], [theirs([3, 7])]).faults) == 1  # the first slot was clear


def test_other_ids() -> None:
    other = theirs([6, 7], [5, 6, 7, 0, 0])
    assert len(compare([ours()], [other]).faults) == 1
    found = compare([ours([CLEAR, CLEAR, CLEAR, CLOSE, CLEAR])], [other])
    assert len(found.ties) == 1 and not found.faults and found.rounds == 1  # compared up to there


def test_another_count() -> None:
    assert len(compare([ours()], [theirs([6, 7], kept=1)]).faults) == 1
    assert len(compare([ours(drafts=[CLEAR, CLOSE])], [theirs([6, 7], kept=1)]).faults) == 1  # the tokens were told
    assert len(compare([ours(drafts=[CLEAR, CLOSE])], [theirs([], kept=1)]).ties) == 1


def test_a_round_of_one_side_needs_a_tie_before() -> None:
    other = Walk(IDS, [Seen(1, [6, 7], 2)])
    found = compare([ours()], [other])
    assert found.alone == 1 and len(found.faults) == 1

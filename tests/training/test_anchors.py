"""Anchors are drawn uniformly from supervised positions; labels, masks and contexts stop at the document's end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import DsparkError
from dspark.training.anchors import build_anchor_batch, select_anchors

IDS = torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23])
DOCUMENTS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1])
MASK = torch.tensor([0, 1, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_anchor_has_a_supervised_successor_in_its_document():
    # 4 is followed by another document's token, 5 is not supervised, 8 is the last token
    assert select_anchors(MASK, DOCUMENTS, 100, seeded(0)).tolist() == [1, 2, 3, 6, 7]


def test_a_supervised_neighbour_of_another_document_does_not_make_an_anchor():
    assert select_anchors(torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1]), 9).tolist() == [0, 2]


def test_a_seed_fixes_the_anchors_and_they_ascend_without_repeats():
    mask, documents = torch.ones(200, dtype=torch.bool), torch.zeros(200, dtype=torch.int64)
    first, again, other = (select_anchors(mask, documents, 50, seeded(s)) for s in (3, 3, 4))
    assert first.tolist() == again.tolist() == sorted(set(first.tolist()))
    assert first.tolist() != other.tolist() and len(first) == 50


def test_anchors_are_uniform():
    generator, draws = seeded(0), 4000
    counts = torch.zeros(9)
    for _ in range(draws):
        counts[select_anchors(MASK, DOCUMENTS, 2, generator)] += 1
    usable = counts[[1, 2, 3, 6, 7]]
    assert counts.sum() == usable.sum() == 2 * draws
    expected = 2 * draws / 5
    # each count is binomial(draws, 2 / 5): five standard deviations
    assert ((usable - expected).abs() < 5 * (draws * 0.4 * 0.6) ** 0.5).all()


def test_a_block_by_hand():
    batch = build_anchor_batch(IDS, MASK, DOCUMENTS, torch.tensor([2, 6]), 4)
    assert batch.anchor_ids.tolist() == [12, 21]
    assert batch.doc_start.tolist() == [0, 5]
    assert batch.mask.tolist() == [[True, True, False, False]] * 2
    assert [row[:2] for row in batch.labels.tolist()] == [[13, 14], [22, 23]]
    assert [row[:2] for row in batch.prev_ids.tolist()] == [[12, 13], [21, 22]]
    assert [row[:2] for row in batch.label_positions.tolist()] == [[2, 3], [6, 7]]


def test_the_mask_ends_at_the_first_unsupervised_token():
    mask = torch.tensor([1, 1, 0, 1, 1], dtype=torch.bool)
    batch = build_anchor_batch(IDS[:5], mask, DOCUMENTS[:5], torch.tensor([0]), 4)
    assert batch.mask.tolist() == [[True, False, False, False]]


def test_an_anchor_without_a_label_keeps_no_slot():
    batch = build_anchor_batch(IDS, MASK, DOCUMENTS, torch.tensor([4, 8]), 3)
    assert not batch.mask.any()


def test_a_document_id_used_twice_does_not_join_two_documents():
    documents = torch.tensor([0, 0, 1, 0, 0])
    batch = build_anchor_batch(IDS[:5], torch.ones(5, dtype=torch.bool), documents, torch.tensor([0, 3]), 4)
    assert batch.mask.sum(1).tolist() == [1, 1] and batch.doc_start.tolist() == [0, 3]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blocks_equal_the_definition(data: st.DataObject):
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    documents = torch.tensor([d for d, n in enumerate(lengths) for _ in range(n)])
    size, gamma = len(documents), data.draw(st.integers(1, 7))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    ids = torch.arange(size) + 100
    batch = build_anchor_batch(ids, mask, documents, torch.arange(size), gamma)
    for a in range(size):
        assert batch.doc_start[a] == min(i for i in range(size) if documents[i] == documents[a])
        alive = True
        for k in range(1, gamma + 1):
            alive = alive and a + k < size and bool(documents[a + k] == documents[a]) and bool(mask[a + k])
            assert bool(batch.mask[a, k - 1]) == alive
            if alive:
                assert batch.labels[a, k - 1] == ids[a + k] and batch.prev_ids[a, k - 1] == ids[a + k - 1]
                assert batch.label_positions[a, k - 1] == a + k - 1
    assert int(batch.label_positions.max()) < size


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("anchors", lambda: select_anchors(MASK, DOCUMENTS, -1)),
        ("packed row", lambda: select_anchors(MASK[:3], DOCUMENTS, 1)),
        ("packed row", lambda: select_anchors(MASK[:0], DOCUMENTS[:0], 1)),
        ("packed row", lambda: build_anchor_batch(IDS[:3], MASK, DOCUMENTS, torch.tensor([0]), 2)),
        ("gamma", lambda: build_anchor_batch(IDS, MASK, DOCUMENTS, torch.tensor([0]), 0)),
        ("anchor_index", lambda: build_anchor_batch(IDS, MASK, DOCUMENTS, torch.tensor([9]), 2)),
        ("anchor_index", lambda: build_anchor_batch(IDS, MASK, DOCUMENTS, torch.tensor([-1]), 2)),
    ],
)
def test_bad_input_names_the_field(field, call):
    with pytest.raises(DsparkError) as error:
        call()
    assert error.value.field == field

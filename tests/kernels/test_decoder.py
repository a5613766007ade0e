"""A whole pass with each library: a token's numbers never depend on what else is read, nor on what memory held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.conftest import small_model, small_target
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from dspark.kernels.decoder import head, interleaved, markov_tokens
from dspark.kernels.matrix import pack
from dspark.targets.transformers import TransformersTarget

LENGTH = 96


def sliding_target() -> TransformersTarget:
    model = small_model(MistralForCausalLM, MistralConfig, sliding_window=21, num_key_value_heads=1)
    return TransformersTarget("small", model, None)


TARGETS: dict[str, Callable[[], TransformersTarget]] = {
    "biases": lambda: small_target(attention_bias=True, mlp_bias=True),
    "a window": sliding_target,
}


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 100, (LENGTH,))


def read(target: TransformersTarget, ids: Tensor, sizes: list[int], others: bool = False) -> list[Tensor]:
    """Logits and taps of every token, read in parts of these sizes, alone or beside requests of other lengths."""
    state, parts, beside = target.new_state(LENGTH), [], []
    for part in ids.split(sizes):
        batch = [(state, part)]
        if others:
            beside.append(target.new_state(LENGTH))
            old = [(one, torch.randint(0, 100, (1 + i % 3,))) for i, one in enumerate(beside[-4:-1])]
            batch = [*old, *batch, (beside[-1], torch.randint(0, 100, (1 + len(beside) % 40,)))]
        out = target.forward(batch, taps=[0, 1, 2])
        row = sum(len(new) for _, new in batch[: len(batch) - 2]) if others else 0
        parts.append((out.logits[row : row + len(part)], out.taps[row : row + len(part)], torch.tensor(out.best)))
    logits, taps, _ = (torch.cat(each) for each in zip(*parts, strict=True))
    return [logits, taps]


@pytest.mark.parametrize("name", TARGETS)
def test_a_token_has_the_same_bits_however_it_is_read(kind: str, name: str, ids: Tensor) -> None:
    """Alone, in blocks of 1 to 16, in a prompt of 70 or of 96, and beside others: verifying a block of drafts must give
    what plain decoding gives, to the last bit, or near ties fall otherwise."""
    target = TARGETS[name]()
    assert target._compiled is not None
    wanted = read(target, ids, [1] * LENGTH)
    for sizes in ([70, *[1] * 26], [LENGTH], [5] * 19 + [1], [7, 16, 2, 13, 3, 11, 15, 4, 9, 16], [70, 8, 8, 8, 2]):
        for others in (False, True):
            for found, alone in zip(read(target, ids, sizes, others), wanted, strict=True):
                assert torch.equal(found, alone), (sizes, others)
    for size in range(1, 17):
        sizes = [40, *[size] * (56 // size)] + ([56 % size] if 56 % size else [])
        assert torch.equal(read(target, ids, sizes)[0], wanted[0]), size


def test_threads_change_no_bit_of_a_pass(kind: str, ids: Tensor, threads: None) -> None:
    target, found = sliding_target(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(read(target, ids, [70, 1, 9, 16]))
    for logits, taps in found[1:]:
        assert torch.equal(logits, found[0][0]) and torch.equal(taps, found[0][1])


@pytest.mark.parametrize("name", TARGETS)
def test_memory_that_was_never_written_is_not_read(kind: str, name: str, ids: Tensor) -> None:
    """K/V past a request's tokens, and what a truncated one forgot, may hold anything: 0 times NaN is NaN."""
    target = TARGETS[name]()
    wanted = read(target, ids, [30, 8, 1, 31, 2, 24])[0]
    state = target.new_state(LENGTH)

    def spoil() -> None:
        for held in (*state.keys, *state.values):
            held[:, :, state.length :] = torch.nan

    spoil()
    found = []
    for part in ids.split([30, 8, 1, 31, 2, 24]):
        target.forward([(state, torch.randint(0, 100, (min(6, LENGTH - state.length - len(part)),)))])
        state.truncate(sum(len(logits) for logits in found))
        spoil()
        found.append(target.forward([(state, part)]).logits)
        spoil()
    assert torch.equal(torch.cat(found), wanted)


def odd_rows(outputs: int) -> tuple[Tensor, list[int]]:
    """Rows of logits and the place of the largest of each; -1 where there is none."""
    inf, nan = torch.inf, torch.nan
    plain = torch.linspace(-1, 0, outputs)
    rows, places = [], []

    def add(place: int, **changes: Any) -> None:
        row = plain.clone()
        for at, number in changes.items():
            row[int(at[1:])] = number
        rows.append(row)
        places.append(place)

    last = outputs - 1
    add(last)
    for at in (0, 3, 15, 16, 17, 31, last):
        add(at, **{f"_{at}": 2.0})
    add(5, _5=2.0, _21=2.0)
    add(20, **{"_20": 2.0, f"_{last}": 2.0})
    add(18, _18=2.0, _33=2.0, _34=2.0, _50=2.0)
    add(7, _7=2.0, _8=-inf)
    for at in (0, 4, 18, last):
        add(-1, **{f"_{at}": nan})
        add(-1, **{f"_{at}": inf})
    rows.append(torch.full((outputs,), -inf))
    rows.append(torch.full((outputs,), -inf))
    rows[-1][last] = -3.0
    rows.append(torch.zeros(outputs))
    return torch.stack(rows), [*places, -1, last, 0]


@pytest.mark.parametrize("outputs", [70, 96, 113])
def test_the_first_largest_of_a_row(kind: str, outputs: int) -> None:
    """Ties go to the lowest id, as argmax has it, wherever they lie in the vectors; a row without a largest says so."""
    rows, places = odd_rows(outputs)
    requests = len(rows)
    weight = torch.zeros(outputs, 32)
    tokens = markov_tokens(
        rows[:, None].contiguous(), torch.randn(4, 32), pack(weight), torch.zeros(requests).long(), None
    )
    assert tokens[:, 0].tolist() == places
    for row, place in zip(rows, places, strict=True):  # the same as logits of a head
        weight[:, 0] = row / 2
        x = torch.zeros(3, 32)
        x[:, 0], x[0, 1] = 4.0, 4.0
        normed, logits, best = head(x, torch.tensor([2, 1]), torch.full((32,), 2 / 32**0.5), 0.0, pack(weight))
        torch.testing.assert_close(normed[0], torch.tensor([2.0, *[0.0] * 31]))
        assert best.tolist() == [place, place] and logits.shape == (2, outputs)
    normed, logits, best = head(x, torch.empty(0, dtype=torch.int64), torch.ones(32), 1e-5, pack(weight))
    assert normed.shape == (0, 32) and logits.shape == (0, outputs) and best.shape == (0,)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("slots", [1, 5])
def test_markov_tokens_slot_by_slot(kind: str, slots: int, reduced: bool) -> None:
    """Each slot's token decides the next one's bias; ids of a reduced vocabulary are looked up in between."""
    vocabulary, outputs, rank, requests = 90, 75 if reduced else 90, 64, 21
    base, w1, w2 = torch.randn(requests, slots, outputs), torch.randn(vocabulary, rank), torch.randn(outputs, rank)
    ids = torch.randperm(vocabulary)[:outputs].sort().values if reduced else None
    first = torch.randint(0, vocabulary, (requests,))
    found = markov_tokens(base, w1, pack(w2), first, ids)
    before = first
    for slot in range(slots):
        logits = base[:, slot].double() + w1[before].double() @ w2.double().T
        before = logits.argmax(1) if ids is None else ids[logits.argmax(1)]
        assert found[:, slot].tolist() == before.tolist()
    base[3, 0, 7] = torch.nan
    spoilt = markov_tokens(base, w1, pack(w2), first, ids)
    assert spoilt[3, 0] == -1 and torch.equal(spoilt[4:], found[4:]) and torch.equal(spoilt[:3], found[:3])


def test_gate_and_up_by_turns() -> None:
    gate, up = torch.arange(64.0)[:, None].expand(64, 2), -torch.arange(64.0)[:, None].expand(64, 2)
    both = interleaved(gate, up)
    assert both.shape == (128, 2)
    assert torch.equal(both[32:48], gate[16:32]) and torch.equal(both[48:64], up[16:32])
    assert torch.equal(interleaved(gate[:, 0], up[:, 0]), both[:, 0])

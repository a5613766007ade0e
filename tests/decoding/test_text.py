"""Text piece by piece: any split of the ids gives the same text, and no piece holds half a character."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dspark.decoding.text import HALF_CHARACTER, TextStream, decode, token_pieces

TEXT = "naïve 日本 🙂\u200d💻 end"


def test_a_character_waits_for_its_last_byte(byte_tokenizer: Any) -> None:
    ids = byte_tokenizer("é🙂").input_ids
    stream = TextStream(byte_tokenizer)
    assert [stream.push([one]) for one in ids] == ["", "é", "", "", "", "🙂"]
    assert stream.flush() == ""


def test_an_answer_cut_inside_a_character_shows_it_at_the_end_only(byte_tokenizer: Any) -> None:
    ids = byte_tokenizer("ok 🙂").input_ids[:-1]
    stream = TextStream(byte_tokenizer)
    assert stream.push(ids) == "ok "
    assert stream.flush() == HALF_CHARACTER
    assert "".join(token_pieces(byte_tokenizer, ids)) == decode(byte_tokenizer, ids)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(text=st.text(max_size=12), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_any_split_gives_the_same_text(byte_tokenizer: Any, text: str, cuts: list[int]) -> None:
    ids = byte_tokenizer(text + TEXT).input_ids
    stream, out, start = TextStream(byte_tokenizer), [], 0
    for end in [*sorted(min(cut, len(ids)) for cut in cuts), len(ids)]:
        out.append(stream.push(ids[start:end]))
        start = end
    assert "".join([*out, stream.flush()]) == text + TEXT
    assert not any(piece.endswith(HALF_CHARACTER) for piece in out) or HALF_CHARACTER in text


class Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.ids = tokenizer, 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.ids += len(ids)
        return str(self.tokenizer.decode(ids, **options))


def byte_ids(tokenizer: Any, raw: bytes) -> list[int]:
    """One id for each byte, whether they make characters or not."""
    names = bytes_to_unicode()
    return [tokenizer.convert_tokens_to_ids(names[byte]) for byte in raw]


@pytest.mark.parametrize("garbage", [b"\x80", b"\xe2\x82", b"\xf0\x9f\x99", b"\xf0", b"\xf0\x9f\x99\xe2\x82\xc3"])
@pytest.mark.parametrize("before", ["", "a", "\u00e9 "])
def test_bytes_that_are_no_text_take_no_more_work_each_the_more_they_are(
    byte_tokenizer: Any, garbage: bytes, before: str
) -> None:
    ids = byte_ids(byte_tokenizer, before.encode() + garbage * 1000 + "\N{PARTY POPPER}".encode())
    counting = Counting(byte_tokenizer)
    stream = TextStream(counting)
    text = "".join(stream.push([one]) for one in ids) + stream.flush()
    assert text == decode(byte_tokenizer, ids)
    assert counting.ids < 60 * len(ids)


@pytest.mark.parametrize("before", ["", "a", "\u00e9"])
@pytest.mark.parametrize("half", [b"", b"\xf0\x9f"])
def test_special_tokens_without_end_take_no_more_work_each(byte_tokenizer: Any, before: str, half: bytes) -> None:
    ids = byte_ids(byte_tokenizer, before.encode() + half) + [byte_tokenizer.eos_token_id] * 2000
    ids += byte_ids(byte_tokenizer, b"\x8e\x89b")
    counting = Counting(byte_tokenizer)
    stream = TextStream(counting)
    text = "".join(stream.push([one]) for one in ids) + stream.flush()
    assert text == decode(byte_tokenizer, ids)
    assert counting.ids < 50 * len(ids)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
@given(
    runs=st.lists(
        st.tuples(
            st.sampled_from([b"\x80", b"\xe2\x82", b"\xf0\x9f\x8e", b"\xe2\x82\xac", b"\xed\xa0", b"a", b"\xff"]),
            st.integers(1, 70),
        ),
        max_size=5,
    )
)
def test_any_bytes_give_the_text_of_all_of_them(byte_tokenizer: Any, runs: list[tuple[bytes, int]]) -> None:
    ids = byte_ids(byte_tokenizer, b"".join(raw * times for raw, times in runs))
    assert "".join(token_pieces(byte_tokenizer, ids)) == decode(byte_tokenizer, ids)


@pytest.mark.parametrize("raw", [b"\x80" + "中".encode() * 40, b"\x80" * 200, b"\x80" * 40 + "中".encode() * 40])
def test_a_tokenizer_that_judges_a_run_of_bytes_as_a_whole(raw: bytes) -> None:
    tokens = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    tokens.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens)
    assert "".join(token_pieces(tokenizer, list(raw))) == decode(tokenizer, list(raw)) == HALF_CHARACTER * len(raw)


def test_special_tokens_are_no_text(byte_tokenizer: Any) -> None:
    ids = [*byte_tokenizer("done").input_ids, byte_tokenizer.eos_token_id]
    pieces = token_pieces(byte_tokenizer, ids)
    assert len(pieces) == 5 and "".join(pieces) == "done" and pieces[-1] == ""
    assert token_pieces(byte_tokenizer, []) == []

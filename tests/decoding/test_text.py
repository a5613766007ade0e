"""Text piece by piece: any split of the ids gives the same text, and no piece holds half a character."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


def test_special_tokens_are_no_text(byte_tokenizer: Any) -> None:
    ids = [*byte_tokenizer("done").input_ids, byte_tokenizer.eos_token_id]
    pieces = token_pieces(byte_tokenizer, ids)
    assert len(pieces) == 5 and "".join(pieces) == "done" and pieces[-1] == ""
    assert token_pieces(byte_tokenizer, []) == []

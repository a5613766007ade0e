"""Long prompts: exactly as long as asked, each fact there once, answers only to be had by reading."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dspark.bench.longcontext import (
    LONGEST,
    PARTITIONS,
    LongPrompt,
    partition_of,
    prompt_room,
    read_longcontext,
    retrieved,
    save_longcontext,
    span,
    write_longcontext,
)
from dspark.bench.prompts import load_suites
from dspark.data.chat import ChatRenderer
from dspark.data.prompts import read_prompts
from dspark.errors import DsparkError


@pytest.fixture(scope="session")
def renderer(embedded_path: Path) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(embedded_path))


@pytest.fixture(scope="session")
def written(renderer: ChatRenderer) -> list[LongPrompt]:
    """Twelve questions a partition at 3,000 tokens; shared, so none may change it."""
    return write_longcontext(renderer, 3000, 12, seed=1)


def length(renderer: ChatRenderer, one: LongPrompt) -> int:
    return len(renderer.prompt_ids([{"role": "user", "content": one.prompt.turns[0]}]))


def text_and_question(one: LongPrompt) -> tuple[str, str]:
    text, found, question = one.prompt.turns[0].rpartition("\n\nQuestion: ")
    assert found
    return text, question


@pytest.mark.parametrize("tokens", [301, 512, 1023, 4096, 8000])
def test_a_prompt_is_exactly_as_long_as_asked(renderer: ChatRenderer, tokens: int) -> None:
    for one in write_longcontext(renderer, tokens, 2, seed=tokens):
        assert one.tokens == tokens == length(renderer, one)


def test_so_it_is_at_sixty_thousand_tokens(renderer: ChatRenderer) -> None:
    (one,) = write_longcontext(renderer, 60_000, 1, seed=0, partitions=["mk"])
    assert one.tokens == 60_000 == length(renderer, one)
    assert len(re.findall(r"locker kept for \w+ opens", one.prompt.turns[0])) == 64


def test_every_length_can_be_had(renderer: ChatRenderer) -> None:
    for tokens in range(600, 630):
        assert span(write_longcontext(renderer, tokens, 1, seed=0)) == (tokens, tokens)


def test_it_needs_no_tokenizer_of_words(tiny_llama_folder: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    characters = ChatRenderer(AutoTokenizer.from_pretrained(tiny_llama_folder))
    for renderer in (characters, ChatRenderer(byte_tokenizer, template="none")):
        for tokens in (1999, 2000, 2001):
            for one in write_longcontext(renderer, tokens, 1, seed=0):
                assert one.tokens == tokens == length(renderer, one)


def test_where_no_such_length_exists_it_is_the_closest_below_and_told() -> None:
    def two_ids_a_character(texts: Any, **_: Any) -> Any:
        ids = [[0] * (2 * len(text)) for text in ([texts] if isinstance(texts, str) else texts)]
        return SimpleNamespace(input_ids=ids[0] if isinstance(texts, str) else ids)

    tokenizer: Any = two_ids_a_character
    tokenizer.eos_token = ""
    renderer = ChatRenderer(tokenizer, template="none")
    (one,) = write_longcontext(renderer, 3001, 1, seed=0, partitions=["qa"])
    assert one.tokens == 3000 == length(renderer, one)


def test_a_tokenizer_that_joins_sentences_is_put_right_by_counting() -> None:
    def fewer_after_the_first_thousand(texts: Any, **_: Any) -> Any:
        ids = [
            [0] * (min(len(text), 1000) + 4 * max(len(text) - 1000, 0) // 5)
            for text in ([texts] if isinstance(texts, str) else texts)
        ]
        return SimpleNamespace(input_ids=ids[0] if isinstance(texts, str) else ids)

    tokenizer: Any = fewer_after_the_first_thousand
    tokenizer.eos_token = ""
    (one,) = write_longcontext(ChatRenderer(tokenizer, template="none"), 4000, 1, seed=0, partitions=["mk"])
    assert one.tokens == 4000


def test_ids_take_the_partitions_in_turn_so_that_a_first_part_has_them_all(written: list[LongPrompt]) -> None:
    assert [one.prompt.id for one in written[:4]] == [
        *("ruler-v2/mk/0000", "ruler-v2/mv/0000", "ruler-v2/qa/0000", "ruler-v2/mk/0001")
    ]
    assert [partition_of(one.prompt.id) for one in written] == [one.partition for one in written]


def test_the_seed_decides_everything(renderer: ChatRenderer, written: list[LongPrompt]) -> None:
    assert write_longcontext(renderer, 3000, 12, seed=1) == written
    other = write_longcontext(renderer, 3000, 12, seed=2)
    assert not {one.prompt.turns for one in other} & {one.prompt.turns for one in written}
    assert write_longcontext(renderer, 3000, 2, seed=1, partitions=["qa"]) == [written[2], written[5]]


def test_questions_differ_and_answers_stand_once_in_the_text_only(written: list[LongPrompt]) -> None:
    assert len({text_and_question(one)[1] for one in written}) == len(written)
    assert len({one.answers for one in written}) == len(written)
    for one in written:
        text, question = text_and_question(one)
        assert len(set(one.answers)) == len(one.answers) == (4 if one.partition == "mv" else 1)
        for answer in one.answers:
            assert text.count(answer) == 1 and answer not in question
            assert retrieved(one.answers, question) == 0.0


def test_each_fact_is_there_once_among_others_like_it(written: list[LongPrompt]) -> None:
    for one in written:
        text, question = text_and_question(one)
        if one.partition == "mk":
            facts = re.findall(r"The locker kept for (\w+) opens with (\d{7})\.", text)
            assert len(facts) == 11 == len({name for name, _ in facts}) == len({number for _, number in facts})
            assert (asked := re.search(r"locker kept for (\w+)\?", question))
            assert dict(facts)[asked[1]] == one.answers[0]
        elif one.partition == "mv":
            facts = re.findall(r"One entry of the ledger for (\w+) is (\d{7})\.", text)
            assert (asked := re.search(r"ledger have for (\w+)\?", question))
            assert tuple(number for name, number in facts if name == asked[1]) == one.answers
            assert len(facts) == 8 and {[name for name, _ in facts].count(name) for name, _ in facts} == {4}
        else:
            founders = dict(re.findall(r"The (\w+ \w+) was founded by (\w+)\.", text))
            towns = dict(re.findall(r"(\w+) was born in the town of (\w+)\.", text))
            assert (asked := re.search(r"founder of the (\w+ \w+) born\?", question))
            assert towns[founders[asked[1]]] == one.answers[0] and len(founders) == len(towns) == 2
            assert founders[asked[1]] not in question
            assert re.findall(r"Document (\d+):", text) == [str(i + 1) for i in range(4)]


def test_answers_lie_at_every_depth(renderer: ChatRenderer) -> None:
    depths = []
    for one in write_longcontext(renderer, 6000, 16, seed=3, partitions=["mk"]):
        text, _ = text_and_question(one)
        depths.append(text.index(one.answers[0]) / len(text))
    depths.sort()
    assert depths[0] < 0.1 and depths[-1] > 0.9
    assert max(b - a for a, b in pairwise(depths)) < 0.15


def test_the_values_of_a_name_lie_in_every_quarter(written: list[LongPrompt]) -> None:
    for one in written:
        if one.partition == "mv":
            text, _ = text_and_question(one)
            assert [int(4 * text.index(answer) / len(text)) for answer in one.answers] == [0, 1, 2, 3]


def test_the_text_between_is_varied_and_holds_no_number(renderer: ChatRenderer) -> None:
    (one,) = write_longcontext(renderer, 8000, 1, seed=0, partitions=["mk"])
    text, _ = text_and_question(one)
    sentences = re.split(r"(?<=\.)\s+", text)
    assert len(sentences) > 300 and len(set(sentences)) > 0.98 * len(sentences)
    assert all(re.search(r"opens with \d{7}\.", sentence) for sentence in sentences if re.search(r"\d", sentence))


def test_the_template_and_its_thinking_prefix_count_too(renderer: ChatRenderer) -> None:
    bare = ChatRenderer(renderer.tokenizer, template="none")
    chat, plain = (write_longcontext(one, 700, 1, seed=0, partitions=["mk"])[0] for one in (renderer, bare))
    assert chat.tokens == plain.tokens == 700 and len(plain.prompt.turns[0]) > len(chat.prompt.turns[0])


def test_progress_is_told_from_none_to_all(renderer: ChatRenderer) -> None:
    seen: list[tuple[int, int]] = []
    write_longcontext(renderer, 500, 2, 0, ["qa", "mk"], lambda done, total: seen.append((done, total)))
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tokens": 100}, r"tokens = 100: must be at least \d{3}"),
        ({"tokens": 0}, "tokens = 0"),
        ({"per_partition": 0}, "per_partition = 0"),
        ({"partitions": ["mk", "niah"]}, r"partitions = .*mk, mv, qa"),
        ({"partitions": ["mk", "mk"]}, "partitions"),
        ({"partitions": []}, "partitions"),
    ],
)
def test_what_cannot_be_written_is_refused(renderer: ChatRenderer, options: dict[str, Any], named: str) -> None:
    with pytest.raises(DsparkError, match=named):
        write_longcontext(renderer, **{"tokens": 600, "per_partition": 1, "seed": 0, **options})


def test_a_file_of_them_is_a_suite_with_its_answers_beside_it(tmp_path: Path, written: list[LongPrompt]) -> None:
    path = tmp_path / "deep" / "ruler-v2.jsonl"
    save_longcontext(path, written)
    assert sorted(file.name for file in path.parent.iterdir()) == ["ruler-v2.answers.json", "ruler-v2.jsonl"]
    assert read_prompts(path) == [one.prompt for one in written]
    assert read_longcontext(path) == written
    (suite,), missing = load_suites(["ruler-v2"], path.parent, limit=3, shuffle=None)
    assert suite.source == "folder: ruler-v2.jsonl (3 of 36 prompts)" and not missing
    assert {partition_of(one.id) for one in suite.prompts} == set(PARTITIONS)
    with pytest.raises(DsparkError, match="prompts"):
        save_longcontext(path, [])
    assert read_longcontext(path) == written


def test_answers_of_other_prompts_are_not_taken_for_these(
    tmp_path: Path, renderer: ChatRenderer, written: list[LongPrompt]
) -> None:
    path, beside = tmp_path / "long.jsonl", tmp_path / "long.answers.json"
    save_longcontext(path, written)
    older = path.read_bytes()
    save_longcontext(path, write_longcontext(renderer, 500, 12, seed=9))
    path.write_bytes(older)
    with pytest.raises(DsparkError, match=r"long\.answers\.json.*another prompt"):
        read_longcontext(path)
    for damage in ("{", "[]", json.dumps({written[0].prompt.id: {}})):
        beside.write_text(damage)
        with pytest.raises(DsparkError, match=r"long\.answers\.json"):
            read_longcontext(path)
    beside.unlink()
    with pytest.raises(DsparkError, match=r"long\.answers\.json.*no such file"):
        read_longcontext(path)


def test_only_its_own_ids_have_a_partition() -> None:
    assert partition_of("ruler-v2/qa/0049") == "qa"
    for other in ("gsm8k/1", "ruler-v2/niah/0001", "ruler-v2/mk/", "my/ruler-v2/mk/0001"):
        assert partition_of(other) is None


def test_room_is_left_for_the_answer() -> None:
    assert prompt_room(8192, 192) == 8000
    assert prompt_room(4 * LONGEST, 512) == LONGEST == 1_048_576
    for answer in (0, 8192):
        with pytest.raises(DsparkError, match="answer tokens"):
            prompt_room(8192, answer)


def test_span_is_of_real_lengths(written: list[LongPrompt]) -> None:
    assert span(written) == (3000, 3000)
    with pytest.raises(DsparkError):
        span([])


def test_retrieved_counts_the_answers_in_a_text() -> None:
    assert retrieved(["1234567"], "It opens with 1,234,567.") == 1.0
    assert retrieved(["1234567", "7654321"], "1234567 and 17654321") == 0.5
    assert retrieved(["Kazorin"], "born in KAZORIN") == 1.0
    with pytest.raises(DsparkError):
        retrieved([], "x")

from __future__ import annotations

from dspark.data.rows import Row
from dspark.data.summary import RowSummary, Summaries, combine, prompt_set


def _row(name: str, answer: list[int], finish: str = "stop", temperature: float = 0.0) -> Row:
    return Row(id=name, source=name, prompt_ids=[1, 2, 3], answer_ids=answer, finish=finish, temperature=temperature)


def test_a_set_is_what_comes_before_the_first_slash():
    assert prompt_set("gsm8k/17") == "gsm8k" and prompt_set("instructions/some/0") == "instructions"
    assert prompt_set("q17") == prompt_set("/17") == "other"


def test_counts_of_a_cell_and_their_sums():
    loop = _row("b/0", [5] * 4 + [2])
    rows = [_row("a/0", [7, 8]), _row("a/1", [6, 7, 8, 9], "length", 0.7), loop]
    summaries = Summaries(rows)
    summaries.cell("b/1", 0.7).too_long += 1
    total = summaries.total
    assert (total.rows, total.prompt_tokens, total.supervised_tokens, total.loops) == (3, 9, 11, 1)
    assert (total.stop, total.length_cut, total.too_long) == (2, 1, 1)
    assert summaries.by_set()["a"] == RowSummary(2, 6, 6, 1, 1)
    assert summaries.by_set()["b"] == RowSummary(1, 3, 5, 1, 0, 1, too_long=1)
    assert summaries.by_temperature() == {0.0: RowSummary(2, 6, 7, 2, 0, 1), 0.7: RowSummary(1, 3, 4, 0, 1, too_long=1)}
    assert combine([]) == RowSummary() == Summaries().total

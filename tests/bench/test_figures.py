"""A report's figures against values worked out by hand."""

from __future__ import annotations

import pytest

from dspark.bench.figures import acceptance, changes, macro_length, overall, speed
from dspark.bench.report import Column, Drafter, Overall, Ratio, Speed, SuiteReport
from dspark.bench.samples import Sample
from dspark.decoding.request import Round


def rounds(*accepted: int, width: int = 3) -> list[Round]:
    return [Round(width, width, k) for k in accepted]


def answer(question: str, *accepted: int, turn: int = 0, looping: bool = False, prompt: int = 10) -> Sample:
    tokens = 1 + sum(accepted) + len(accepted)
    return Sample(
        "maths", question, "mine n = 3", "replay", turn,
        prompt_tokens=prompt, output_tokens=tokens, looping=looping, rounds=rounds(*accepted),
    )  # fmt: skip


def test_lengths_each_under_its_own_name() -> None:
    found = acceptance([answer("a", 3, 2, 1, 0), answer("b", 3)], 3, "replay")
    assert found.macro_length == pytest.approx((2.5 + 4) / 2)
    assert found.micro_length == pytest.approx(1 + 9 / 5)
    assert found.completion_per_round == pytest.approx((11 + 5) / 5)  # each answer's first token is in no round
    assert found.histogram == [1, 1, 1, 2]
    assert [(one.accepted, one.verified) for one in found.conditional] == [(4, 5), (3, 4), (2, 3)]
    assert (found.questions, found.requests, found.rounds) == (2, 2, 5)


def test_turns_count_within_their_question_first() -> None:
    found = acceptance([answer("a", 3), answer("a", 1, turn=1), answer("b", 0)], 3, "replay")
    assert found.macro_length == pytest.approx((3 + 1) / 2)
    assert (found.questions, found.requests) == (2, 3)


def test_with_and_without_loops() -> None:
    found = acceptance([answer("a", 3, 3, looping=True), answer("b", 1)], 3, "replay")
    assert (found.looping, found.macro_length, found.macro_length_without_loops) == (1, 3.0, 2.0)
    assert found.micro_length == pytest.approx(1 + 7 / 3) and found.micro_length_without_loops == 2.0
    assert found.completion_per_round == 4.0 and found.completion_per_round_without_loops == 3.0


def test_a_histogram_alone_gives_the_same_lengths() -> None:
    told = Sample("maths", "a", "endpoint", "served", output_tokens=11, histogram=[1, 1, 1, 1])
    found = acceptance([told], 3, "served")
    assert (found.macro_length, found.micro_length, found.rounds) == (2.5, 2.5, 4)
    assert found.by_context_depth == []  # the order of its rounds is not known


def test_output_lengths_and_depths_go_to_their_buckets() -> None:
    def sized(question: str, tokens: int, prompt: int, *accepted: int) -> Sample:
        one = answer(question, *accepted, prompt=prompt)
        one.output_tokens = tokens
        return one

    found = acceptance([sized("a", 1023, 511, 1, 0), sized("b", 1024, 40000, 2), sized("c", 99999, 10, 0)], 3, "replay")
    table = {one.label: one for one in found.by_output_length}
    assert list(table) == ["0-1K", "1-2K", "2-4K", "4-8K", "8-16K", "16-32K", "32K+"]
    assert [one.questions for one in table.values()] == [1, 1, 0, 0, 0, 0, 1]
    assert (table["1-2K"].macro_length, table["1-2K"].shortest, table["1-2K"].longest) == (3.0, 1024, 1024)
    assert table["2-4K"].macro_length is None and table["2-4K"].longest is None
    depths = {one.label: (one.rounds, one.micro_length) for one in found.by_context_depth}
    # the first round of "a" has 511 tokens before its anchor, the second 511 + 2
    assert depths == {"0-512": (2, 1.5), "512-1K": (1, 1.0), "32-64K": (1, 3.0)}


def test_partitions() -> None:
    found = acceptance([answer("a", 3), answer("b", 1)], 3, "replay", {"a": "mk", "b": "qa"})
    assert found.partitions == {"mk": 4.0, "qa": 2.0}


def test_a_failed_request_and_nothing_at_all() -> None:
    failed = Sample("maths", "a", "mine n = 3", "served", error="reset")
    found = acceptance([failed], 3, "served")
    assert (found.requests, found.macro_length, found.micro_length, found.completion_per_round) == (0, None, None, None)
    assert macro_length([]) is None and speed([failed], None) is None


def timed(question: str, group: int, seconds: float, tokens: int, drafter: str = "plain", batch: int = 1) -> Sample:
    return Sample(
        "maths", question, drafter, "served", batch=batch, group=group, output_tokens=tokens, seconds=seconds,
        group_seconds=seconds, arrivals=[(0.5, 1), (seconds, tokens - 1)], rounds=rounds(1),
        draft_seconds=0.1, verify_seconds=0.3, engine_seconds=0.45,
    )  # fmt: skip


def test_speed_is_a_ratio_of_sums_over_the_same_groups() -> None:
    plain = [timed("a", 0, 1.5, 11), timed("b", 1, 2.5, 31)]
    mine = [timed("a", 0, 1.0, 11, "mine"), timed("b", 1, 1.5, 31, "mine")]
    found = speed(mine, plain)
    assert found is not None and found.speedup is not None and found.decode_speedup is not None
    assert found.tokens_per_s == pytest.approx(42 / 2.5)
    assert found.speedup.value == pytest.approx(4.0 / 2.5)
    assert found.decode_tokens_per_s == pytest.approx(40 / 1.5) and found.decode_speedup.value == pytest.approx(3 / 1.5)
    assert found.first_token is not None and found.first_token.mean == 0.5
    assert found.time_per_token is not None and found.time_per_token.mean == pytest.approx((0.5 / 10 + 1.0 / 30) / 2)
    assert found.inter_token is not None and found.inter_token.mean == pytest.approx((0.5 + 1.0) / 2)
    assert found.latency is not None and found.latency.p50 == pytest.approx(1.25)
    assert (found.draft_seconds, found.verify_seconds) == (pytest.approx(0.1), pytest.approx(0.3))
    assert found.engine_share == pytest.approx(1 - 0.8 / 1.5) and found.bench_share == pytest.approx(1 - 0.9 / 1.5)
    alone = speed(plain, None)
    assert alone is not None and alone.speedup is None


def test_pairs_are_resampled_together() -> None:
    """Groups of any size that are all twice as fast leave nothing to chance, so long as each meets its own partner."""
    plain = [timed(str(i), i, 1.0 + i * i, 10 + 7 * i) for i in range(6)]
    mine = [timed(str(i), i, (1.0 + i * i) / 2, 10 + 7 * i, "mine") for i in range(6)]
    found = speed(mine[::-1], plain)
    assert found is not None and found.speedup is not None and found.speedup.low is not None
    assert (found.speedup.low, found.speedup.value, found.speedup.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_failure_takes_its_whole_group_out() -> None:
    plain = [timed("a", 0, 4.0, 10, batch=2), timed("b", 0, 4.0, 30, batch=2)]
    mine = [timed("a", 0, 1.0, 10, "mine", 2), timed("b", 0, 1.0, 30, "mine", 2)]
    mine[1].error, mine[1].seconds = "reset", None
    found = speed(mine, plain)
    assert found is not None and found.speedup is None and found.tokens_per_s is None and found.failed == 1


def test_an_answer_that_came_in_one_piece_has_no_gaps() -> None:
    one = timed("a", 0, 1.5, 11)
    one.streamed = False
    found = speed([one], None)
    assert found is not None and found.inter_token is None and found.time_per_token is not None


def test_loops_that_cannot_be_known_leave_no_figure_without_them() -> None:
    one = answer("a", 3)
    one.looping = None
    found = acceptance([one, answer("b", 1)], 3, "server")
    assert found.macro_length == 3.0 and found.looping == 0
    assert found.macro_length_without_loops is None and found.micro_length_without_loops is None


def test_the_bonus_counts_in_depth() -> None:
    found = acceptance([answer("a", 1, 0, prompt=510)], 3, "replay")
    assert [(one.label, one.rounds) for one in found.by_context_depth] == [("0-512", 1), ("512-1K", 1)]


def test_a_question_of_two_turns_is_in_the_bucket_of_its_mean_length() -> None:
    turns = [answer("a", 3), answer("a", 1, turn=1)]
    turns[0].output_tokens, turns[1].output_tokens = 1000, 1100
    found = acceptance(turns, 3, "replay")
    assert [one.questions for one in found.by_output_length][:2] == [0, 1]


def test_a_group_with_a_failure_is_in_no_ratio() -> None:
    plain = [timed("a", 0, 2.0, 10), timed("b", 1, 4.0, 10)]
    mine = [timed("a", 0, 1.0, 10, "mine"), timed("b", 1, 1.0, 10, "mine")]
    mine[1].error, mine[1].seconds = "reset", None
    found = speed(mine, plain)
    assert found is not None and found.speedup is not None
    assert (found.failed, found.requests, found.speedup.value, found.speedup.low) == (1, 1, 2.0, None)


def test_requests_at_once_share_a_clock() -> None:
    plain = [timed("a", 0, 4.0, 10, batch=2), timed("b", 0, 4.0, 30, batch=2)]
    found = speed(plain, None)
    assert found is not None and found.tokens_per_s == 10.0 and found.decode_tokens_per_s is None


def suite(name: str, speedup: float | None, apart: bool = False) -> SuiteReport:
    ratio = None if speedup is None else Ratio(value=speedup)
    one = Speed(batch=1, questions=1, requests=1, tokens=1, tokens_per_s=1.0, decode_tokens_per_s=None, speedup=ratio)
    columns = {"plain": Column(), "mine n = 3": Column(speed=[one]), "mine n = 7": Column(speed=[one])}
    return SuiteReport(
        name=name, source="here", prompts_sha256="", questions=1, speed_questions=1, apart=apart, columns=columns
    )


def test_means_over_suites_are_unweighted_and_leave_out_what_is_apart() -> None:
    drafters = [Drafter(name="plain", kind="plain", n=0)]
    drafters += [Drafter(name=f"mine n = {n}", kind="dspark", n=n) for n in (3, 7)]
    suites = [suite("a", 1.0), suite("b", 2.0), suite("c", 9.0, apart=True)]
    table = overall(suites, drafters, "plain")
    assert [(one.suites, one.mean_speedup) for one in table] == [(2, None), (2, 1.5), (2, 1.5)]
    (change,) = changes(drafters, table)
    assert (change.draft, change.low_n, change.high_n, change.change) == ("mine", 3, 7, 0.0)
    assert overall([*suites, suite("d", None)], drafters, "plain")[1].mean_speedup is None


def test_means_are_at_the_smallest_batch() -> None:
    one = suite("a", 1.5)
    for name in ("mine n = 3", "mine n = 7"):
        one.columns[name].speed.append(
            one.columns[name].speed[0].model_copy(update={"batch": 4, "speedup": Ratio(value=9)})
        )
    table = overall([one], [Drafter(name="mine n = 3", kind="dspark", n=3)], "plain")
    assert (table[0].mean_speedup, table[0].batch) == (1.5, 1)


def test_every_draft_is_in_the_table_of_widths() -> None:
    drafters = [Drafter(name=f"mine n = {n}", kind="dspark", n=n) for n in (3, 7)]
    drafters += [Drafter(name="flash n = 7", kind="dflash", n=7)]
    drafters += [Drafter(name="flash in Transformers n = 7", kind="transformers-dflash", n=7)]
    table = [Overall(drafter=one.name, suites=1, mean_speedup=float(one.n or 0)) for one in drafters]
    found = changes(drafters, table)
    assert [(one.draft, one.low, one.high) for one in found] == [("mine", 3.0, 7.0), ("flash", None, 7.0)]
    assert changes(drafters[1:3], table) == []

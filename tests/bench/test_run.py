"""A bench on a tiny pair: replay equals served, figures follow from samples, it resumes, it flags what it knew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.bench import run
from dspark.bench.assemble import flagged
from dspark.bench.contenders import BenchSettings, Captured, EngineContender, fill
from dspark.bench.in_process import NamedDraft, bench_in_process, engine_contenders, parse_draft, parse_numbers
from dspark.bench.prompts import Missing, Suite
from dspark.bench.report import Report, read_report, write_report
from dspark.bench.samples import Sample
from dspark.checkpoints.native import PROMPTS_FILE, load_draft, save_draft
from dspark.data.chat import ChatRenderer
from dspark.data.prompts import Prompt, prompt_hash, write_prompt_hashes
from dspark.decoding.engine import Engine
from dspark.decoding.request import Request, Result, SamplingSettings
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget


@pytest.fixture(scope="module")
def folder(draft: DSparkDraft, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft on disk; it was trained on "maths 1 please", case and white space apart."""
    folder = tmp_path_factory.mktemp("pair") / "draft"
    save_draft(draft, folder)
    write_prompt_hashes(folder / PROMPTS_FILE, [prompt_hash("Maths 1  please"), prompt_hash("other")])
    return folder


def suites() -> list[Suite]:
    return [
        Suite(name, [Prompt(f"{name}/{i}", (f"{name} {i} please", *more)) for i in range(4)], "here")
        for name, more in (("maths", ()), ("talk", ("and then?",)))
    ]


def bench(
    target: TransformersTarget, folder: Path, out: Path, settings: BenchSettings | None = None, **more: Any
) -> Report:
    return bench_in_process(
        target,
        ChatRenderer(target.tokenizer),
        engine_contenders(target, [NamedDraft("mine", str(folder), (3, 7))]),
        more.pop("suites", suites()),
        [Missing("aime26", "no network")],
        settings or BenchSettings(max_tokens=16, speed_limit=2),
        out,
        chosen={"limit": 4},
        progress=more.pop("progress", lambda suite, count: None),
    )


@pytest.fixture(scope="module")
def report(target: TransformersTarget, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return bench(target, folder, tmp_path_factory.mktemp("run"))


def test_every_suite_has_every_drafter(report: Report) -> None:
    assert [one.name for one in report.suites] == ["maths", "maths (trained on)", "talk"]
    assert [one.name for one in report.drafters] == ["plain", "mine n = 3", "mine n = 7"]
    assert [one.reason for one in report.missing] == ["no network"]
    for suite in report.suites:
        assert set(suite.columns) == {"plain", "mine n = 3", "mine n = 7"}
        assert suite.not_lossless == [] and suite.replay_faults == []
        for n in (3, 7):
            column = suite.columns[f"mine n = {n}"]
            assert column.acceptance is not None and column.acceptance.source == "replay"
            assert column.acceptance.questions == suite.questions and len(column.acceptance.conditional) == n
            assert 1.0 <= (column.acceptance.macro_length or 0) <= n + 1
        assert suite.columns["plain"].acceptance is None
    mean = next(one for one in report.overall if one.drafter == "mine n = 7")
    assert mean.mean_macro_length is not None and mean.mean_macro_length > 1.0


def test_prompts_trained_on_are_apart_and_in_no_mean(report: Report) -> None:
    maths, apart, _ = report.suites
    assert (maths.questions, maths.flagged, apart.questions, apart.flagged) == (3, [], 1, ["maths/1"])
    assert (maths.speed_questions, apart.speed_questions) == (1, 1)
    lengths = [s.columns["mine n = 7"].acceptance.macro_length for s in report.suites if not s.apart]  # type: ignore[union-attr]
    mean = next(one for one in report.overall if one.drafter == "mine n = 7")
    assert mean.suites == 2 and mean.mean_macro_length == pytest.approx(sum(lengths) / 2)  # type: ignore[arg-type]


def test_replay_is_checked_against_served_rounds(report: Report) -> None:
    # two timed prompts a suite, two widths; those of two turns count twice
    assert [one.replay_checked for one in report.suites] == [2, 2, 8]


def test_speed_is_told_with_its_parts(report: Report) -> None:
    column = report.suites[2].columns["mine n = 3"]
    (found,) = column.speed
    assert (found.batch, found.questions, found.requests, found.failed) == (1, 2, 4, 0)
    assert found.speedup is not None and found.speedup.low is not None and found.decode_speedup is not None
    assert found.draft_seconds and found.verify_seconds
    assert found.engine_share is not None and found.bench_share is not None
    assert 0 <= found.bench_share <= found.engine_share < 1
    assert report.suites[2].columns["plain"].speed[0].draft_seconds == pytest.approx(0, abs=1e-3)


def test_the_second_turn_follows_the_targets_own_answer(
    target: TransformersTarget, folder: Path, tmp_path: Path
) -> None:
    bench(target, folder, tmp_path, suites=suites()[1:])
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()[1:]]
    samples = [one for line in lines for one in line["samples"] if one["question"] == "talk/0"]
    plain = {one["turn"]: one for one in samples if one["drafter"] == "plain" and one["seconds"] is None}
    messages = [
        {"role": "user", "content": "talk 0 please"},
        {"role": "assistant", "content": plain[0]["text"]},
        {"role": "user", "content": "and then?"},
    ]
    ids = ChatRenderer(target.tokenizer).prompt_ids(messages)
    (own,) = Engine(target).run([Request(ids, 16)])
    assert own[1].output_ids == plain[1]["output_ids"] and plain[1]["prompt_tokens"] == len(ids)


def test_the_report_comes_back_as_written(report: Report, tmp_path: Path) -> None:
    write_report(report, tmp_path / "report.json")
    assert read_report(tmp_path) == report
    values = json.loads((tmp_path / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps({**values, "version": 2}))
    with pytest.raises(DsparkError, match="version = 2: this dspark reads version 1"):
        read_report(tmp_path)


def test_it_goes_on_where_it_stopped(
    target: TransformersTarget, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(suite: str, count: int) -> None:
        if suite == "talk":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(target, folder, tmp_path, progress=stop)
    units = len((tmp_path / "samples.jsonl").read_text().splitlines())
    asked: list[str] = []
    real = run.Bench._answer
    monkeypatch.setattr(
        run.Bench, "_answer", lambda self, suite, batch: asked.append(suite) or real(self, suite, batch)
    )
    whole = bench(target, folder, tmp_path)
    assert 1 < units < len((tmp_path / "samples.jsonl").read_text().splitlines())
    assert asked == []  # all answers of both suites were there, only talk's speed was not
    assert [one.speed_questions for one in whole.suites] == [1, 1, 2]
    with pytest.raises(DsparkError, match=r"max_tokens = 17: .* holds results of 16"):
        bench(target, folder, tmp_path, BenchSettings(max_tokens=17, speed_limit=2))


def test_sampled_answers_with_a_seed_are_replayed_and_equal(
    target: TransformersTarget, folder: Path, tmp_path: Path
) -> None:
    sampling = SamplingSettings(temperature=1.0, top_p=0.95, seed=5)
    found = bench(target, folder, tmp_path, BenchSettings(16, 2, sampling=sampling), suites=suites()[:1])
    assert [one.replay_checked for one in found.suites] == [2, 2]
    assert all(one.not_lossless == [] and one.replay_faults == [] for one in found.suites)
    assert found.settings["sampling"] == "temperature 1, top_k 0, top_p 0.95, min_p 0, seed 5"
    with pytest.raises(DsparkError, match="seed = None"):
        BenchSettings(sampling=SamplingSettings(temperature=1.0))


def test_batches(target: TransformersTarget, folder: Path, tmp_path: Path) -> None:
    settings = BenchSettings(max_tokens=12, speed_limit=4, batches=(1, 2))
    found = bench(target, folder, tmp_path, settings, suites=suites()[:1])
    assert [one.name for one in found.suites] == ["maths", "maths (trained on)"]
    speeds = found.suites[1].columns["mine n = 7"].speed
    assert [(one.batch, one.requests) for one in speeds] == [(1, 1), (2, 2)]  # with its neighbour in the group
    assert [one.requests for one in found.suites[0].columns["mine n = 7"].speed] == [3, 2]
    assert all(one.not_lossless == [] for one in found.suites)


def test_a_draft_that_guesses_wrong_rounds_is_found(
    target: TransformersTarget, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that counts one token too many is a fault of the report, not a better draft."""
    real = EngineContender.replay

    def flattering(self: Any, rows: Any, sampling: Any) -> Any:
        walked = real(self, rows, sampling)
        return walked and [
            [type(r)(r.proposed, r.scheduled, min(r.accepted + 1, r.scheduled)) for r in w] for w in walked
        ]

    monkeypatch.setattr(EngineContender, "replay", flattering)
    found = bench(target, folder, tmp_path, suites=suites()[:1])
    faults = [line for one in found.suites for line in one.replay_faults]
    assert faults and all(line.startswith("REPLAY DIFFERS: maths/") for line in faults)


def test_a_target_that_is_not_plain_is_found(
    target: TransformersTarget, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EngineContender.timed

    def wrong(self: Any, asked: Any, batch: int, settings: Any) -> Any:
        samples = real(self, asked, batch, settings)
        if self.drafter.n == 7:
            samples[0].output_ids[3] ^= 1
        return samples

    monkeypatch.setattr(EngineContender, "timed", wrong)
    found = bench(target, folder, tmp_path, suites=suites()[:1])
    assert any("NOT LOSSLESS" in line and "mine n = 7" in line for one in found.suites for line in one.not_lossless)


def test_prompts_too_long_are_told(target: TransformersTarget, folder: Path, tmp_path: Path) -> None:
    long = Suite("maths", [Prompt("maths/0", ("x" * 250,)), Prompt("maths/1", ("hello",))], "here")
    found = bench(target, folder, tmp_path, suites=[long])
    assert found.notes == [
        "maths: 1 of 2 prompts leave no room for an answer of 16 tokens in the target's context of 256, "
        "left out: maths/0"
    ]
    with pytest.raises(DsparkError, match="no prompt fits the target's context"):
        bench(target, folder, tmp_path / "none", suites=[Suite("maths", long.prompts[:1], "here")])


def test_warm_ups_come_first_and_the_order_rotates(
    target: TransformersTarget, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str, int]] = []
    real = EngineContender.timed

    def spied(self: Any, asked: Any, batch: int, settings: Any) -> Any:
        calls.append((self.drafter.name, asked[0].question, settings.max_tokens))
        return real(self, asked, batch, settings)

    monkeypatch.setattr(EngineContender, "timed", spied)
    bench(target, folder, tmp_path, BenchSettings(max_tokens=20, speed_limit=3), suites=suites()[:1])
    names = ["plain", "mine n = 3", "mine n = 7"]
    assert calls[:3] == [(name, "maths/0", run.WARM_UP_TOKENS) for name in names]
    for index in range(3):
        own = calls[3 + 3 * index : 6 + 3 * index]
        assert own == [(name, f"maths/{index}", 20) for name in names[index:] + names[:index]]
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()[1:]
    timed = [one for line in lines for one in json.loads(line)["samples"] if one["seconds"] is not None]
    assert len(timed) == 9 and {one["finish"] for one in timed} <= {"stop", "length"}
    assert all(one["output_tokens"] == 20 or one["finish"] == "stop" for one in timed)


def test_the_clock_of_a_question_covers_all_its_turns(target: TransformersTarget, folder: Path, tmp_path: Path) -> None:
    bench(target, folder, tmp_path, suites=suites()[1:])
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()[1:]]
    for line in lines:
        timed = [one for one in line["samples"] if one["seconds"] is not None and one["drafter"] == "mine n = 3"]
        if timed:
            assert len(timed) == 2 and timed[0]["group_seconds"] == timed[1]["group_seconds"]
            assert timed[0]["group_seconds"] >= timed[0]["seconds"] + timed[1]["seconds"] > 0
            for one in timed:
                assert 0 < one["arrivals"][0][0] < one["seconds"] == one["arrivals"][-1][0]


def test_what_is_resumed_must_be_the_same(target: TransformersTarget, draft: DSparkDraft, tmp_path: Path) -> None:
    folder, one = tmp_path / "draft", suites()[:1]
    save_draft(draft, folder)
    bench(target, folder, tmp_path, suites=one)
    before = (tmp_path / "samples.jsonl").read_bytes()
    other = [Suite("maths", [*one[0].prompts[:3], Prompt("maths/3", ("another",))], "here")]
    with pytest.raises(DsparkError, match="prompts = "):
        bench(target, folder, tmp_path, suites=other)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "target_layer_ids": [1, 2]}))
    with pytest.raises(DsparkError, match="drafters = "):
        bench(target, folder, tmp_path, suites=one)
    changed = load_draft(folder)
    with torch.no_grad():
        changed.norm.weight.mul_(2)
    (folder / "config.json").write_text(json.dumps(config))
    save_draft(changed, folder)
    with pytest.raises(DsparkError, match="drafters = "):
        bench(target, folder, tmp_path, suites=one)
    save_draft(draft, folder)
    weight = target.head_weight
    with torch.no_grad():
        weight.mul_(1.5)
        try:
            with pytest.raises(DsparkError, match="fingerprint = "):
                bench(target, folder, tmp_path, suites=one)
        finally:
            weight.div_(1.5)
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def test_a_lower_speed_limit_lets_timed_prompts_go(target: TransformersTarget, folder: Path, tmp_path: Path) -> None:
    one = [Suite("code", [Prompt(f"code/{i}", (f"code {i}",)) for i in range(4)], "here")]
    assert bench(target, folder, tmp_path, BenchSettings(16, 3), suites=one).suites[0].speed_questions == 3
    again = bench(target, folder, tmp_path, BenchSettings(16, 1), suites=one)
    assert again.suites[0].speed_questions == 1 and again.suites[0].columns["plain"].speed[0].requests == 1
    none = bench(target, folder, tmp_path, BenchSettings(16, 0), suites=one)
    assert none.suites[0].columns["plain"].speed == [] and none.suites[0].columns["mine n = 7"].compared == 0


def test_replay_reads_the_taps_in_the_drafts_order(target: TransformersTarget, draft: DSparkDraft) -> None:
    captured = Captured([1], [2, 3], torch.arange(12.0).view(2, 6), (0, 2, 3))
    assert captured.columns((3, 0)).tolist() == [[4, 5, 0, 1], [10, 11, 6, 7]]


def test_a_prompt_whose_second_turn_was_trained_on_is_apart() -> None:
    (_, talk) = suites()
    assert flagged(talk, {"mine": frozenset([prompt_hash("And  THEN?")]), "other": None}) == [
        "talk/0",
        "talk/1",
        "talk/2",
        "talk/3",
    ]
    assert flagged(talk, {"mine": None}) == []


def test_a_looping_answer_is_one(target: TransformersTarget) -> None:
    sample = Sample("maths", "a", "plain", "served")
    fill(sample, Result(Request([5]), [7, 8] * 9, "length"), target)
    assert sample.looping is True
    fill(sample, Result(Request([5]), [7, 8, 9, 10, 2], "stop"), target)
    assert sample.looping is False and sample.output_tokens == 5


def test_the_system_prompt_counts(target: TransformersTarget, folder: Path, tmp_path: Path) -> None:
    settings = BenchSettings(max_tokens=16, speed_limit=1, system_prompt="y" * 80)
    one = Suite("maths", [Prompt("maths/0", ("x" * 150,)), Prompt("maths/1", ("hello",))], "here")
    found = bench(target, folder, tmp_path, settings, suites=[one])
    assert [part.questions for part in found.suites] == [1] and "1 of 2 prompts" in found.notes[0]
    assert found.rendered is not None and "y" * 80 in found.rendered.text
    assert found.suites[0].source == "here, 1 of them left out"
    assert found.suites[0].shortest_prompt == found.rendered.tokens


def test_a_later_turn_without_room_is_left_out(target: TransformersTarget, folder: Path, tmp_path: Path) -> None:
    one = Suite("talk", [Prompt("talk/0", ("hello", "x" * 220, "more")), Prompt("talk/1", ("hi", "then?"))], "here")
    found = bench(target, folder, tmp_path, suites=[one])
    column = found.suites[0].columns["mine n = 3"]
    assert column.acceptance is not None and column.acceptance.requests == 3 and column.speed[0].requests == 3
    assert found.notes == ["talk: 1 prompts have later turns without room in the context, left out: talk/0"]


def test_a_batch_that_is_not_filled_is_told(target: TransformersTarget, folder: Path, tmp_path: Path) -> None:
    one = Suite("talk", [Prompt(f"talk/{i}", ("hi", f"{i}?", "and?")) for i in range(2)], "here")
    found = bench(target, folder, tmp_path, BenchSettings(8, 2, batches=(2, 4)), suites=[one])
    speeds = found.suites[0].columns["mine n = 3"].speed
    assert [(one.batch, one.requests) for one in speeds] == [(2, 6), (4, 4)]
    assert found.notes == ["talk: 2 timed requests do not fill a batch of 4 and were left out of it"]


def test_an_answer_of_its_own_is_not_cut_by_plains_rounds(
    target: TransformersTarget, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tie in a timed answer leaves its rounds without a place in plain decoding's text."""
    real = EngineContender.timed

    def shorter(self: Any, asked: Any, batch: int, settings: Any) -> Any:
        samples = real(self, asked, batch, settings)
        if self.drafter.n:
            samples[0].output_ids = samples[0].output_ids[:4]
        return samples

    monkeypatch.setattr(EngineContender, "timed", shorter)
    found = bench(target, folder, tmp_path, suites=suites()[:1])
    assert any(one.not_lossless for one in found.suites)
    assert "".join(piece.text for piece in found.answers[0].pieces)


def test_two_drafts_need_two_names(target: TransformersTarget, folder: Path) -> None:
    with pytest.raises(DsparkError, match="must have different names"):
        engine_contenders(target, [NamedDraft("a", str(folder), (3,)), NamedDraft("a", str(folder), (7,))])


@pytest.mark.parametrize("text", ["mine", "=x", "mine=", "plain=x", "mine=x@0", "mine=x@3,3"])
def test_malformed_drafts_are_refused(text: str) -> None:
    with pytest.raises(DsparkError, match="draft = "):
        parse_draft(text, (3,))


def test_drafts_by_name() -> None:
    assert parse_draft("mine=runs/a@b/best@3,7", (5,)) == NamedDraft("mine", "runs/a@b/best", (3, 7))
    assert parse_draft(" mine = embedded @3".replace(" @", "@"), (5,)) == NamedDraft("mine", "embedded", (3,))
    assert parse_draft("mine=embedded", (5,)) == NamedDraft("mine", "embedded", (5,))
    for text in ("a", "", "3,", "3;7", "0", "3,-1"):
        with pytest.raises(DsparkError, match="n = "):
            parse_numbers("n", text)


def test_a_width_the_draft_was_not_trained_for_is_refused(target: TransformersTarget, folder: Path) -> None:
    with pytest.raises(DsparkError, match=r"n = 8: this draft was trained for blocks of 7"):
        engine_contenders(target, [NamedDraft("mine", str(folder), (8,))])
    assert torch.is_grad_enabled()

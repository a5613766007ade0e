from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from dspark.cli_output import regenerated_lines
from dspark.data.chat import ChatRenderer
from dspark.data.notes import Part
from dspark.data.progress import TokenProgress
from dspark.data.prompts import Prompt, prompt_hash
from dspark.data.regenerate import RegenerateSettings, regenerate
from dspark.data.rows import detect_loop, read_rows, row_id
from dspark.data.summary import combine
from dspark.decoding.engine import Engine
from dspark.errors import DsparkError

PROMPTS = [Prompt(f"p/{i}", (f"Question {i}?",)) for i in range(5)] + [
    Prompt("talk/0", ("Hi", "Again", "Bye")),
    Prompt("talk/1", ("Hi", "Other")),
]
SETTINGS = RegenerateSettings(max_tokens=16)


def _run(target, out, prompts=PROMPTS, settings=SETTINGS, batch=3, **more):
    engine = Engine(target, None, max_batch=batch, capture_taps=more.pop("taps", ()))
    return regenerate(engine, target, prompts, out, settings, quiet=True, **more)


def _key(row):
    return row.source, row.turn


def _content(path):
    return sorted(read_rows(path), key=_key)


def _plain_greedy(target, prompt_ids, max_tokens):
    """The target's own argmax, read from the start for every token: no engine, no cache kept."""
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        logits = target.forward([(target.new_state(len(ids)), torch.tensor(ids))], logits="last").logits
        ids.append(int(logits[0].argmax()))
        if ids[-1] in target.stop_ids:
            break
    return ids[len(prompt_ids) :]


def test_rows_hold_the_ids_the_target_emits_turn_by_turn(tiny_target, tmp_path):
    done = _run(tiny_target, tmp_path / "rows.jsonl")
    rows = {_key(row): row for row in read_rows(tmp_path / "rows.jsonl")}
    # "Hi" was asked by two conversations and answered once.
    assert set(rows) == {(f"p/{i}", 0) for i in range(5)} | {("talk/0", t) for t in range(3)} | {("talk/1", 1)}
    assert done.summary.duplicates == 1 and done.new_rows == done.summary.rows == len(rows)
    renderer = ChatRenderer(tiny_target.tokenizer)
    for row in rows.values():
        assert (row.finish == "stop") == (row.answer_ids[-1] in tiny_target.stop_ids)
        assert row.finish == "stop" or len(row.answer_ids) == 16
    said = tiny_target.tokenizer.decode(rows["talk/0", 0].text_ids)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]
    for source, second in (("talk/0", "Again"), ("talk/1", "Other")):
        assert rows[source, 1].prompt_ids == renderer.prompt_ids([*talk, {"role": "user", "content": second}])
    for key in (("p/0", 0), ("talk/0", 2)):
        assert rows[key].answer_ids == _plain_greedy(tiny_target, rows[key].prompt_ids, 16)
    finishes = {row.finish for row in rows.values()}
    assert finishes == {"stop", "length"}, "the fixture should show both ways to end"


def test_resume_after_an_interrupt_gives_the_same_file(tiny_target, tmp_path, monkeypatch):
    _run(tiny_target, tmp_path / "whole.jsonl")
    out = tmp_path / "cut.jsonl"
    engine = Engine(tiny_target, None, max_batch=2)
    original, served = engine.run, []

    def interrupted(requests, capture=None):
        for index, result in original(requests, capture):
            if len(served) == 4:
                raise KeyboardInterrupt
            served.append(index)
            yield index, result

    monkeypatch.setattr(engine, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        regenerate(engine, tiny_target, PROMPTS, out, SETTINGS, quiet=True)
    assert len(read_rows(out)) == 4
    assert json.loads((tmp_path / "cut.jsonl.meta.json").read_text())["complete"] is False
    with out.open("ab") as handle:
        handle.write(b'{"id": "torn')  # and a kill in the middle of a line
    rest = _run(tiny_target, out)
    assert rest.resumed_rows == 4 and rest.summary.rows == 4 + rest.new_rows
    assert _content(out) == _content(tmp_path / "whole.jsonl")
    again = _run(tiny_target, out)
    assert again.new_rows == 0 and again.resumed_rows == rest.summary.rows
    meta = json.loads((tmp_path / "cut.jsonl.meta.json").read_text())
    assert meta["complete"] is True and meta["summary"]["rows"] == again.summary.rows


@pytest.fixture
def shown(monkeypatch):
    """What the bar shows, update by update: (rows done or left out, rows in all)."""
    seen = []
    monkeypatch.setattr(TokenProgress, "_show", lambda self: seen.append((self.done + self.skipped, self.total)))
    return seen


def test_rows_of_an_earlier_run_are_shown_from_the_start_and_once(tiny_target, tmp_path, shown):
    out, total = tmp_path / "rows.jsonl", sum(len(prompt.turns) for prompt in PROMPTS)
    _run(tiny_target, out, [Prompt("other/0", ("Elsewhere",)), *PROMPTS])
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(line for line in lines if "p/3" not in line))
    known = sum(row.source != "other/0" for row in read_rows(out))
    assert 2 < known < total
    shown.clear()
    _run(tiny_target, out)
    assert shown[0] == (known, total)
    assert [done for done, _ in shown] == sorted(done for done, _ in shown) and shown[-1] == (total, total)


def test_another_text_under_a_known_id_is_not_shown_as_done(tiny_target, tmp_path, shown):
    out = tmp_path / "rows.jsonl"
    _run(tiny_target, out, [Prompt("talk/0", ("Hi", "Again")), Prompt("p/0", ("Question 0?",))])
    for turns, rows in ((("Ho", "Again"), 2), (("x" * 300, "Again"), 0)):
        shown.clear()
        done = _run(tiny_target, out, [Prompt("talk/0", turns), Prompt("p/0", ("Question 0?",))])
        assert done.new_rows == rows and done.summary.too_long == (rows == 0)
        assert shown[0] == (3, 3) and shown[-1] == (3, 3) and max(shown) == (3, 3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_depend_on_neither_batch_nor_order(tiny_target, tmp_path, temperature):
    settings = RegenerateSettings(temperatures=(temperature,), top_p=0.95, seed=5, max_tokens=12)
    _run(tiny_target, tmp_path / "a.jsonl", PROMPTS[:5], settings, batch=1)
    _run(tiny_target, tmp_path / "b.jsonl", PROMPTS[4::-1], settings, batch=4)
    assert _content(tmp_path / "a.jsonl") == _content(tmp_path / "b.jsonl")


def test_another_seed_gives_other_answers(tiny_target, tmp_path):
    answers = []
    for seed in (0, 1):
        settings = RegenerateSettings(temperatures=(1.0,), seed=seed, max_tokens=12)
        _run(tiny_target, tmp_path / f"{seed}.jsonl", PROMPTS[:5], settings)
        answers.append([row.answer_ids for row in _content(tmp_path / f"{seed}.jsonl")])
    assert answers[0] != answers[1]


def test_equal_prompts_are_asked_once(tiny_target, tmp_path):
    same = [Prompt(f"s/{i}", ("Hi",)) for i in range(4)]
    done = _run(tiny_target, tmp_path / "rows.jsonl", same)
    assert (done.summary.rows, done.summary.duplicates) == (1, 3)
    again = _run(tiny_target, tmp_path / "rows.jsonl", same)
    assert (again.new_rows, again.resumed_rows, again.summary.duplicates) == (0, 1, 3)


def test_prompts_too_long_are_left_out_by_name(tiny_target, tmp_path):
    long = Prompt("long/0", ("x" * 300, "and?"))
    done = _run(tiny_target, tmp_path / "rows.jsonl", [long, *PROMPTS[:1]])
    assert done.summary.too_long == 1 and done.summary.rows == 1
    assert done.left_out[0].startswith("long/0 turn 0: 3") and "room for 255" in done.left_out[0]
    settings = RegenerateSettings(max_tokens=16, max_prompt_tokens=20)
    short = _run(tiny_target, tmp_path / "short.jsonl", PROMPTS[:5], settings)
    assert short.summary.too_long == 5 and short.summary.rows == 0


def test_empty_answers_are_dropped_counted_and_not_asked_again(tiny_target, tmp_path, monkeypatch):
    everything = frozenset(range(tiny_target.vocab_size))
    monkeypatch.setattr(tiny_target, "stop_ids", everything)  # the first token of any answer ends it
    done = _run(tiny_target, tmp_path / "rows.jsonl")
    assert done.summary.rows == 0 and done.summary.dropped_empty == len(PROMPTS)
    asked = []
    engine = Engine(tiny_target, None, max_batch=2)
    original = engine.run
    monkeypatch.setattr(engine, "run", lambda requests, capture=None: original(asked.extend(requests) or [], capture))
    again = regenerate(engine, tiny_target, PROMPTS, tmp_path / "rows.jsonl", SETTINGS, quiet=True)
    assert not asked and again.summary.dropped_empty == len(PROMPTS)


def test_counts_come_by_set_and_temperature_and_add_up(tiny_target, tmp_path):
    prompts = [*PROMPTS, Prompt("long/0", ("x" * 300,)), Prompt("p/again", ("Question 0?",))]
    settings = RegenerateSettings(temperatures=(0.0, 1.0), max_tokens=12)
    done = _run(tiny_target, tmp_path / "rows.jsonl", prompts, settings)
    rows = read_rows(tmp_path / "rows.jsonl")
    by_set, by_temperature = done.summaries.by_set(), done.summaries.by_temperature()
    assert list(by_set) == ["long", "p", "talk"] and list(by_temperature) == [0.0, 1.0]
    for name, counts in by_set.items():
        mine = [row for row in rows if row.source.startswith(f"{name}/")]
        assert counts.rows == len(mine) and counts.supervised_tokens == sum(len(row.answer_ids) for row in mine)
    for value, counts in by_temperature.items():
        mine = [row for row in rows if row.temperature == value]
        assert counts.rows == len(mine) and counts.loops == sum(detect_loop(row.text_ids) for row in mine)
    assert by_set["long"].too_long == 1 == by_temperature[settings.temperature("long/0")].too_long
    assert combine(by_set.values()) == combine(by_temperature.values()) == done.summary
    meta = json.loads((tmp_path / "rows.jsonl.meta.json").read_text())
    assert meta["summary"] == asdict(done.summary)
    assert meta["summary_by_set"]["p"] == asdict(by_set["p"])
    assert meta["summary_by_temperature"]["1"] == asdict(by_temperature[1.0])
    again = _run(tiny_target, tmp_path / "rows.jsonl", prompts, settings)
    assert again.summaries.record() == done.summaries.record()
    shown = regenerated_lines(again)
    assert f"p: {by_set['p'].rows} rows" in shown and f"temperature 1: {by_temperature[1.0].rows} rows" in shown


def test_a_file_made_under_other_settings_is_refused(tiny_target, tmp_path):
    out = tmp_path / "rows.jsonl"
    _run(tiny_target, out, PROMPTS[:1])
    with pytest.raises(DsparkError, match=r"max_tokens = 8: .* was made with 16"):
        _run(tiny_target, out, PROMPTS[:1], RegenerateSettings(max_tokens=8))
    notes = tmp_path / "rows.jsonl.meta.json"
    notes.write_text(json.dumps({**json.loads(notes.read_text()), "target_dtype": "bfloat16"}))
    with pytest.raises(DsparkError, match=r"target_dtype = 'float32': .* was made with 'bfloat16'"):
        _run(tiny_target, out, PROMPTS[:1])
    notes.write_text("[]")
    with pytest.raises(DsparkError, match="must hold one JSON object"):
        _run(tiny_target, out, PROMPTS[:1])
    notes.unlink()
    with pytest.raises(DsparkError, match="cannot be resumed"):
        _run(tiny_target, out, PROMPTS[:1])
    with pytest.raises(DsparkError, match="is a folder"):
        _run(tiny_target, tmp_path, PROMPTS[:1])


def test_two_runs_never_write_one_file(tiny_target, tmp_path):
    class Nested:
        def write(self, row, taps, last_hidden):
            with pytest.raises(DsparkError, match="written by another run"):
                _run(tiny_target, tmp_path / "rows.jsonl", PROMPTS[:1])

    done = _run(tiny_target, tmp_path / "rows.jsonl", PROMPTS[:1], sink=Nested(), taps=(1,))
    assert done.new_rows == 1


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperatures": ()}, "temperature"),
        ({"temperatures": (0.5, -1.0)}, "temperature"),
        ({"temperatures": (0.5, float("nan"))}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
    ],
)
def test_settings_out_of_range(wrong, field):
    with pytest.raises(DsparkError) as caught:
        RegenerateSettings(**wrong)
    assert caught.value.field == field


def test_greedy_row_ids_have_not_changed(tiny_target, tmp_path):
    _run(tiny_target, tmp_path / "rows.jsonl", PROMPTS[:2])
    for row in read_rows(tmp_path / "rows.jsonl"):
        assert row.id == row_id(row.prompt_ids, {"temperature": 0.0, "max_tokens": 16})


def test_each_prompt_draws_one_temperature_for_all_its_turns(tiny_target, tmp_path):
    several = RegenerateSettings(temperatures=(0.0, 0.5, 1.0), seed=3, max_tokens=6)
    drawn = Counter(several.temperature(f"set/{i}") for i in range(600))
    assert set(drawn) == {0.0, 0.5, 1.0} and min(drawn.values()) > 150
    assert [several.temperature(p.id) for p in PROMPTS] != [
        RegenerateSettings(temperatures=(0.0, 0.5, 1.0), seed=4).temperature(p.id) for p in PROMPTS
    ]
    talks = [Prompt(f"talk/{i}", (f"Hi {i}", "Again", "Bye")) for i in range(8)]
    _run(tiny_target, tmp_path / "a.jsonl", talks, several, batch=1)
    _run(tiny_target, tmp_path / "b.jsonl", talks[::-1], several, batch=5)
    rows = _content(tmp_path / "a.jsonl")
    assert rows == _content(tmp_path / "b.jsonl")
    assert all(row.temperature == several.temperature(row.source) for row in rows)
    assert {row.temperature for row in rows} == {0.0, 0.5, 1.0}
    # The other temperatures of the run change nothing about a row.
    chosen = next(talk for talk in talks if several.temperature(talk.id) == 0.5)
    _run(tiny_target, tmp_path / "c.jsonl", [chosen], RegenerateSettings((0.5,), seed=3, max_tokens=6))
    assert _content(tmp_path / "c.jsonl") == [row for row in rows if row.source == chosen.id]


def test_resume_wants_the_same_temperatures(tiny_target, tmp_path):
    out = tmp_path / "rows.jsonl"
    settings = RegenerateSettings(temperatures=(0.5, 1.0), max_tokens=6)
    first = _run(tiny_target, out, PROMPTS[:3], settings)
    again = _run(tiny_target, out, PROMPTS[:5], settings)
    assert (again.resumed_rows, again.new_rows + again.summary.dropped_empty) == (first.new_rows, 2)
    with pytest.raises(DsparkError, match=r"temperature = '0\.5': .* was made with '0\.5,1'; use another"):
        _run(tiny_target, out, PROMPTS[:3], RegenerateSettings(temperatures=(0.5,), max_tokens=6))


def test_a_file_from_before_there_were_several_temperatures_is_gone_on_with(tiny_target, tmp_path):
    out = tmp_path / "rows.jsonl"
    _run(tiny_target, out, PROMPTS[:2])
    notes = tmp_path / "rows.jsonl.meta.json"
    found = json.loads(notes.read_text())
    found["settings"]["temperature"] = found["settings"].pop("temperatures")[0]
    notes.write_text(json.dumps(found))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    for line in lines:
        assert len(line.pop("prompt_hash")) == 16
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [row.prompt_hash for row in read_rows(out)] == [None, None]
    assert _run(tiny_target, out, PROMPTS[:3]).resumed_rows == 2
    found["settings"]["temperature"] = 0.5
    notes.write_text(json.dumps(found))
    with pytest.raises(DsparkError, match=r"temperature = '0': .* was made with '0\.5'"):
        _run(tiny_target, out, PROMPTS[:3])


def test_rows_carry_the_hash_of_the_turn_they_answer(tiny_target, tmp_path):
    _run(tiny_target, tmp_path / "rows.jsonl")
    turns = {(prompt.id, number): text for prompt in PROMPTS for number, text in enumerate(prompt.turns)}
    for row in read_rows(tmp_path / "rows.jsonl"):
        assert row.prompt_hash == prompt_hash(turns[_key(row)])


def test_prompt_files_are_hashed_by_name(tiny_target, tmp_path):
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"id": "p/0", "turns": ["Question 0?"]}\n')
    _run(tiny_target, tmp_path / "rows.jsonl", PROMPTS[:1], prompt_files=[source])
    meta = json.loads((tmp_path / "rows.jsonl.meta.json").read_text())
    assert list(meta["prompt_files"]) == ["prompts.jsonl"] and len(meta["prompt_files"]["prompts.jsonl"]) == 64
    assert meta["target"] == "tiny" and meta["settings"]["max_tokens"] == 16 and str(tmp_path) not in json.dumps(meta)


def test_notes_say_which_part_of_the_prompts_was_asked_and_a_resume_may_ask_another(tiny_target, tmp_path):
    out, notes = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.meta.json"
    _run(tiny_target, out, PROMPTS[:2])
    old = json.loads(notes.read_text())
    assert old.pop("asked") == []
    notes.write_text(json.dumps(old))  # as it was before parts were noted
    half, first = Part(prompts="p.jsonl", shard="0/2"), Part(prompts="p.jsonl", limit=3, shuffle=5)
    for part in (half, first, half):
        assert _run(tiny_target, out, PROMPTS[:2], part=part).resumed_rows == 2
    assert [Part(**one) for one in json.loads(notes.read_text())["asked"]] == [half, first]


@pytest.mark.parametrize(
    ("name", "value"), [("dropped", None), ("prompt_files", []), ("settings", []), ("asked", {}), ("versions", None)]
)
def test_notes_of_another_form_are_refused_by_field(tiny_target, tmp_path, name, value):
    _run(tiny_target, tmp_path / "rows.jsonl", PROMPTS[:1])
    notes = tmp_path / "rows.jsonl.meta.json"
    notes.write_text(json.dumps({**json.loads(notes.read_text()), name: value}))
    with pytest.raises(DsparkError, match=rf"rows.jsonl.meta.json: {name} = "):
        _run(tiny_target, tmp_path / "rows.jsonl", PROMPTS[:1])


def test_captured_features_are_those_of_the_row(tiny_target, tmp_path):
    kept = {}

    class Sink:
        def write(self, row, taps, last_hidden):
            kept[row.id] = (taps, last_hidden)

    _run(tiny_target, tmp_path / "rows.jsonl", sink=Sink(), taps=(0, 2))
    rows = read_rows(tmp_path / "rows.jsonl")
    assert set(kept) == {row.id for row in rows}
    for row in rows:
        taps, last_hidden = kept[row.id]
        ids = torch.tensor(row.ids[:-1])
        alone = tiny_target.forward([(tiny_target.new_state(len(ids)), ids)], taps=(0, 2))
        assert taps.shape == (len(ids), 2 * 32) and last_hidden.shape == (len(ids), 32)
        torch.testing.assert_close(taps, alone.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(last_hidden, alone.last_hidden, rtol=1e-4, atol=1e-4)

"""A data card: what rows files hold and how they were made, as Markdown from the files and the notes beside them."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from dspark.data.notes import NotedSettings, Notes, read_notes
from dspark.data.rows import Row, notes_path, read_rows, unique_rows
from dspark.data.summary import RowSummary, Summaries, prompt_set
from dspark.errors import DsparkError
from dspark.targets.transformers import load_tokenizer

_HELD_OUT = """\
Whole prompts are held out of training, never single rows, and the hash of a prompt's id alone decides: with
`data.held_out = N` the N prompts whose sha256(id) is smallest (its first 8 bytes, little-endian); with
`data.validation_share` those whose sha256("0/" + id), its first 7 bytes as a number in [0, 1), lies below the share.
All turns, temperatures and files of a prompt fall on the same side."""
_SET_HEADER = (
    *("set", "prompts", "rows", "prompt tokens", "answer tokens", "answer length p50 / p90 / max", "ended / cut"),
    *("loops", "distinct 2-grams", "distinct 4-grams", "asked already", "too long", "empty"),
)
_SET_LEGEND = """\
Prompts: those that gave a row. Answer lengths in tokens; ended: by a stop token, cut: at the token limit. Loops:
answers whose end repeats up to 16 tokens at least 4 times; they are kept. Distinct n-grams: the share of different
ones among all in the set's answers (it falls as a set grows). The last three columns count prompts that gave no row,
once for each file that asked them."""
SAMPLE_CHARACTERS = 400
_DROPPED = {"duplicates": "asked already", "too_long": "prompts too long", "dropped_empty": "empty answers"}


def data_card(files: Sequence[Path], sample: int = 0) -> str:
    """The card of these rows files (Markdown, file names without folders), a function of their contents alone.

    sample: how many rows to show as text; for them alone the target's tokenizer is loaded.
    Raises DsparkError when there is no file, one is named twice, it or its notes cannot be read, or two have different
    targets.
    """
    files = [Path(file) for file in files]
    if not files:
        raise DsparkError("rows", None, "name at least one rows file (made by `dspark regenerate`)")
    twice = [name for name, count in Counter(file.resolve() for file in files).items() if count > 1]
    if twice:
        raise DsparkError("rows", twice[0].name, "is named twice; name each file once")
    rows_of = [read_rows(file) for file in files]
    notes_of = [read_notes(file) for file in files]
    rows = [row for some in rows_of for row in some]
    parts = [
        "# Data card",
        _headline(files, notes_of, rows),
        "## By set of prompts",
        _set_table(rows, notes_of),
        "## By temperature",
        _temperature_table(rows),
        "## Held out",
        _HELD_OUT,
        "## Files",
    ]
    for file, some, notes in zip(files, rows_of, notes_of, strict=True):
        parts += [f"### {_cell(file.name)}", _file_lines(file, some, notes)]
    if sample:
        parts += ["## Sample", *_sample(rows, _targets(notes_of), sample)]
    return "\n\n".join(parts) + "\n"


def _headline(files: Sequence[Path], notes_of: Sequence[Notes | None], rows: Sequence[Row]) -> str:
    total, prompts = Summaries(rows).total, len({row.source for row in rows})
    again = len(rows) - len(unique_rows(rows))
    return "\n".join(
        [
            f"{_written_by(files, notes_of)}: {total.rows:,} rows of {prompts:,} prompts, "
            f"{total.supervised_tokens:,} answer tokens and {total.prompt_tokens:,} prompt tokens.",
            f"{again:,} of the rows repeat the prompt and the answer of an earlier one (a sampled answer may equal the "
            "greedy one); they are counted below, and training takes each once.",
        ]
    )


def _written_by(files: Sequence[Path], notes_of: Sequence[Notes | None]) -> str:
    """Who wrote the answers, said only of files whose notes name the target."""
    targets = _targets(notes_of)
    if len(targets) > 1:
        raise DsparkError("target", targets, "rows of several targets; make one card for each")
    silent = [file.name for file, notes in zip(files, notes_of, strict=True) if notes is None or notes.target is None]
    others = ", ".join(f"`{_cell(name)}`" for name in silent)
    if not targets:
        return "Answers of which nothing tells who wrote them"
    itself = f"Answers written by `{targets[0]}` itself"
    return f"{itself}, but for those in {others}, of which nothing tells who wrote them" if others else itself


def _targets(notes_of: Iterable[Notes | None]) -> list[str]:
    return sorted({notes.target for notes in notes_of if notes is not None and notes.target is not None})


def _dropped_by_set(notes_of: Sequence[Notes | None]) -> dict[str, Counter[str]] | None:
    """{set: {why: prompts that gave no row}}, or None when not every file's notes tell it."""
    dropped: dict[str, Counter[str]] = {}
    for notes in notes_of:
        if notes is None or notes.summary_by_set is None:
            return None
        for name, counts in notes.summary_by_set.items():
            dropped.setdefault(name, Counter()).update({key: counts.get(key, 0) for key in _DROPPED})
    return dropped


def _set_table(rows: Sequence[Row], notes_of: Sequence[Notes | None]) -> str:
    """One line a set, one for all."""
    dropped = _dropped_by_set(notes_of)
    groups: dict[str, list[Row]] = {name: [] for name in dropped or {}}
    for row in rows:
        groups.setdefault(prompt_set(row.source), []).append(row)
    lines = []
    for name in sorted(groups):
        missing = None if dropped is None else dropped.get(name, Counter())
        lines.append([_cell(name), *_set_cells(groups[name], missing)])
    if len(groups) > 1:
        everything = None if dropped is None else sum(dropped.values(), Counter())
        lines.append(["all", *_set_cells(rows, everything)])
    return _table(_SET_HEADER, lines) + "\n\n" + _SET_LEGEND


def _set_cells(rows: Sequence[Row], dropped: Counter[str] | None) -> list[str]:
    counts = Summaries(rows).total
    lengths = sorted(len(row.answer_ids) for row in rows)
    answers = [row.answer_ids for row in rows]
    return [
        f"{len({row.source for row in rows}):,}",
        f"{counts.rows:,}",
        f"{counts.prompt_tokens:,}",
        f"{counts.supervised_tokens:,}",
        " / ".join(str(quantile(lengths, q)) for q in (0.5, 0.9, 1.0)) if lengths else "-",
        f"{counts.stop:,} / {counts.length_cut:,}",
        _loops(counts),
        *(_share(distinct_share(answers, n)) for n in (2, 4)),
        *("-" if dropped is None else f"{dropped[key]:,}" for key in _DROPPED),
    ]


def _temperature_table(rows: Sequence[Row]) -> str:
    lines = [
        [f"{value:g}" + (" (greedy)" if value == 0 else ""), f"{c.rows:,}", f"{c.supervised_tokens:,}", _loops(c)]
        for value, c in Summaries(rows).by_temperature().items()
    ]
    return _table(["temperature", "rows", "answer tokens", "loops"], lines)


def _file_lines(file: Path, rows: Sequence[Row], notes: Notes | None) -> str:
    lines = [f"{len(rows):,} rows, sha256 `{hashlib.sha256(file.read_bytes()).hexdigest()}`"]
    if notes is None:
        missing = f"no `{_cell(notes_path(file).name)}` beside it: who wrote its answers, and how, is not known"
        return _list([*lines, missing])
    lines += [
        f"target `{notes.target}` ({notes.target_dtype}), stop ids {notes.stop_ids}",
        f"template sha256 `{notes.template_sha256}`, thinking {notes.thinking or 'left as it is'}, "
        f"variables {notes.template_variables or 'none'}",
        _settings_line(notes.settings),
        "no row: " + ", ".join(f"{notes.summary.get(key, 0)} {why}" for key, why in _DROPPED.items()),
        _asked_line(notes),
    ]
    for name, digest in sorted(notes.prompt_files.items()):
        lines.append(f"prompts `{_cell(name)}`" + (f", sha256 `{digest}`" if digest else " (not a file)"))
    lines.append("made with " + ", ".join(f"{name} {one}" for name, one in sorted(notes.versions.items())))
    return _list(lines)


def _asked_line(notes: Notes) -> str:
    asked = "; ".join(_cell(str(part)) for part in notes.asked) or "which part of the prompts is not recorded"
    return f"asked: {asked}" + ("" if notes.complete else "; the last run stopped before all of them were asked")


def _settings_line(settings: NotedSettings) -> str:
    temperatures = settings.temperatures or [0.0]
    said = ["greedy"]
    if set(temperatures) != {0.0}:
        extra = settings.model_extra or {}
        said = [
            f"temperature {' or '.join(f'{value:g}' for value in temperatures)}"
            + (", drawn by prompt" if len(temperatures) > 1 else ""),
            ", ".join(f"{name} {extra.get(name)}" for name in ("top_k", "top_p", "min_p", "seed")),
        ]
    longest = settings.max_prompt_tokens
    said.append(f"answers of at most {settings.max_tokens} tokens")
    said.append(f"prompts of at most {longest} tokens" if longest else "prompts as long as the context allows")
    return "; ".join(said)


def _sample(rows: Sequence[Row], targets: Sequence[str], count: int) -> Iterator[str]:
    """Some rows as text, always the same ones: the end of the prompt as the target read it, the answer's beginning."""
    if not targets:
        raise DsparkError("sample", count, "no notes beside these rows tell whose tokenizer reads them; leave it out")
    tokenizer = load_tokenizer(targets[0])
    for row in random.Random(0).sample(rows, min(count, len(rows))):
        prompt, answer = (
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for ids in (row.prompt_ids, row.answer_ids)
        )
        yield f"### {_cell(row.source)}, turn {row.turn}, temperature {row.temperature:g}"
        yield f"prompt:\n\n{_block(prompt[-SAMPLE_CHARACTERS:])}"
        yield f"answer:\n\n{_block(answer[:SAMPLE_CHARACTERS])}"


def _block(text: str) -> str:
    """A Markdown block that shows any text as it is."""
    return "\n".join("    " + line for line in text.splitlines())


def quantile(ordered: Sequence[int], share: float) -> int:
    """The smallest of the ascending values that at least `share` of them do not exceed."""
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def distinct_share(answers: Iterable[Sequence[int]], n: int) -> float | None:
    """Different n-grams over all n-grams of token ids, none of which spans two answers; None without any."""
    pieces = [torch.tensor(ids).unfold(0, n, 1) for ids in answers if len(ids) >= n]
    if not pieces:
        return None
    grams = torch.cat(pieces)  # [grams, n] int64
    width = int(grams.max()) + 1
    key = grams[:, 0]
    for column in grams.T[1:]:
        # ranks instead of the keys themselves: exact, and never beyond 64 bits
        key = torch.unique(key * width + column, return_inverse=True)[1]
    return len(torch.unique(key)) / len(key)


def _loops(counts: RowSummary) -> str:
    return f"{counts.loops:,} ({counts.loops / counts.rows:.1%})" if counts.rows else "0"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _cell(text: str) -> str:
    """A name inside Markdown: no line break, no column mark, no code mark."""
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'")


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines))


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)

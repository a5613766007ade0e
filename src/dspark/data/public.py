"""Public data sets of prompts on the Hugging Face hub: where they are, and how a row becomes a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dspark.data.prompts import Prompt
from dspark.errors import pip_install

Row = Mapping[str, Any]


class Unavailable(Exception):
    """Why a known set cannot be had; one line."""


@dataclass(frozen=True)
class Published:
    """A public data set on the Hugging Face hub, and how a row of it becomes a prompt.

    files: JSONL files of the repository, where the set cannot be loaded by its name alone
    kept: (column, value) of the rows that belong to the suite; None keeps all
    revision: commit that is asked for; None is the newest
    """

    repo: str
    config: str | None
    split: str
    turns: Callable[[Row], list[str]]
    revision: str | None = None
    files: tuple[str, ...] = ()
    kept: tuple[str, str] | None = None

    def __str__(self) -> str:
        repo = f"{self.repo}@{self.revision[:7]}" if self.revision else self.repo
        more = f"and {len(self.files) - 1} more files" if len(self.files) > 1 else None
        parts = (repo, self.files[0], more) if self.files else (repo, self.config, self.split)
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Entry:
    """A line of the table. measures: what the suite is about; published: None where no data set exists."""

    measures: str
    published: Published | None


def _mathematics(column: str) -> Callable[[Row], list[str]]:
    return lambda row: [f"{row[column]}\n\nThink it through step by step and give the final answer in \\boxed{{}}."]


def _column(column: str) -> Callable[[Row], list[str]]:
    return lambda row: [row[column]]


def _turns(column: str) -> Callable[[Row], list[str]]:
    return lambda row: list(row[column])


def _complete_function(row: Row) -> list[str]:
    return [f"Complete this Python function. Give the whole function.\n\n```python\n{row['prompt'].rstrip()}\n```"]


def _write_function(row: Row) -> list[str]:
    tests = "\n".join(row["test_list"])
    return [f"{row['prompt']}\n\nWrite it in Python so that these checks pass:\n\n```python\n{tests}\n```"]


def _solve_contest_problem(row: Row) -> list[str]:
    start = (row.get("starter_code") or "").rstrip()
    if start:
        how = f"Write a Python solution that begins with this code:\n\n```python\n{start}\n```"
    else:
        how = "Write a Python program that reads the input from standard input and prints the answer."
    return [f"{row['question_content']}\n\n{how}"]


def _resolve_issue(row: Row) -> list[str]:
    return [
        f"This issue was filed against the repository {row['repo']}:\n\n{row['problem_statement']}\n\n"
        "Explain the likely cause and write a patch that resolves it, as a unified diff."
    ]


def _follow_instruction(row: Row) -> list[str]:
    given = row["input"].strip()
    return [f"{row['instruction']}\n\n{given}" if given else row["instruction"]]


# Ids, configurations, splits and columns are those of the data cards (aime25, aime26, mbpp, mt-bench,
# speed-bench-coding, alpaca) or, where no card was at hand, of several public programs that agree (gsm8k, math500,
# humaneval, livecodebench, swe-rebench, arena-hard). Not verified: that these sets load today, since all was written
# without the hub; which 50 issues of SWE-rebench a published table used; whether the coding rows of SPEED-Bench are
# whole, since many rows of that set hold a placeholder until its own script has filled them (they are noticed here).
# aime26: math-ai/aime26 holds the same 30 problems, but public programs disagree on the name of its split.
# livecodebench: the repository has a loading script, which `datasets` refuses, so its six files are read: release v6,
# 1,055 problems in 4.5 GB, nearly all of it test cases. arena-hard is version 2.0: 500 hard prompts, 250 creative ones.
# Revisions are given where more than one source names the same one.
_LIVECODEBENCH = ("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl")
TABLE: dict[str, Entry] = {
    "gsm8k": Entry(
        "school arithmetic in words, 1,319 questions",
        Published("openai/gsm8k", "main", "test", _mathematics("question")),
    ),
    "math500": Entry(
        "competition mathematics, 500 problems",
        Published("HuggingFaceH4/MATH-500", None, "test", _mathematics("problem")),
    ),
    "aime25": Entry(
        "the two AIME papers of 2025, 30 problems with long answers",
        Published("math-ai/aime25", None, "test", _mathematics("problem"), "563bb8404243c5f09de6ec262f2db674fe5bce9b"),
    ),
    "aime26": Entry(
        "the two AIME papers of 2026, 30 problems with long answers",
        Published("MathArena/aime_2026", None, "train", _mathematics("problem")),
    ),
    "humaneval": Entry(
        "Python functions from their docstrings, 164 of them",
        Published("openai/openai_humaneval", None, "test", _complete_function),
    ),
    "mbpp": Entry(
        "short Python programs from a sentence, the 257 checked ones",
        Published("google-research-datasets/mbpp", "sanitized", "test", _write_function),
    ),
    "livecodebench": Entry(
        "contest programming, release v6, 1,055 problems",
        Published(
            "livecodebench/code_generation_lite",
            None,
            "train",
            _solve_contest_problem,
            "0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
            _LIVECODEBENCH,
        ),
    ),
    "mt-bench": Entry(
        "conversation in eight kinds, 80 prompts of two turns",
        Published(
            "HuggingFaceH4/mt_bench_prompts",
            None,
            "train",
            _turns("prompt"),
            "e3a795c5e9a82ee40611c416b8a7786c73198991",
        ),
    ),
    "speed-bench-coding": Entry(
        "programming as speculative decoding meets it, 80 prompts",
        Published("nvidia/SPEED-Bench", "qualitative", "test", _turns("turns"), kept=("category", "coding")),
    ),
    "swe-rebench": Entry(
        "issues of real Python repositories",
        Published("nebius/SWE-rebench", None, "filtered", _resolve_issue),
    ),
    "alpaca": Entry(
        "short everyday instructions, 52,002 of them",
        Published("tatsu-lab/alpaca", None, "train", _follow_instruction, "dce01c9b08f87459cf36a430d809084718273017"),
    ),
    "arena-hard": Entry(
        "hard requests of real users and creative writing, 750 prompts in many languages",
        Published(
            "lmarena-ai/arena-hard-auto",
            None,
            "train",
            _column("prompt"),
            "15f3746e21432264ce9b453999bde4f3c946d2e6",
            ("data/arena-hard-v2.0/question.jsonl",),
        ),
    ),
    "ruler-v2": Entry("retrieval and questions over one very long prompt, written by bench/longcontext.py", None),
}
TRAINING = {
    "gsm8k-train": Entry(
        "the other part of gsm8k, 7,473 questions, for training",
        Published("openai/gsm8k", "main", "train", _mathematics("question")),
    ),
}
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # what stands in SPEED-Bench rows until its script has run


def download(name: str) -> tuple[list[Prompt], str]:
    """Every prompt of a public set of the tables, ids <name>/<row, from 0>, and its name. Raises Unavailable."""
    published = {**TABLE, **TRAINING}[name].published
    if published is None:
        raise Unavailable(
            "it has no public data set: its prompts are written for a target and a length (`dspark bench "
            f"--long-tokens`), or given as {name}.jsonl in the data folder"
        )
    try:
        import datasets  # heavy and optional
    except ImportError:
        raise Unavailable(f"{published} needs the datasets package: {pip_install('datasets')}") from None
    try:
        return _prompts(name, published, _load(datasets, published)), str(published)
    except Unavailable:
        raise
    except Exception as error:  # the hub client raises many kinds; all of them mean "not to be had from here"
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise Unavailable(f"{published} cannot be had from here ({line}); give {name}.jsonl instead") from None


def _load(datasets: Any, published: Published) -> Any:
    if not published.files:
        return datasets.load_dataset(
            published.repo, published.config, split=published.split, revision=published.revision
        )
    at = f"@{published.revision}" if published.revision else ""
    files = [f"hf://datasets/{published.repo}{at}/{file}" for file in published.files]
    return datasets.load_dataset("json", data_files=files, split=published.split)


def _prompts(name: str, published: Published, table: Any) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, row in enumerate(table):
        try:
            if published.kept is not None and row[published.kept[0]] != published.kept[1]:
                continue
            turns = published.turns(row)
            whole = bool(turns) and all(isinstance(turn, str) and turn.strip() for turn in turns)
        except (KeyError, TypeError, AttributeError) as error:
            columns = ", ".join(row)[:120]
            raise Unavailable(
                f"row {number} of {published} is not as expected ({type(error).__name__}: {error}); "
                f"its columns are {columns}"
            ) from None
        if not whole:
            raise Unavailable(f"row {number} of {published} holds no text where the prompt should be")
        prompts.append(Prompt(f"{name}/{len(prompts)}", tuple(turns)))
    if not prompts:
        raise Unavailable(f"{published} holds no row of this suite")
    hollow = sum(any(PLACEHOLDER in turn for turn in prompt.turns) for prompt in prompts)
    if hollow:
        raise Unavailable(
            f"{hollow} of {len(prompts)} rows of {published} are placeholders; fill them with the script that its "
            f"card names and give {name}.jsonl in the data folder"
        )
    return prompts

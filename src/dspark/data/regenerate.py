"""Regenerate: the target itself answers the prompts, and the rows keep the ids it emitted.

A draft learns to predict this target, so its training answers must be this target's own (method: training data).
Every row has a content-derived id; running the same command again continues where the last run stopped.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from torch import Tensor

from dspark.data.chat import ChatRenderer
from dspark.data.notes import Part, describe, open_notes, write_notes
from dspark.data.progress import TokenProgress
from dspark.data.prompts import Prompt, prompt_hash
from dspark.data.rows import Row, RowWriter, row_id
from dspark.data.summary import RowSummary, Summaries
from dspark.decoding.engine import Engine
from dspark.decoding.request import Request, Result, SamplingSettings
from dspark.errors import DsparkError
from dspark.locks import lock_for_writing
from dspark.targets.base import Target


class FeatureSink(Protocol):
    """Where `regenerate` puts what the target computed on the way. Give the engine the taps (`capture_taps`)."""

    def write(self, row: Row, taps: Tensor, last_hidden: Tensor) -> None:
        """taps [T, m * d] and the pre-norm last hidden [T, d] of the T = len(row.ids) - 1 tokens the target read.
        Called before the row is written, so that a row on disk never lacks features the sink was given."""


@dataclass(frozen=True)
class RegenerateSettings:
    """How the target answers. Sampled answers get a seed of their own each, derived from `seed` and the row's id,
    so that they do not depend on the batch, the order or an interruption.

    temperatures: each prompt, all its turns, draws one of them by the hash of (seed, prompt id); a value given twice
    is drawn twice as often. 0 is greedy.
    max_tokens: answer tokens at most (longer answers are cut and marked); max_prompt_tokens: longer prompts are
    left out and named (None: whatever fits the target's context).
    """

    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 512
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise DsparkError("temperature", self.temperatures, "need at least one")
        for temperature in self.temperatures:
            self.sampling(temperature, "")  # raises on a value out of range
        if self.max_tokens < 1:
            raise DsparkError("max_tokens", self.max_tokens, "must be at least 1")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise DsparkError("max_prompt_tokens", self.max_prompt_tokens, "must be at least 1")

    def temperature(self, prompt_id: str) -> float:
        """The temperature at which all turns of this prompt are answered."""
        digest = hashlib.sha256(f"{self.seed}/temperature/{prompt_id}".encode()).digest()
        return self.temperatures[int.from_bytes(digest[:8]) % len(self.temperatures)]

    def sampling(self, temperature: float, identity: str) -> SamplingSettings:
        """Sampling settings, at this temperature, of the row with this id."""
        base = SamplingSettings(temperature, self.top_k, self.top_p, self.min_p, self.seed)
        if base.greedy:
            return SamplingSettings()
        digest = hashlib.sha256(f"{self.seed}/{identity}".encode()).digest()
        return replace(base, seed=int.from_bytes(digest[:8]) >> 1)

    def identity(self, temperature: float) -> dict[str, object]:
        """The settings that decide an answer at this temperature, for its row id: a greedy one depends on the token
        limit alone, a sampled one never on the other temperatures there are."""
        if temperature == 0.0:
            return {"temperature": 0.0, "max_tokens": self.max_tokens}
        names = ("top_k", "top_p", "min_p", "seed", "max_tokens")
        return {"temperature": temperature, **{name: getattr(self, name) for name in names}}

    def record(self) -> dict[str, Any]:
        """The settings as JSON has them, for the notes."""
        return {**asdict(self), "temperatures": list(self.temperatures)}


@dataclass
class Regenerated:
    """What a run did. summaries: over the whole file; the rest: of this run.

    left_out: one line for each turn that gave no row because its prompt was too long, with the turns after it.
    """

    summaries: Summaries
    new_rows: int = 0
    new_tokens: int = 0
    resumed_rows: int = 0
    seconds: float = 0.0
    left_out: list[str] = field(default_factory=list)

    @property
    def summary(self) -> RowSummary:
        return self.summaries.total


@dataclass
class _Conversation:
    """A prompt under way. messages ends with the user turn to be answered next."""

    prompt: Prompt
    turn: int
    temperature: float
    messages: list[dict[str, str]]
    prompt_ids: list[int] = field(default_factory=list)
    row_id: str = ""


@dataclass(frozen=True)
class _Answer:
    """An answer already known: whose it was, and its text ids (compact; a file may hold millions)."""

    source: str
    turn: int
    text_ids: array[int]

    @classmethod
    def of(cls, row: Row) -> _Answer:
        return cls(row.source, row.turn, array("q", row.text_ids))


def refuse_folder(out: Path) -> None:
    """Raises DsparkError when the rows file to be written is a folder."""
    if out.is_dir():
        raise DsparkError("out", str(out), "is a folder; give the name of a .jsonl file")


def regenerate(
    engine: Engine,
    target: Target,
    prompts: Iterable[Prompt],
    out: str | Path,
    settings: RegenerateSettings,
    renderer: ChatRenderer | None = None,
    sink: FeatureSink | None = None,
    prompt_files: Sequence[str | Path] = (),
    part: Part | None = None,
    console: Console | None = None,
    quiet: bool = False,
) -> Regenerated:
    """Let the target answer `prompts` and append the rows to `out` (JSONL, in order of completion).

    Turn k + 1 of a conversation is rendered with the target's own answer to turn k. `<out>.meta.json` notes the
    target, template, settings, versions and prompt files; a file made under others is refused, the same command on
    an unfinished one goes on. Empty answers are dropped (and not tried again), answers cut at the token limit are
    marked, equal prompts are asked once; all are counted. An interrupt (Ctrl-C) leaves a file that can be resumed.
    `prompt_files` are hashed into the notes, `part` says which of their prompts these are. Raises DsparkError on bad
    input.
    """
    prompts, out = list(prompts), Path(out)
    refuse_folder(out)
    renderer = renderer or ChatRenderer(target.tokenizer)
    with lock_for_writing(out, "out"):
        notes = open_notes(out, describe(target, renderer, settings.record(), prompt_files, part))
        with RowWriter(out) as writer:
            turns = sum(len(prompt.turns) for prompt in prompts)
            with TokenProgress("regenerate", turns, console, quiet) as progress:
                run = _Run(target, renderer, settings, writer, sink, notes["dropped"], progress)
                try:
                    run.serve(engine, prompts)
                    notes["complete"] = True
                finally:
                    run.report.seconds = progress.seconds
                    notes.update(run.report.summaries.record())
                    write_notes(out, notes)
        return run.report


class _Run:
    """One run over the prompts: which turn is asked next, and what becomes of its answer."""

    def __init__(
        self,
        target: Target,
        renderer: ChatRenderer,
        settings: RegenerateSettings,
        writer: RowWriter,
        sink: FeatureSink | None,
        dropped: dict[str, str],
        progress: TokenProgress,
    ) -> None:
        self.target, self.renderer, self.settings = target, renderer, settings
        self.writer, self.sink, self.progress = writer, sink, progress
        self.dropped = dropped  # row id -> prompt id
        self.report = Regenerated(Summaries(writer.existing.values()))
        self.answers = {identity: _Answer.of(row) for identity, row in writer.existing.items()}
        writer.existing.clear()
        self.counted: set[tuple[str, int]] = set()  # (prompt id, turn) shown as done before they are met
        self.queue: deque[_Conversation] = deque()
        self.asked: dict[str, list[_Conversation]] = {}  # row id in flight -> others that want the same answer
        limit = target.max_context - 1
        self.room = limit if settings.max_prompt_tokens is None else min(limit, settings.max_prompt_tokens)

    def serve(self, engine: Engine, prompts: Sequence[Prompt]) -> None:
        asked = {(prompt.id, turn) for prompt in prompts for turn in range(len(prompt.turns))}
        self.counted = asked.intersection((answer.source, answer.turn) for answer in self.answers.values())
        self.progress.skip(len(self.counted))
        for prompt in prompts:
            temperature = self.settings.temperature(prompt.id)
            self.queue.append(_Conversation(prompt, 0, temperature, [{"role": "user", "content": prompt.turns[0]}]))
        # A follow-up turn joins the queue as soon as its answer is there and the engine pulls it into the running
        # batch; those that come after the engine found the queue empty make one more wave.
        while self.queue:
            submitted: list[_Conversation] = []
            captured: dict[int, tuple[Tensor, Tensor]] = {}

            def capture(index: int, taps: Tensor, last_hidden: Tensor, into: dict[int, Any] = captured) -> None:
                into[index] = (taps, last_hidden)

            results = engine.run(self._requests(submitted), capture if self.sink is not None else None)
            for index, result in results:
                self._finished(submitted[index], result, captured.pop(index, None))

    def _requests(self, submitted: list[_Conversation]) -> Iterator[Request]:
        while self.queue:
            conversation = self.queue.popleft()
            if self._must_ask(conversation):
                submitted.append(conversation)
                sampling = self.settings.sampling(conversation.temperature, conversation.row_id)
                yield Request(conversation.prompt_ids, self.settings.max_tokens, sampling, self.target.stop_ids)

    def _must_ask(self, conversation: _Conversation) -> bool:
        """Render the turn; False when its answer is known, on its way, or not to be had."""
        conversation.prompt_ids = self.renderer.prompt_ids(conversation.messages)
        length = len(conversation.prompt_ids)
        if length > self.room:
            self._counts(conversation).too_long += 1
            where = f"{conversation.prompt.id} turn {conversation.turn}"
            self.report.left_out.append(f"{where}: {length} tokens, room for {self.room}")
            self._skip(conversation, len(conversation.prompt.turns))
            return False
        identity = row_id(conversation.prompt_ids, self.settings.identity(conversation.temperature))
        conversation.row_id = identity
        if identity in self.asked:
            self.asked[identity].append(conversation)
            return False
        if identity in self.answers:
            self._known(conversation)
            return False
        if identity in self.dropped:
            self._empty(conversation)
            return False
        self.asked[identity] = []
        if (conversation.prompt.id, conversation.turn) in self.counted:  # the file has another text under this id
            self.counted.remove((conversation.prompt.id, conversation.turn))
            self.progress.skip(-1)
        return True

    def _counts(self, conversation: _Conversation) -> RowSummary:
        return self.report.summaries.cell(conversation.prompt.id, conversation.temperature)

    def _known(self, conversation: _Conversation) -> None:
        """The answer is in the file: this turn's own from an earlier run, or that of an equal prompt."""
        answer = self.answers[conversation.row_id]
        if (answer.source, answer.turn) == (conversation.prompt.id, conversation.turn):
            self.report.resumed_rows += 1
        else:
            self._counts(conversation).duplicates += 1
        self._skip(conversation, conversation.turn + 1)
        self._advance(conversation, answer)

    def _empty(self, conversation: _Conversation) -> None:
        """An empty answer gives no row and ends its conversation."""
        self._counts(conversation).dropped_empty += 1
        self._skip(conversation, len(conversation.prompt.turns))

    def _skip(self, conversation: _Conversation, stop: int) -> None:
        """This turn and those after it, up to `stop`, will not be asked; what was counted before is not again."""
        left = {(conversation.prompt.id, turn) for turn in range(conversation.turn, stop)}
        self.progress.skip(len(left - self.counted))
        self.counted -= left

    def _finished(self, conversation: _Conversation, result: Result, captured: tuple[Tensor, Tensor] | None) -> None:
        assert result.finish_reason is not None
        row = Row(
            id=conversation.row_id,
            source=conversation.prompt.id,
            turn=conversation.turn,
            prompt_ids=conversation.prompt_ids,
            answer_ids=result.output_ids,
            finish=result.finish_reason,
            temperature=conversation.temperature,
            prompt_hash=prompt_hash(conversation.prompt.turns[conversation.turn]),
        )
        others = self.asked.pop(row.id)
        if not self._text(row.text_ids).strip():
            self.dropped[row.id] = row.source
            for ended in (conversation, *others):
                self._empty(ended)
            return
        if self.sink is not None and captured is not None:
            self.sink.write(row, *captured)
        self.writer.append(row)
        self.answers[row.id] = answer = _Answer.of(row)
        self.report.summaries.add(row)
        self.report.new_rows += 1
        self.report.new_tokens += len(row.answer_ids)
        self.progress.row(len(row.answer_ids))
        self._advance(conversation, answer)
        for other in others:
            self._known(other)

    def _advance(self, conversation: _Conversation, answer: _Answer) -> None:
        turn = conversation.turn + 1
        if turn == len(conversation.prompt.turns):
            return
        said = {"role": "assistant", "content": self._text(answer.text_ids)}
        asked = {"role": "user", "content": conversation.prompt.turns[turn]}
        messages = [*conversation.messages, said, asked]
        self.queue.appendleft(_Conversation(conversation.prompt, turn, conversation.temperature, messages))

    def _text(self, ids: Sequence[int]) -> str:
        # Special tokens stay in: they may be the marks of a tool call or of thinking, which the template wants.
        return self.target.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

"""Long prompts in the manner of RULER V2 (docs/method.md section 6): three partitions at one exact length in tokens.

mk, multi-key retrieval: many lockers with a number each, one is asked for.
mv, multi-value retrieval: a ledger with several numbers a name, all those of one name are asked for.
qa, multi-document question answering: invented facts in documents; the answer takes two of them.

Everything is generated here from a seed. Names and numbers are drawn at random, so an answer is only to be had by
reading; the text around them is made of sentences that are put together anew each time and hold no name and no digit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from dspark.data.chat import ChatRenderer
from dspark.data.prompts import Prompt, read_prompts, write_text
from dspark.errors import DsparkError

PARTITIONS = ("mk", "mv", "qa")
LONGEST = 2**20  # tokens of a prompt unless the target's context allows fewer
VALUES = 4  # numbers a name has in the ledger of mv

_ID = re.compile(r"ruler-v2/(mk|mv|qa)/\d+")
_STEP = 0.6180339887498949  # golden ratio: the depths of any first part of the questions are spread evenly
_TRIES = 12  # times the whole prompt is counted at most
_PARAGRAPH = 7  # sentences, about
_BASE = "It was so"  # what a piece is measured behind, since tokenizers treat the start of a text in their own way


@dataclass(frozen=True)
class LongPrompt:
    """tokens: of the whole prompt as the target reads it, chat template included; answers: texts that a right answer
    contains, all of them."""

    prompt: Prompt
    partition: str
    tokens: int
    answers: tuple[str, ...]


def prompt_room(context: int, answer: int) -> int:
    """Tokens for the prompt where a target reads at most `context` and `answer` are left for what it writes.

    At most 1,048,576. Raises DsparkError when nothing is left.
    """
    if not 0 < answer < context:
        raise DsparkError("answer tokens", answer, f"must be at least 1 and below the target's context of {context}")
    return min(LONGEST, context - answer)


def partition_of(prompt_id: str) -> str | None:
    """ "mk", "mv" or "qa" for an id like ruler-v2/mk/0007, None for any other."""
    found = _ID.fullmatch(prompt_id)
    return found[1] if found else None


def span(prompts: Iterable[LongPrompt]) -> tuple[int, int]:
    """(shortest, longest) in tokens, as they really are. Raises DsparkError for none."""
    tokens = [one.tokens for one in prompts]
    if not tokens:
        raise DsparkError("prompts", 0, "need at least one")
    return min(tokens), max(tokens)


def retrieved(answers: Sequence[str], output: str) -> float:
    """Share of the answers that stand in a text, case and thousands separators aside. Raises DsparkError for none."""
    if not answers:
        raise DsparkError("answers", list(answers), "need at least one")
    text = re.sub(r"(?<=\d)[,_\u202f\u00a0 ](?=\d{3}(?!\d))", "", output).casefold()
    return fmean(bool(re.search(rf"\b{re.escape(answer.casefold())}\b", text)) for answer in answers)


def write_longcontext(
    renderer: ChatRenderer,
    tokens: int,
    per_partition: int,
    seed: int,
    partitions: Sequence[str] = PARTITIONS,
    progress: Callable[[int, int], Any] | None = None,
) -> list[LongPrompt]:
    """`per_partition` questions of each partition, ids ruler-v2/<partition>/0000 and on, partitions in turn.

    A prompt has exactly `tokens` tokens after the renderer's template. Where a tokenizer cannot make that length it
    has the closest one found below it: `LongPrompt.tokens` tells. The same arguments give the same prompts.
    progress: called with (prompts done, of how many), first with 0. A prompt of a million tokens takes some 10 s.
    Raises DsparkError for an unknown partition or one given twice, a number below 1, a length that the question and
    its facts alone exceed.
    """
    if not partitions or len(set(partitions)) != len(partitions) or not set(partitions) <= set(PARTITIONS):
        raise DsparkError("partitions", list(partitions), f"must be some of {', '.join(PARTITIONS)}, each once")
    for field, value in (("tokens", tokens), ("per_partition", per_partition)):
        if value < 1:
            raise DsparkError(field, value, "must be at least 1")
    measure = _Measure(renderer)
    total = per_partition * len(partitions)
    found: list[LongPrompt] = []
    for number in range(per_partition):
        for partition in partitions:
            if progress is not None:
                progress(len(found), total)
            rng = Random(f"{seed}/{partition}/{number}")  # a text seeds it alike on every machine
            task = _TASKS[partition](rng, tokens, (number + 0.5) * _STEP % 1)
            text, length = _fit(measure, task, tokens, rng)
            prompt = Prompt(f"ruler-v2/{partition}/{number:04d}", (text,))
            found.append(LongPrompt(prompt, partition, length, task.answers))
    if progress is not None:
        progress(total, total)
    return found


def save_longcontext(path: str | Path, prompts: Sequence[LongPrompt]) -> None:
    """Write the prompts as JSONL that `data.prompts.read_prompts` reads, answers and lengths beside it.

    `ruler-v2.jsonl` holds {"id", "turns"} a line; `ruler-v2.answers.json` holds {id: {"partition", "tokens",
    "answers", "sha256"}}, the last of the prompt. Each is written whole, under another name, and renamed.
    Raises DsparkError for no prompt.
    """
    path = Path(path)
    span(prompts)
    notes = {
        one.prompt.id: {
            "partition": one.partition,
            "tokens": one.tokens,
            "answers": list(one.answers),
            "sha256": _sha256(one.prompt),
        }
        for one in prompts
    }
    write_text(_answers_path(path), json.dumps(notes, ensure_ascii=False, indent=1) + "\n")
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:  # line by line: a million tokens are 5 MB
        for one in prompts:
            line = {"id": one.prompt.id, "turns": list(one.prompt.turns)}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


def read_longcontext(path: str | Path) -> list[LongPrompt]:
    """What `save_longcontext` wrote. Raises DsparkError when a file is missing, damaged, or not the other's."""
    path = Path(path)
    prompts, beside = read_prompts(path), _answers_path(path)
    if not beside.is_file():
        raise DsparkError("answers", str(beside), f"no such file; it is written together with {path.name}")
    try:
        notes = json.loads(beside.read_text(encoding="utf-8"))
        found = [_noted(prompt, notes[prompt.id]) for prompt in prompts]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        remedy = f"does not tell about every prompt ({type(error).__name__}: {error}); write both files again"
        raise DsparkError("answers", str(beside), remedy) from None
    return found


def _noted(prompt: Prompt, note: Mapping[str, Any]) -> LongPrompt:
    if note["sha256"] != _sha256(prompt):
        raise ValueError(f"{prompt.id} is another prompt")
    return LongPrompt(prompt, str(note["partition"]), int(note["tokens"]), tuple(map(str, note["answers"])))


def _sha256(prompt: Prompt) -> str:
    return hashlib.sha256("\0".join(prompt.turns).encode()).hexdigest()


def _answers_path(path: Path) -> Path:
    return path.with_name(path.stem + ".answers.json")


# The three tasks


@dataclass(frozen=True)
class _Task:
    """A prompt but for the text between: `facts` are (depth in [0, 1), piece), by depth."""

    opening: str
    facts: tuple[tuple[float, str], ...]
    question: str
    answers: tuple[str, ...]

    def text(self, filler: Sequence[str], ending: str) -> str:
        parts, at = [self.opening], 0
        for depth, piece in self.facts:
            until = int(depth * len(filler))
            parts += [*filler[at:until], piece]
            at = until
        return "".join([*parts, *filler[at:], ending, "\n\n", self.question])


def _count(tokens: int, each: int, most: int) -> int:
    return max(4, min(most, tokens // each))


def _spread(pieces: Sequence[str]) -> tuple[tuple[float, str], ...]:
    return tuple(((i + 0.5) / len(pieces), piece) for i, piece in enumerate(pieces))


def _multi_key(rng: Random, tokens: int, depth: float) -> _Task:
    count = _count(tokens, 256, 64)
    names, numbers = _names(rng, count), _numbers(rng, count)
    asked = int(depth * count)
    return _Task(
        "Here is a long text. Scattered through it are notes that say which number opens which locker. "
        "After the text comes a question about one of them.\n\nThe text begins here.",
        _spread([f" The locker kept for {name} opens with {number}." for name, number in zip(names, numbers)]),
        f"Question: which number opens the locker kept for {names[asked]}? Answer with the number alone.",
        (numbers[asked],),
    )


def _multi_value(rng: Random, tokens: int, depth: float) -> _Task:
    owners = max(2, _count(tokens, 256, 64) // VALUES)
    count = owners * VALUES
    names, numbers = _names(rng, owners), _numbers(rng, count)
    shift = int(depth * owners)  # slot i belongs to owner (i + shift): each name comes in every quarter of the text
    pieces = [f" One entry of the ledger for {names[(i + shift) % owners]} is {numbers[i]}." for i in range(count)]
    return _Task(
        "Here is a long text. Scattered through it are entries of a ledger, several for each name. "
        "After the text comes a question about one name.\n\nThe text begins here.",
        _spread(pieces),
        f"Question: which numbers does the ledger have for {names[0]}? There are {VALUES}; list them all.",
        tuple(number for i, number in enumerate(numbers) if (i + shift) % owners == 0),
    )


def _documents(rng: Random, tokens: int, depth: float) -> _Task:
    chains = _count(tokens, 1024, 64) // 2
    founders, houses, towns = (_names(rng, 3 * chains)[i::3] for i in range(3))
    houses = [f"{name} {rng.choice(_HOUSES)}" for name in houses]
    told = [(f"the {house}", f" The {house} was founded by {who}.") for house, who in zip(houses, founders)]
    told += [(who, f" {who} was born in the town of {town}.") for who, town in zip(founders, towns)]
    count, order = 2 * chains, list(range(2 * chains))
    rng.shuffle(order)
    # The two documents of the asked chain stand half the text apart, the first at the wanted depth.
    first = int(depth * count)
    for place, document in ((first, 0), ((first + chains) % count, chains)):
        other = order.index(document)
        order[place], order[other] = order[other], order[place]
    facts: list[tuple[float, str]] = []
    for place, document in enumerate(order):
        title, fact = told[document]
        facts += [(place / count, f"\n\nDocument {place + 1}: {title}."), ((place + 0.5) / count, fact)]
    return _Task(
        "Here are some documents. After them comes a question that they answer.",
        tuple(facts),
        f"Question: in which town was the founder of the {houses[0]} born? Answer with the name of the town alone.",
        (towns[0],),
    )


_TASKS: dict[str, Callable[[Random, int, float], _Task]] = {
    "mk": _multi_key,
    "mv": _multi_value,
    "qa": _documents,
}


# Length


class _Measure:
    """Tokens of whole prompts, exactly, and of pieces inside a text, nearly always exactly."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self._base = len(self._ids([_BASE])[0])
        # Words come first; letters and marks only fill what is left where every word takes more than one token.
        kinds = ([f" {word}" for word in _THINGS], [f" {letter}" for letter in "aeiou"], list("aeiou.,"))
        self.units = [dict(zip(kind, self.pieces(kind))) for kind in kinds]

    def prompt(self, text: str) -> int:
        return len(self.renderer.prompt_ids([{"role": "user", "content": text}]))

    def pieces(self, pieces: Sequence[str]) -> list[int]:
        return [len(ids) - self._base for ids in self._ids([_BASE + piece for piece in pieces])]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = self.renderer.tokenizer(texts, add_special_tokens=False).input_ids
        return found


def _fit(measure: _Measure, task: _Task, tokens: int, rng: Random) -> tuple[str, int]:
    """The prompt and its length: sentences by bisection on their summed cost, the last few tokens by single words;
    then the whole prompt is counted, and what that shows to be wrong is put right."""
    best = task.text([], "")
    length = measure.prompt(best)
    if length > tokens:
        remedy = f"must be at least {length}: that is what the question and its facts take with this tokenizer"
        raise DsparkError("tokens", tokens, remedy)
    room = tokens - length
    sentences: list[str] = []
    upto = [0]  # upto[i]: tokens of the first i sentences
    for _ in range(_TRIES):
        if length == tokens:
            break
        while upto[-1] <= room:
            more = [_sentence(rng) for _ in range(min((room - upto[-1]) // 12 + 16, 20_000))]
            sentences += more
            upto += [upto[-1] + cost for cost in accumulate(measure.pieces(more))]
        used = max(bisect_right(upto, room) - 1, 0)
        text = task.text(sentences[:used], _ending(measure, room - upto[used], rng))
        got = measure.prompt(text)
        if length < got <= tokens:
            best, length = text, got
        room += tokens - got
    return best, length


def _ending(measure: _Measure, cost: int, rng: Random) -> str:
    """Single words of this many tokens in all, or of as many as can be had below."""
    parts: list[str] = []
    for units in measure.units:
        while fitting := [piece for piece, one in units.items() if 0 < one <= cost]:
            parts.append(rng.choice(fitting))
            cost -= units[parts[-1]]
    return "".join(parts)


# Words. The things asked about are invented names; none of these lists holds one, and no sentence holds a digit.

_HOUSES = ("Observatory", "Library", "Theatre", "Academy", "Museum", "Hospital", "Orchestra", "Foundry", "Archive")
_ONSETS, _VOWELS, _ENDS = "bdfgklmnprstvz", "aeiou", "nrlks"
_PEOPLE = (
    "ferryman|baker|clerk|gardener|tailor|weaver|teacher|miller|porter|surveyor|cook|carpenter|shepherd|printer|"
    "sailor|painter|farmer|doctor|watchman|singer|hunter|merchant|driver|potter|librarian|smith|beekeeper|nurse"
).split("|")
_TEMPERS = (
    "patient|weary|cheerful|quiet|stubborn|young|old|careful|curious|proud|gentle|restless|sleepy|honest|clever|"
    "nervous|tall|friendly|forgetful|busy|lonely|brave|thrifty|polite|sullen|kind"
).split("|")
_DEEDS = (
    "carried|mended|painted|traded|found|sold|borrowed|polished|dropped|measured|stained|bought|lost|cleaned|moved|watched|"
    "covered|weighed|packed|lifted|described|wanted|returned|kept|repaired|opened"
).split("|")
_KINDS = (
    "heavy|small|broken|wooden|blue|empty|rusty|narrow|round|grey|warm|torn|plain|bright|hollow|green|soft|dusty|"
    "square|cracked|yellow|smooth|long|strange|cheap|pale"
).split("|")
_THINGS = (
    "basket|ladder|lamp|chair|bucket|rope|blanket|kettle|map|drum|boat|coat|barrel|mirror|bell|cart|clock|table|plate|"
    "door|stone|hammer|letter|window|bottle|box|wheel|book|knife|hat|shoe|fence|flag|brush|spoon|candle|net|stove"
).split("|")
_PLACES = (
    "past the mill|near the harbour|behind the church|across the bridge|under the old oak|beside the river|"
    "outside the inn|along the wall|at the edge of the field|by the well|through the orchard|above the stable|"
    "in the courtyard|on the north road|at the market|below the hill|over the meadow|inside the barn"
).split("|")
_TIMES = (
    "before dawn|in the evening|after the rain|on the first cold day|during the harvest|late in spring|at noon|"
    "while the others slept|when the wind turned|long after supper|one winter|as the bells rang|all morning|"
    "once the snow had gone|in the dry season|on a market day|toward midnight|for a whole week"
).split("|")
_CLAUSES = (
    "nobody asked why|the neighbours said nothing|it made little difference|everyone had expected it|"
    "that was the custom there|the road stayed empty|no one remembered it later|the dog barked twice|"
    "it cost less than they feared|the fire had gone out|they spoke of it for years|the children laughed"
).split("|")


def _sentence(rng: Random) -> str:
    pick = rng.choice
    who, other = f"the {pick(_TEMPERS)} {pick(_PEOPLE)}", f"the {pick(_PEOPLE)}"
    thing, second = f"{pick(_KINDS)} {pick(_THINGS)}", pick(_THINGS)
    deed, place, time = pick(_DEEDS), pick(_PLACES), pick(_TIMES)
    form = rng.randrange(7)
    if form == 0:
        text = f"{who} {deed} the {thing} {place} {time}."
    elif form == 1:
        text = f"{time}, {who} {deed} that {thing} {place}."
    elif form == 2:
        text = f"{who} {deed} the {thing} for {other}, and {pick(_CLAUSES)}."
    elif form == 3:
        text = f"{time} {other} {deed} the {second} {place}; {who} {pick(_DEEDS)} the {thing}."
    elif form == 4:
        text = f"{place} stood the {thing} which {who} had once {deed} {time}."
    elif form == 5:
        text = f"since {other} {deed} the {second}, {who} {pick(_DEEDS)} the {thing} {time}."
    else:
        text = f"{pick(_CLAUSES)}, although {who} {deed} the {thing} {place}."
    return ("\n\n" if rng.randrange(_PARAGRAPH) == 0 else " ") + text[0].upper() + text[1:]


def _names(rng: Random, count: int) -> list[str]:
    """Different invented names, seven letters each, so that none is part of another."""
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(3))
        found[(syllables + rng.choice(_ENDS)).capitalize()] = None
    return list(found)


def _numbers(rng: Random, count: int) -> list[str]:
    """Different numbers of seven digits."""
    return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), count)]

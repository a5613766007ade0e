"""The draft's reduced vocabulary: which K of the target's V ids it can propose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from dspark.data.rows import Row
from dspark.errors import DsparkError


def choose_draft_vocabulary(
    rows: Sequence[Row],
    size: int,
    vocab_size: int,
    stop_ids: Iterable[int],
    say: Callable[[str], None] = lambda _: None,
    texts: Iterable[Sequence[int]] = (),
) -> list[int]:
    """The stop ids and the most frequent ids of the answers (ties by id), sorted, exactly `size` of them.

    When the answers hold fewer distinct ids, the ids of the rows' prompts and of `texts` (token sequences of the same
    kind of text) fill up by frequency, since answers take words from prompts; after them the lowest unused ids
    (tokenizers number frequent tokens first), and `say` is told. Raises DsparkError without rows or when the size
    cannot be met.
    """
    stops = sorted(set(stop_ids))
    if not 0 < size <= vocab_size or len(stops) > size:
        raise DsparkError(
            "draft.draft_vocab_size", size, f"must hold {len(stops)} stop ids and be at most {vocab_size}"
        )
    counts = Counter(token for row in rows for token in row.answer_ids)
    if not counts:
        raise DsparkError("data.rows", len(rows), "a reduced vocabulary needs answers to count; give rows")
    if max(counts) >= vocab_size:
        raise DsparkError("data.rows", max(counts), f"token id outside the target's vocabulary of {vocab_size}")
    around = Counter(token for row in rows for token in row.prompt_ids)
    for text in texts:
        around.update(text)
    kept = dict.fromkeys(stops)
    _fill(kept, size, _by_frequency(counts))
    seen = len(kept)
    _fill(kept, size, _by_frequency(around))
    near = len(kept) - seen
    _fill(kept, size, range(vocab_size))
    covered = sum(counts[token] for token in kept) / counts.total()
    say(
        f"draft vocabulary: {size} of {vocab_size} ids cover {covered:.2%} of {counts.total():,} answer tokens"
        + (f"; to the {seen} that occur come {near} of prompts and {size - seen - near} low ids" if seen < size else "")
    )
    return sorted(kept)


def _by_frequency(counts: Counter[int]) -> list[int]:
    return [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def _fill(kept: dict[int, None], size: int, tokens: Iterable[int]) -> None:
    for token in tokens:
        if len(kept) == size:
            return
        kept.setdefault(token)

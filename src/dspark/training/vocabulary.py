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
) -> list[int]:
    """The stop ids and the most frequent ids of the answers (ties by id), sorted, exactly `size` of them.

    When the answers hold fewer distinct ids, the lowest unused ids fill up (tokenizers number frequent tokens first),
    and `say` is told. Raises DsparkError without rows or when the size cannot be met.
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
    kept = dict.fromkeys(stops)
    for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(kept) == size:
            break
        kept.setdefault(token)
    seen = len(kept)
    for token in range(vocab_size):
        if len(kept) == size:
            break
        kept.setdefault(token)
    covered = sum(counts[token] for token in kept) / counts.total()
    say(
        f"draft vocabulary: {size} of {vocab_size} ids cover {covered:.2%} of {counts.total():,} answer tokens"
        + (f"; {size - seen} unused low ids fill up the {seen} that occur" if seen < size else "")
    )
    return sorted(kept)

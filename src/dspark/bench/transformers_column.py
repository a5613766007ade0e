"""Transformers' own DFlash generation as one more column: a cross-check of our engine, and a peer."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.bench.contenders import Asked, BenchSettings, Captured
from dspark.bench.report import Drafter
from dspark.bench.samples import Sample
from dspark.bench.served import Parting
from dspark.bench.transformers_dflash import TransformersDFlash, load_assistant, load_model, round_differences
from dspark.checkpoints.zlab import export_zlab, over_whole_vocabulary
from dspark.data.rows import Row, detect_loop
from dspark.decoding.request import Round, SamplingSettings
from dspark.decoding.text import decode
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.base import Target


def transformers_columns(target: Target, draft: DSparkDraft, of: Drafter, name: str) -> list[TransformersColumn]:
    """Transformers' plain decoding, and its DFlash generation with this draft, which the column `of` runs here.

    Raises DsparkError for another kind of draft, and for what its form cannot say.
    """
    config = draft.config
    if of.kind != "dflash" or config.sample_from_anchor:
        remedy = "must be a DFlash draft in the bonus-anchor layout, the one that Transformers decodes with"
        raise DsparkError("transformers", name, remedy)
    model: Any = load_model(target.name)
    with tempfile.TemporaryDirectory() as folder:
        export_zlab(over_whole_vocabulary(draft) if config.reduced else draft, Path(folder) / "draft")
        assistant = load_assistant(Path(folder) / "draft", model)
    ids = draft.draft_ids if config.reduced else None
    plain = Drafter(name="plain in Transformers", kind="transformers", n=0)
    drafter = of.model_copy(
        update={"name": f"{name} in Transformers n = {config.gamma}", "kind": "transformers-dflash"}
    )
    return [
        TransformersColumn(plain, target, TransformersDFlash(model, None, target.stop_ids), plain.name),
        TransformersColumn(drafter, target, TransformersDFlash(model, assistant, target.stop_ids, ids), of.name),
    ]


class TransformersColumn:
    """A DFlash draft, or none, in Transformers' own generation: greedy, one request at a time, always gamma tokens a
    round. Its speed is told over our plain decoding like everybody's.

    replayed_as: the column of the same draft and width in our engine, with whose rounds its own are compared.
    """

    def __init__(self, drafter: Drafter, target: Target, generator: TransformersDFlash, replayed_as: str) -> None:
        self.drafter, self.replayed_as = drafter, replayed_as
        self.known: frozenset[str] | None = None
        self._target, self._generator = target, generator

    @property
    def taps(self) -> tuple[int, ...]:
        """None: it is never replayed."""
        return ()

    def able(self, batch: int, settings: BenchSettings) -> bool:
        """See `Contender`."""
        return batch == 1 and settings.sampling.greedy

    def replay(self, rows: Sequence[Captured], sampling: SamplingSettings) -> list[list[Round]] | None:
        """See `Contender`."""
        return None

    def parting(self, row: Row, served: Sequence[Round], walked: Sequence[Round]) -> Parting | None:
        """See `Contender`. That Transformers drafts nothing for the last token before the limit is no parting."""
        for one in round_differences(served, walked):
            if not one.explained:
                return Parting(self.drafter.name, row.id, one.number, one.theirs, one.ours, None, False)
        return None

    def timed(self, asked: Sequence[Asked], batch: int, settings: BenchSettings) -> list[Sample]:
        """See `Contender`. It tells when the first token came and when all had, nothing between."""
        samples = []
        for one in asked:
            made = self._generator.generate(one.ids, settings.max_tokens)
            ids = made.output_ids
            text_ids = ids[:-1] if made.finish_reason == "stop" else ids
            samples.append(
                Sample(
                    "",
                    one.question,
                    self.drafter.name,
                    "served",
                    one.turn,
                    prompt_tokens=len(one.ids),
                    output_tokens=len(ids),
                    output_ids=ids,
                    finish=made.finish_reason,
                    looping=detect_loop(text_ids),
                    rounds=made.rounds,
                    seconds=made.seconds,
                    group_seconds=made.seconds,
                    arrivals=[(made.first_seconds, 1), (made.seconds, len(ids) - 1)],
                    streamed=False,
                    text=decode(self._target.tokenizer, text_ids),
                )
            )
        return samples

"""Transformers' own DFlash assisted generation, on the same draft and target, to hold our engine's figures against.

A target as Transformers loads it (its own attention, nothing packed) and a draft that `checkpoints.zlab.export_zlab`
wrote. Greedy, batch 1. What is observed, at Transformers' `CandidateGenerator` boundary: the candidates of each round
(`get_candidates`) and the ids after it (`update_candidate_strategy`). The generator is wrapped where the model hands it
out, `_get_candidate_generator`: the one private name here, of the one Transformers release that is allowed.

How its rounds relate to ours at n = gamma, for the same draft:
- Its block is always block_size slots, so it proposes gamma tokens each round and verifies all of them; ours too.
- When one token is left before the limit it drafts nothing: its last round is (0, 0, 0) where ours is (gamma, gamma, 0
  or 1).
- A round cut by a stop id or the limit counts only what was kept, here as there.
- It always drafts with the target's whole head. `draft_ids` confines it to a reduced draft vocabulary, by adding minus
  infinity to the logits of all other tokens; the time of the whole head stays.
- It knows the target's own head only. A native folder may carry head rows of its own, rounded to BF16: that is another
  draft, near ties fall otherwise. Set `own_head_rows` to None in ours to compare like with like.
- It takes its tokens from float32 logits of other kernels than ours, so exact ties, and only they, may fall otherwise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, MuseGlimmerAssistantModel
from transformers.generation import BaseStreamer, CandidateGenerator

from dspark.checkpoints.zlab import TRANSFORMERS_TYPE
from dspark.decoding.request import Round
from dspark.errors import DsparkError
from dspark.targets.cache import ATTENTION_NAME
from dspark.targets.embedded import EMBEDDED, ensure_embedded


@dataclass
class Generated:
    """One prompt's greedy answer.

    output_ids: without the prompt, with the stop id; rounds: one for each draft pass and its verification, the prefill
    is none; seconds: wall clock of the whole call; first_seconds: of which up to the first token (the prefill).
    """

    output_ids: list[int]
    finish_reason: Literal["stop", "length"]
    rounds: list[Round]
    seconds: float
    first_seconds: float


@dataclass(frozen=True)
class RoundDifference:
    """Round `number` (from 1) of an answer in Transformers and in our engine, None where there was none.

    explained: Transformers does not draft for the last token before the limit, and that is all.
    """

    number: int
    theirs: Round | None
    ours: Round | None
    explained: bool


def load_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The target as Transformers runs it: a folder, a hub name or `embedded:smollm2-135m`. Raises DsparkError."""
    source = str(ensure_embedded()) if name == EMBEDDED else name
    try:
        model, report = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise DsparkError("target", name, f"cannot be loaded ({error})") from error
    if missing := sorted(report["missing_keys"]):  # Transformers makes these up and only warns
        remedy = f"its weights lack {len(missing)} tensors, {missing[0]} among them; get the whole model"
        raise DsparkError("target", name, remedy)
    return model.eval()


def load_assistant(folder: str | Path, model: Any) -> Any:
    """The draft that `export_zlab` wrote (form "transformers"), in the dtype of the target `model`.

    Raises DsparkError when the folder holds another form, its tensors are not exactly the model's (Transformers would
    invent the missing ones and warn), it was made for another target, or the target changes its token embeddings.
    """
    path = Path(folder) / "config.json"
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise DsparkError("draft", str(folder), f"has no readable config.json ({error}); export the draft") from None
    if kind != TRANSFORMERS_TYPE:
        remedy = f"must be {TRANSFORMERS_TYPE}, the one DFlash model of Transformers: export the draft in that form"
        raise DsparkError("model_type", kind, remedy)
    try:
        assistant, report = MuseGlimmerAssistantModel.from_pretrained(
            folder, dtype=model.dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise DsparkError("draft", str(folder), f"cannot be loaded ({error}); export it again") from None
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(str(name) for name in report.get(fault) or ()):
            remedy = f"its tensors do not fit its config: {fault.replace('_', ' ')} {', '.join(names[:4])}"
            raise DsparkError("draft", str(folder), remedy)
    _check_pair(assistant.config, model.config.get_text_config())
    _check_embedding(model)
    return assistant.to(model.device).eval()


def _check_pair(draft: Any, target: Any) -> None:
    """Raises DsparkError when the draft was made for another target."""
    for mine, theirs in (
        ("num_target_layers", "num_hidden_layers"),
        ("hidden_size", "hidden_size"),
        ("vocab_size", "vocab_size"),
    ):
        stated, found = getattr(draft, mine, None), getattr(target, theirs)
        if stated != found:
            raise DsparkError(mine, stated, f"this target has {found}; use a draft exported for it")
    if max(draft.target_layer_ids) >= target.num_hidden_layers - 1:
        last = target.num_hidden_layers - 1
        raise DsparkError("target_layer_ids", draft.target_layer_ids, f"must be below the target's last layer, {last}")


def _check_embedding(model: Any) -> None:
    """Raises DsparkError when the target scales its token embeddings: Transformers' DFlash reads them scaled, and our
    drafts are trained on the table's rows, so the two would not draft the same. (It leaves out a norm after them.)"""
    table = model.get_input_embeddings()
    ids = torch.arange(8, device=table.weight.device)
    if getattr(table, "embed_norm", None) is None and not torch.equal(table(ids), table.weight[ids]):
        remedy = "scales its token embeddings, and Transformers would give them scaled to a draft trained without"
        raise DsparkError("target", type(model).__name__, remedy)


class TransformersDFlash:
    """A target and, unless it is None, a DFlash draft for it, both as Transformers runs them.

    stop_ids: what ends an answer (None: the target's own); draft_ids: target ids the draft is confined to, ascending
    (None: all). Raises DsparkError for a model that our engine has taken over.
    """

    def __init__(
        self,
        model: Any,
        assistant: Any | None,
        stop_ids: Sequence[int] | frozenset[int] | None = None,
        draft_ids: Tensor | None = None,
    ) -> None:
        if model.config.get_text_config()._attn_implementation == ATTENTION_NAME:
            raise DsparkError(
                "model", type(model).__name__, "runs our engine's attention; load it anew for Transformers"
            )
        own = model.generation_config.eos_token_id
        if stop_ids is None:
            stop_ids = [] if own is None else [own] if isinstance(own, int) else own
        self.model, self.assistant, self.stop_ids = model, assistant, sorted(stop_ids)
        self.head: nn.Module | None = None
        if draft_ids is not None:
            self.head = _Confined(model.get_output_embeddings(), draft_ids)

    def generate(self, prompt_ids: Sequence[int], max_tokens: int) -> Generated:
        """Answer one prompt greedily with at most max_tokens tokens; plainly when there is no draft.

        The limit is also the target's context. Raises DsparkError for an empty prompt, no room or max_tokens < 1.
        """
        context = self.model.config.get_text_config().max_position_embeddings
        if not 0 < len(prompt_ids) < context:
            raise DsparkError("prompt_ids", len(prompt_ids), f"must be 1..{context - 1} tokens")
        if max_tokens < 1:
            raise DsparkError("max_tokens", max_tokens, "must be at least 1")
        ids = torch.tensor([list(prompt_ids)], dtype=torch.int64, device=self.model.device)
        settings = GenerationConfig(
            max_new_tokens=min(max_tokens, context - len(prompt_ids)),
            do_sample=False,
            eos_token_id=self.stop_ids or None,
            pad_token_id=self.stop_ids[0] if self.stop_ids else 0,
            speculation_type=None if self.assistant is None else "dflash",
        )
        clock = _Clock()
        with _watched(self.model, self.head) as rounds:
            clock.start()
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                assistant_model=self.assistant,
                streamer=clock,
            )
            seconds = clock.elapsed()
        answer = out[0, len(prompt_ids) :].tolist()
        stopped = answer[-1] in self.stop_ids
        return Generated(answer, "stop" if stopped else "length", rounds, seconds, clock.first)


def round_differences(theirs: Sequence[Round], ours: Sequence[Round]) -> list[RoundDifference]:
    """Where the rounds of one speculated answer differ, Transformers' and ours, asked for as many tokens."""
    found = []
    for index in range(max(len(theirs), len(ours))):
        a, b = (rounds[index] if index < len(rounds) else None for rounds in (theirs, ours))
        if a != b:
            last = index + 1 == len(theirs) == len(ours)
            found.append(RoundDifference(index + 1, a, b, explained=last and a == Round(0, 0, 0)))
    return found


@dataclass
class _Watched(CandidateGenerator):
    """A candidate generator that answers as `inner` does, and notes what came of its candidates."""

    inner: Any
    rounds: list[Round] = field(default_factory=list)
    length: int = 0
    candidates: list[int] | None = None

    @property
    def requires_model_outputs(self) -> bool:
        return bool(self.inner.requires_model_outputs)

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        return dict(self.inner.model_kwargs_overrides)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        ids, logits = self.inner.get_candidates(input_ids, **kwargs)
        self.length = input_ids.shape[1]
        self.candidates = None if kwargs.get("is_first_iteration") else ids[0, self.length :].tolist()
        return ids, logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """input_ids: with what this round added, so what was kept of the candidates can be read off."""
        if self.candidates is not None:
            added = input_ids[0, self.length :].tolist()
            same = [a == b for a, b in zip(added, self.candidates)]
            accepted = same.index(False) if False in same else len(same)
            self.rounds.append(Round(len(self.candidates), len(self.candidates), accepted))
        self.inner.update_candidate_strategy(input_ids, scores, num_matches)


class _Confined(nn.Module):
    """The target's head for a draft that knows K of its tokens: [..., d] -> [..., V], the others at minus infinity."""

    def __init__(self, head: Any, ids: Tensor) -> None:
        super().__init__()
        self.head, self.weight = head, head.weight
        outside = torch.full((head.weight.shape[0],), float("-inf"), device=head.weight.device)
        outside[ids.to(outside.device)] = 0.0
        self.outside = outside

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(hidden) + self.outside.to(hidden.dtype)


class _Clock(BaseStreamer):
    """Notes when the first token came; `generate` hands the prompt over first, and then what each round added."""

    def start(self) -> None:
        self.began, self.calls, self.first = time.perf_counter(), 0, 0.0

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first = self.elapsed()

    def end(self) -> None:
        return None


@contextmanager
def _watched(model: Any, head: nn.Module | None) -> Iterator[list[Round]]:
    """While it is open, `model` hands out watched candidate generators, whose rounds appear in the yielded list.

    The model's own generation settings (a repetition penalty, sampling) are set aside: greedy is the argmax here.
    """
    rounds: list[Round] = []
    make: Callable[..., Any] = model._get_candidate_generator

    def watched(**kwargs: Any) -> _Watched:
        generator = make(**kwargs)
        if head is not None:
            generator.main_model_output_embeddings = head
        return _Watched(generator, rounds)

    settings, model.generation_config = model.generation_config, GenerationConfig()
    model._get_candidate_generator = watched
    try:
        yield rounds
    finally:
        del model._get_candidate_generator
        model.generation_config = settings

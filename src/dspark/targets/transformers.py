"""Any Hugging Face causal LM as a target: ragged passes, taps by hooks, the head."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from dspark.errors import DsparkError
from dspark.targets.base import TargetOutput, TargetState
from dspark.targets.cache import ATTENTION_NAME, RaggedCache, RequestCache, ragged_attention
from dspark.targets.compiled import CompiledDecoder, compiled
from dspark.targets.embedded import EMBEDDED, ensure_embedded
from dspark.targets.packed import Storage, pack_linears, weight_bytes

ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ragged_attention)
transformers_logging.disable_progress_bar()  # its bars would break up ours

HUB_SECONDS = 5.0
"""Time in which the hub must answer when it is asked for a model for the first time."""
_NO_HUB = (
    f"is neither a folder nor in the local cache, and the hub could not be reached; give a model folder or {EMBEDDED}"
)


def load_target(
    name_or_path: str, dtype: torch.dtype = torch.float32, packed: bool = True, storage: Storage | None = None
) -> TransformersTarget:
    """Load a causal LM from a folder, a hub name or `embedded:smollm2-135m`.

    packed: pre-pack the linear layers where that helps (float32 on a CPU); storage: how (None: the smallest way that
    holds every weight exactly; the others round them, which makes another target). Packed weights are read once, here:
    give packed=False to change them afterwards.
    Raises DsparkError when there is no such model, its files cannot be read, or its weights cannot be stored so.
    """
    with _loading(name_or_path) as source:
        config = AutoConfig.from_pretrained(source)
        model, report = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source)
    if missing := sorted(report["missing_keys"]):  # Transformers makes these up and only warns
        remedy = f"its weights lack {len(missing)} tensors, {missing[0]} among them; get the whole model"
        raise DsparkError("target", name_or_path, remedy)
    return TransformersTarget(name_or_path, model, tokenizer, packed, storage)


def load_tokenizer(name_or_path: str) -> Any:
    """A target's tokenizer without its weights. Raises DsparkError."""
    with _loading(name_or_path) as source:
        return AutoTokenizer.from_pretrained(source)


@contextmanager
def _loading(name: str) -> Iterator[str]:
    """Where to load a target from; what goes wrong there becomes a DsparkError."""
    source = str(ensure_embedded()) if name == EMBEDDED else name
    if name.startswith("embedded") and name != EMBEDDED:
        raise DsparkError("target", name, f"is not an embedded target; there is {EMBEDDED}")
    if _looks_like_folder(source) and not Path(source).is_dir():
        raise DsparkError("target", name, "no such folder; give a model folder, a hub name or " + EMBEDDED)
    if not Path(source).is_dir():
        _ask_hub(name)
    try:
        yield source
    except Exception as error:  # Transformers, safetensors and the hub each raise their own kinds
        remedy = f"cannot be loaded ({_first_line(error)})"
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            remedy = _NO_HUB
        raise DsparkError("target", name, remedy) from error


def _ask_hub(name: str) -> None:
    """Raises DsparkError when `name` is not in the cache and no hub answers; Transformers would ask six times, in
    half a minute. What the hub has to say about the name is left to Transformers."""
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_SECONDS)
    except (HfHubHTTPError, ValueError):  # it answers, or the name cannot be one
        return
    except Exception as error:  # whatever its HTTP library raises
        raise DsparkError("target", name, _NO_HUB) from error


def _looks_like_folder(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


class TransformersTarget:
    """See `targets/base.py:Target`. The model is frozen and in eval mode."""

    def __init__(
        self, name: str, model: Any, tokenizer: Any, packed: bool = True, storage: Storage | None = None
    ) -> None:
        config = model.config.get_text_config()
        _check_supported(name, config)
        self.name, self.model, self.tokenizer, self.config = name, model.eval().requires_grad_(False), tokenizer, config
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.max_context: int = config.max_position_embeddings
        self.dtype: torch.dtype = model.dtype
        self.stop_ids = _stop_ids(model, tokenizer)
        self._decoder = _find_decoder(model)
        if len(self._decoder.layers) < self.num_layers:
            raise DsparkError("target", name, f"its config says {self.num_layers} layers, its decoder has fewer")
        self.embedding_weight: Tensor = model.get_input_embeddings().weight
        self.head_weight: Tensor = model.get_output_embeddings().weight
        self._head_module = model.get_output_embeddings()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._logit_scale = _logit_scale(config)
        model.set_attn_implementation(ATTENTION_NAME)
        self._compiled = self._pack(storage) if packed else None
        self._head_part: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._taken: dict[int, Tensor] = {}
        self._wanted: frozenset[int] = frozenset()
        for index, layer in enumerate(self._decoder.layers):
            layer.register_forward_hook(self._tap_hook(index))

    def _pack(self, storage: Storage | None) -> CompiledDecoder | None:
        """Pack the weights: as one compiled pass where the kernels know such a model, else each linear layer."""
        plain = self._softcap is None and self._logit_scale == 1.0
        found = compiled(self._decoder, self._head_module, storage) if plain else None
        if found is not None:
            self._head_module = found.head
        elif not pack_linears(self.model, storage) and storage is not None:
            raise DsparkError("storage", storage, "linear layers cannot be packed so on this machine")
        else:
            self._head_module = self.model.get_output_embeddings()
        self.head_weight = self._head_module.weight
        return found

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads, as they are stored."""
        return weight_bytes(self.model) if self._compiled is None else self._compiled.weight_bytes

    def _tap_hook(self, index: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if index in self._wanted:
                self._taken[index] = output[0] if isinstance(output, tuple) else output

        return hook

    def embed(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., d]."""
        return self.model.get_input_embeddings()(ids)

    @torch.no_grad()
    def head(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """head(final_norm(hidden)), logit scale and softcap included: [..., d] pre-norm -> [..., V] or [..., rows]."""
        normed = self._decoder.norm(hidden.to(self.dtype))
        if rows is None:
            return self._finish(self._head_module(normed))
        if self._head_part is None or not torch.equal(self._head_part[0], rows):  # a run asks for the same ones always
            bias = getattr(self._head_module, "bias", None)
            self._head_part = rows, self.head_weight[rows], None if bias is None else bias[rows]
        return self._finish(nn.functional.linear(normed, *self._head_part[1:]))

    def _finish(self, logits: Tensor) -> Tensor:
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def check_taps(self, taps: Sequence[int]) -> None:
        """Raises DsparkError naming the first layer id this target does not have."""
        for tap in taps:
            if not 0 <= tap < self.num_layers:
                raise DsparkError("target_layer_ids", tap, f"{self.name} has layers 0..{self.num_layers - 1}")

    @property
    def bytes_per_token(self) -> int:
        """K and V of every layer and K/V head, in the target's dtype."""
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * self.num_layers * heads * width * self.dtype.itemsize)

    def new_state(self, capacity: int) -> RequestCache:
        """Room for `capacity` tokens of one request. Raises DsparkError past the target's context."""
        if capacity > self.max_context:
            raise DsparkError("capacity", capacity, f"{self.name} has a context of {self.max_context} tokens")
        state = RequestCache(self.num_layers, capacity)
        if self._compiled is not None:
            self._compiled.allocate(state)
        return state

    @torch.no_grad()
    def forward(
        self,
        batch: Sequence[tuple[TargetState, Tensor]],
        taps: Sequence[int] = (),
        logits: Literal["all", "last", "none"] | Sequence[int] = "all",
    ) -> TargetOutput:
        """One ragged pass; see `targets/base.py`. Raises DsparkError on an unknown tap or a full cache."""
        self.check_taps(taps)
        ragged = RaggedCache([(state, len(ids)) for state, ids in batch])  # type: ignore[misc]
        ids = torch.cat([ids for _, ids in batch])[None]
        if self._compiled is not None:
            return self._forward_compiled(self._compiled, ids[0], ragged, taps, logits)
        last_layer = self.num_layers - 1
        self._wanted, self._taken = frozenset([*taps, last_layer]), {}
        try:
            normed = self._decoder(
                input_ids=ids,
                position_ids=ragged.positions(ids.device),
                cache=ragged,
                use_cache=True,
                ragged=ragged,
            ).last_hidden_state[0]
        finally:
            taken, self._wanted, self._taken = self._taken, frozenset(), {}
        ragged.commit()
        if logits != "all":
            normed = normed[_last_rows(ragged.counts, logits)]
        scores = self._finish(self._head_module(normed)) if len(normed) else normed.new_empty(0, self.vocab_size)
        tapped = torch.cat([taken[tap][0] for tap in taps], dim=-1) if taps else None
        return TargetOutput(scores, tapped, taken[last_layer][0])

    def _forward_compiled(
        self,
        decoder: CompiledDecoder,
        ids: Tensor,
        ragged: RaggedCache,
        taps: Sequence[int],
        logits: Literal["all", "last", "none"] | Sequence[int],
    ) -> TargetOutput:
        x = self.embed(ids)
        tapped = decoder.forward(x, ragged, taps)
        ragged.commit()
        chosen = torch.arange(len(x)) if logits == "all" else _last_rows(ragged.counts, logits)
        scores, best = decoder.logits(x, chosen)
        return TargetOutput(scores, tapped, x, best.tolist())


def _last_rows(counts: Sequence[int], wanted: Literal["last", "none"] | Sequence[int]) -> Tensor:
    """Flat indices of the last rows of each request: one, none, or as many as `wanted` says."""
    if isinstance(wanted, str):
        wanted = [1 if wanted == "last" else 0] * len(counts)
    ends = itertools.accumulate(counts)
    return torch.tensor(
        [row for end, n in zip(ends, wanted, strict=True) for row in range(end - n, end)], dtype=torch.int64
    )


def _check_supported(name: str, config: Any) -> None:
    """Raises DsparkError for a model without a context length, or with layers that keep no K/V of every token."""
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise DsparkError("target", name, f"its config ({config.model_type}) has no max_position_embeddings")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise DsparkError("target", name, f"has {kind} layers; only full and sliding attention can be run here")


def _find_decoder(model: Any) -> Any:
    """The module with `layers`, `norm` and the token embedding (inside wrappers of multimodal models too)."""
    for module in model.modules():
        if hasattr(module, "layers") and hasattr(module, "norm") and hasattr(module, "embed_tokens"):
            return module
    raise DsparkError("target", type(model).__name__, "no decoder with layers, norm and embed_tokens was found in it")


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    ids = [getattr(generation, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    flat = [i for entry in ids for i in (entry if isinstance(entry, list | tuple) else [entry])]
    return frozenset(i for i in flat if i is not None)


def _logit_scale(config: Any) -> float:
    """Cohere multiplies logits by `logit_scale`; Granite divides them by `logits_scaling`."""
    if getattr(config, "logit_scale", None) is not None:
        return float(config.logit_scale)
    return 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)

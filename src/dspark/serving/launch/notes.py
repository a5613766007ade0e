"""What to know of a command before it runs: each engine's known caveats, as read from the version named in its file."""

from __future__ import annotations

from collections.abc import Iterator

from dspark.calibration.export import COSTS_FLAG, TEMPERATURES_FLAG
from dspark.drafts.config import DraftConfig
from dspark.drafts.kinds import Config
from dspark.serving.launch.command import MODE, Command
from dspark.serving.launch.engines import Engine
from dspark.serving.launch.flags import CONTEXT, DCP, PARALLEL, context_of, number


def notes(
    engine: Engine, command: Command, config: Config | None, exported: bool = False, calibrated: bool = False
) -> list[str]:
    """One line each. exported: whether files of a calibration were given; calibrated: whether the draft has one."""
    own = {"vllm": _vllm, "sglang": _sglang, "llamacpp": _llamacpp}[engine.key]
    lost = f"is not in {engine.name} {engine.version} and is left out of the published command"
    return [
        *(f"--{name} {lost}" for name in command.dropped),
        *_context(engine, command, config),
        *own(command, config),
        *_calibration(engine, command, exported, calibrated),
    ]


def _context(engine: Engine, command: Command, config: Config | None) -> Iterator[str]:
    flag = CONTEXT[engine.key]
    context = context_of(engine, command.flags)
    if config is None:
        yield f"the draft's config is not here, so nothing of it was checked; keep --{flag} within its trained length"
        return
    trained, rope = config.training_length, config.rope_parameters
    if context is None:
        yield f"without --{flag} {engine.name} goes as far as the target; the draft was trained to {trained:,}"
    elif context > trained:
        yield f"--{flag} {context}: beyond the {trained:,} tokens it was trained on a draft is accepted less often"
    if rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings", 0)
        yield (
            f"the draft stretches its positions itself (YaRN, {rope.get('factor')} x {original:,} = "
            f"{config.max_position_embeddings:,}, in its config): no override is needed, nor one for the target meant"
        )


def _vllm(command: Command, config: Config | None) -> Iterator[str]:
    flags = command.flags
    speculation = flags.get("speculative-config", {})
    if isinstance(config, DraftConfig) and not config.sample_from_anchor:
        yield (
            "num_speculative_tokens is always given: without it vLLM takes the file's block_size, in this bonus-anchor "
            "file one more than the draft predicts"
        )
    if (number("tp", flags.get(PARALLEL["vllm"])) or 1) > 1:
        yield (
            "fuse_allreduce_rms is off: vLLM turns it on where TP > 1 on Hopper and Blackwell, and capturing CUDA "
            "graphs can then end in FlashInfer's all-reduce workspace size error"
        )
    yield (
        "should the draft fail in FlashAttention 3 on Hopper, choose another attention_backend in --speculative-config"
    )
    if not speculation.get("enable_adaptive_verification") and _has_confidence(config):
        yield (
            "the draft's confidence head is not used; --adaptive turns on vLLM's adaptive verification, which needs "
            "full CUDA graphs"
        )


def _sglang(command: Command, config: Config | None) -> Iterator[str]:
    flags = command.flags
    adaptive = command.environment.get(MODE) is not None
    if (number(DCP, flags.get(DCP)) or 1) > 1:
        yield (
            f"decode context parallelism: {MODE} must stay at static (Kimi-K3 refuses anything else), so a confidence "
            "head is not used"
        )
    elif not adaptive and _has_confidence(config):
        yield f"{MODE} is static unless set: the confidence head is not used; --adaptive sets compact"
    if adaptive and COSTS_FLAG not in flags:
        yield f"without --exported, or --flag {COSTS_FLAG}=FILE (a cost table), compact still verifies every token"
    if "max-running-requests" not in flags and flags["speculative-algorithm"] == "DSPARK":
        yield "without --flag max-running-requests=N SGLang sets it to 48"


def _llamacpp(command: Command, config: Config | None) -> Iterator[str]:
    yield "spec-draft-n-max is always given: llama.cpp's own is 3"
    yield "a draft that does not load only logs a line and answers come plain: look for draft_n in their timings"
    yield "llama.cpp drafts greedily: at a temperature fewer of its tokens are accepted"


def _calibration(engine: Engine, command: Command, exported: bool, calibrated: bool) -> Iterator[str]:
    """What becomes of temperatures and costs."""
    if engine.key == "vllm" and exported:
        yield "vLLM has no place for temperatures and measures its own costs: of the exported folder nothing is used"
    if engine.key != "sglang":
        return
    if exported and MODE not in command.environment:
        yield f"{MODE} is static unless set: temperatures and costs are passed, and not used; --adaptive sets compact"
    if COSTS_FLAG in command.flags:
        yield "costs are of one engine on one machine: a table measured elsewhere schedules wrongly, never incorrectly"
    if calibrated and MODE in command.environment and TEMPERATURES_FLAG not in command.flags:
        yield (
            "the draft's temperatures are not passed: dspark calibrate --draft DRAFT --export sglang --export-out DIR, "
            "then --exported DIR"
        )


def _has_confidence(config: Config | None) -> bool:
    return isinstance(config, DraftConfig) and config.enable_confidence_head

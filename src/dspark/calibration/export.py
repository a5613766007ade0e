"""What other engines read of a calibration and a cost profile: SGLang 0.5.23's two files, vLLM 0.32's setting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from dspark.calibration.cost import CostProfile
from dspark.calibration.stored import Calibration
from dspark.data.prompts import write_text
from dspark.errors import DsparkError

Engine = Literal["sglang", "vllm"]
TEMPERATURES_FLAG, COSTS_FLAG = "speculative-dspark-confidence-sts-path", "speculative-dspark-sps-table-path"
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Temperatures(BaseModel):
    """SGLang's file: one temperature a slot, what they were fitted on, and the ECE of each slot before and after."""

    temperatures: Annotated[list[Positive], Field(min_length=1)]
    dataset: str = ""
    num_samples: int = 0
    ece_before: list[FiniteFloat] = []
    ece_after: list[FiniteFloat] = []


class CostTable(BaseModel):
    """SGLang's file: steps a second at numbers of tokens in the batch."""

    sample_batch_tokens: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    sample_steps_per_sec: list[Positive]
    max_batch_tokens: int


SGLANG: dict[str, tuple[str, type[Temperatures] | type[CostTable]]] = {
    TEMPERATURES_FLAG: ("temperatures.json", Temperatures),
    COSTS_FLAG: ("costs.json", CostTable),
}
"""SGLang's flag -> the file for it in an exported folder, and its form."""


def sglang_temperatures(calibration: Calibration, n: int) -> Temperatures:
    """For a server that runs n slots: SGLang wants as many temperatures. They are fitted left to right, so the first n
    are those of n slots."""
    measured = calibration.measured.get("all")
    return Temperatures(
        temperatures=list(calibration.temperatures[:n]),
        dataset=",".join(calibration.datasets),
        num_samples=calibration.rounds,
        ece_before=[] if measured is None else list(measured.ece_before[:n]),
        ece_after=[] if measured is None else list(measured.ece_temperatures[:n]),
    )


def sglang_costs(profile: CostProfile) -> CostTable:
    """Steps a second at the measured numbers of tokens, never rising."""
    tokens = sorted({point.tokens for point in profile.verify})
    rates = [profile.steps_per_second(one) for one in tokens]
    return CostTable(sample_batch_tokens=tokens, sample_steps_per_sec=rates, max_batch_tokens=tokens[-1])


def read_exported(folder: Path, n: int) -> dict[str, Path]:
    """SGLang's flags for the files that `export` wrote into a folder, or that were measured otherwise and put there.

    Raises DsparkError when there are none, or one is not what SGLang reads for rounds of n draft tokens.
    """
    found = {}
    folder = folder.resolve()
    for flag, (name, form) in SGLANG.items():
        path = folder / name
        try:
            content = form.model_validate_json(path.read_bytes(), strict=True)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise DsparkError("exported", str(path)[:80], f"cannot be read ({error.strerror})") from None
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the file"
            raise DsparkError("exported", str(path), f"{field}: {first['msg']}; export it again") from None
        if isinstance(content, Temperatures) and len(content.temperatures) != n:
            remedy = f"has {len(content.temperatures)} temperatures, a round {n} draft tokens; export it with -n {n}"
            raise DsparkError("exported", str(path), remedy)
        if isinstance(content, CostTable):
            _check_table(content, path)
        found[flag] = path
    if not found:
        names = " or ".join(name for name, _ in SGLANG.values())
        raise DsparkError("exported", str(folder), f"has no {names}; dspark calibrate --export sglang writes them")
    return found


def _check_table(table: CostTable, path: Path) -> None:
    tokens, rates = table.sample_batch_tokens, table.sample_steps_per_sec
    rising = sorted(set(tokens)) == tokens and sorted(rates, reverse=True) == rates
    if len(rates) != len(tokens) or not rising or table.max_batch_tokens < tokens[-1]:
        remedy = (
            "must have a rate for each number of tokens, those in rising order, rates falling, max_batch_tokens last"
        )
        raise DsparkError("exported", str(path), remedy)


def vllm_settings(draft: str, n: int) -> dict[str, Any]:
    """--speculative-config: vLLM measures costs itself at the start, and reads raw confidences."""
    return {"method": "dspark", "model": draft, "num_speculative_tokens": n, "enable_adaptive_verification": True}


def export(
    engine: Engine, out: Path, draft: str, n: int, calibration: Calibration | None, profile: CostProfile | None
) -> tuple[list[Path], list[str]]:
    """Write the files of an engine for rounds of n draft tokens into the folder `out`: their paths, and what the engine
    leaves unused.

    Raises DsparkError when there is nothing to write for it.
    """
    files: dict[str, Mapping[str, Any]] = {}
    if engine == "vllm":
        files["speculative-config.json"] = vllm_settings(draft, n)
        notes = [
            "vLLM 0.32 takes raw confidences (it has no place for temperatures) and measures its own costs",
            "it needs full CUDA graphs and an attention backend that can trim requests on the device, and refuses LoRA "
            "and pipeline parallelism with it",
            "it is for --speculative-config; where dspark launch vllm converts the draft, its `model` is that place",
        ]
    else:
        notes = [
            "SGLang 0.5.23 uses them with SGLANG_RAGGED_VERIFY_MODE=compact or cap-accept; its default, static, does "
            "not, and decode context parallelism forces static",
            f"dspark launch sglang --adaptive -n {n} --exported {out} passes them",
        ]
        if calibration is not None:
            files[SGLANG[TEMPERATURES_FLAG][0]] = sglang_temperatures(calibration, n).model_dump()
        if profile is not None:
            files[SGLANG[COSTS_FLAG][0]] = sglang_costs(profile).model_dump()
            notes.append("the costs are those of the engine here, on this machine: SGLang's on another one are not")
        if not files:
            raise DsparkError(
                "export", engine, "there are no temperatures and no costs yet; run without --export first"
            )
    for name, content in files.items():
        write_text(out / name, json.dumps(content, indent=1) + "\n")
    return [out / name for name in files], notes

"""calibration.json beside a draft's config.json: temperatures, scaling, and how well they fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.checkpoints.native import CALIBRATION_FILE
from dspark.data.prompts import write_text
from dspark.errors import DsparkError

Share = Annotated[float, Field(ge=0, le=1)]
Pair = tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], Annotated[float, Field(allow_inf_nan=False)]]
Temperature = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Measured(BaseModel):
    """ECE by slot, raw, by temperatures alone and scaled with offsets, the last with its 95 % bootstrap interval over
    prompts, and ROC-AUC of the survival, over `rounds` of prompts that nothing was fitted on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: int
    prompts: int
    ece_before: tuple[Share, ...]
    ece_temperatures: tuple[Share, ...]
    ece_after: tuple[Share, ...]
    ece_after_low: tuple[Share, ...]
    ece_after_high: tuple[Share, ...]
    auc: tuple[Share | None, ...]


class Calibration(BaseModel):
    """temperatures: of slots 1..n, for engines that take those; scaling: (scale, offset) of each, what the engine here
    uses; domains: the scaling of single data sets, by name; datasets: what they were fitted on.

    weights_sha256: of the draft (`native.weights_sha256`); rounds, prompts: fitted on; measured: by data set (`all`:
    together), on the held-out half of the fitted ones and on others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    weights_sha256: str
    target: str
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)]
    scaling: tuple[Pair, ...]
    domains: dict[str, tuple[Pair, ...]] = {}
    datasets: tuple[str, ...]
    rounds: int
    prompts: int
    sampling: Literal["greedy"] = "greedy"
    measured: dict[str, Measured] = {}

    def save(self, folder: Path) -> Path:
        """Write it into a draft's folder, whole."""
        path = folder / CALIBRATION_FILE
        write_text(path, self.model_dump_json(indent=1) + "\n")
        return path

    def of(self, domain: str | None) -> tuple[Pair, ...]:
        """The scaling of a data set (None: of all). Raises DsparkError for one without its own."""
        if domain is None:
            return self.scaling
        if domain not in self.domains:
            known = ", ".join(self.domains) or "none; fit them with --by-domain"
            raise DsparkError("domain", domain, f"has no calibration of its own; there are {known}")
        return self.domains[domain]

    def check(self, weights: str, gamma: int) -> None:
        """Raises DsparkError when it was fitted on other weights, or has another number of slots than the draft."""
        if self.weights_sha256 != weights:
            remedy = f"is of other weights ({self.weights_sha256[:8]}, the draft's are {weights[:8]}); fit it again"
            raise DsparkError(CALIBRATION_FILE, "weights_sha256", remedy)
        for count in (len(self.temperatures), len(self.scaling)):
            if count != gamma:
                remedy = f"the draft predicts {gamma} slots; fit it again with all of them"
                raise DsparkError(CALIBRATION_FILE, f"{count} temperatures", remedy)


def read_calibration(folder: Path) -> Calibration | None:
    """What lies in a draft's folder, None when nothing does. Raises DsparkError naming what is wrong in it."""
    path = folder / CALIBRATION_FILE
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DsparkError(CALIBRATION_FILE, str(path), f"cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise DsparkError(CALIBRATION_FILE, str(path), f"{field}: {first['msg']}; fit it again") from None


def slots(values: Sequence[float | None], form: str = ".1f", scale: float = 100.0) -> str:
    """Figures of slot 1, 2, ... on a line."""
    return " ".join("-" if value is None else format(scale * value, form) for value in values)

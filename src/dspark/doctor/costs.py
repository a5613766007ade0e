"""What a token costs without a draft and a round with one, in seconds, in the engine that is asked about.

Measured here for the built-in engine, in a child process for llama.cpp (`llamacpp.py`), or read from a file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.calibration.cost import CostProfile
from dspark.calibration.passes import Passes, time_in_turns
from dspark.data.prompts import write_text
from dspark.decoding.drafting import DraftProposer
from dspark.decoding.proposers import make_proposer
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError
from dspark.targets.base import Target

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
OWN = "dspark"
"""The built-in engine."""


class EngineCosts(BaseModel):
    """plain: seconds of one token without a draft, T(1); rounds: n -> seconds of a round, draft pass + T(n + 1).

    source: how they were come by; measured: with what (engine version, threads, context, prompts).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    engine: str
    source: str
    plain: Seconds
    rounds: Annotated[dict[int, Seconds], Field(min_length=1)]
    measured: dict[str, Any] = {}

    def save(self, path: str | Path) -> None:
        """Write the file, whole."""
        write_text(path, json.dumps(self.model_dump(mode="json"), indent=1) + "\n")


def read_costs(path: str | Path, engine: str, gamma: int) -> EngineCosts:
    """Costs from a file of `EngineCosts.save`, or from a cost profile of the built-in engine.

    Raises DsparkError when it cannot be read, is of another engine, or has no round up to gamma.
    """
    try:
        values = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DsparkError(
            "profile", str(path), f"cannot be read ({error}); give JSON as docs/doctor.md has it, or measure it again"
        ) from None
    if isinstance(values, dict) and "engine" not in values:
        costs = _from_profile(CostProfile.load(path), str(path))
    else:
        try:
            costs = EngineCosts.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the file"
            raise DsparkError("profile", str(path), f"{field}: {first['msg']}; mend it, or measure it again") from None
    if costs.engine != engine:
        raise DsparkError("profile", str(path), f"is of the engine {costs.engine}, and {engine} is asked about")
    if not any(1 <= n <= gamma for n in costs.rounds):
        raise DsparkError("profile", str(path), f"has no round of 1..{gamma} draft tokens")
    return costs


def _from_profile(profile: CostProfile, path: str) -> EngineCosts:
    """A cost profile has the draft pass of one n only: that n is what it can tell."""
    n = profile.settings.n
    return EngineCosts(
        engine=OWN,
        source=f"cost profile {Path(path).name}",
        plain=profile.verify_seconds(1, 1),
        rounds={n: profile.verify_seconds(n + 1, 1) + profile.draft_seconds(1)},
        measured={**profile.settings.model_dump(), "machine": profile.machine},
    )


@torch.inference_mode()
def measure_here(target: Target, draft: Draft, ids: Sequence[int], repeats: int = 15) -> EngineCosts:
    """The built-in engine's costs at the context `ids`: medians, all passes in turns."""
    made: dict[int, Passes] = {}
    jobs = {}
    for n in range(1, draft.config.gamma + 1):
        proposer = make_proposer(target, draft, n)
        assert isinstance(proposer, DraftProposer)  # a draft was given
        made[n] = Passes(target, proposer, ids, 1, n + 1)
        jobs["draft", n] = made[n].draft
        jobs["verify", n + 1] = partial(made[n].verify, (n + 1,))
    jobs["verify", 1] = partial(made[1].verify, (1,))
    seconds = {key: median(taken) for key, taken in time_in_turns(jobs, repeats).items()}
    return EngineCosts(
        engine=OWN,
        source="measured here",
        plain=seconds["verify", 1],
        rounds={n: seconds["draft", n] + seconds["verify", n + 1] for n in made},
        measured={"context": len(ids), "threads": torch.get_num_threads(), "repeats": repeats},
    )

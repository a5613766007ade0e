"""Rotary settings in a config.json: rope_parameters, and the older pair rope_theta + rope_scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.errors import DsparkError


def older_rope_keys(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """rope_parameters as rope_theta and rope_scaling, for engines that read that pair."""
    rope = dict(parameters)
    theta = rope.pop("rope_theta")
    return {"rope_theta": theta, "rope_scaling": None if rope == {"rope_type": "default"} else rope}


def rope_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """The rope_parameters of a config.json, stated as such or as the older pair; stated both ways they must agree.

    Raises DsparkError.
    """
    theta, scaling = values.get("rope_theta"), values.get("rope_scaling")
    stated = values.get("rope_parameters")
    for name, found in (("rope_scaling", scaling), ("rope_parameters", stated)):
        if found is not None and not isinstance(found, Mapping):
            raise DsparkError(name, found, "must be an object, or null")
    older = None
    if theta is not None:
        older = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
        older["rope_type"] = older.pop("type", older["rope_type"])
    if stated is None and older is None:
        raise DsparkError(
            "rope_parameters", None, "is missing from config.json: state rope_type, rope_theta and its other keys"
        )
    if stated is not None and older is not None and dict(stated) != older:
        raise DsparkError(
            "rope_theta / rope_scaling", older, f"must agree with rope_parameters {stated!r}, or be removed"
        )
    return dict(stated if stated is not None else older or {})

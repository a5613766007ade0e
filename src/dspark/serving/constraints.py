"""Structured output: the parameters of OpenAI and vLLM that ask for it, and the grammar they mean."""

from __future__ import annotations

import json
from typing import Any

from dspark.decoding.grammar import Constraint
from dspark.errors import DsparkError
from dspark.serving.schemas import Body, ResponseFormat, StructuredOutputs

_ONE = "give regex, json or json_object: true in it, or leave it out"


def constraint_of(body: Body) -> tuple[Constraint | None, str]:
    """The grammar that a body asks for, and the parameter that does. Raises DsparkError for more than one, and for a
    `structured_outputs` without any."""
    found: dict[str, Constraint] = {}
    if body.response_format is not None:
        found |= _of_format(body.response_format)
    if body.structured_outputs is not None:
        found |= _of_structured(body.structured_outputs, body)
    if body.guided_regex is not None:
        found["guided_regex"] = Constraint("regex", body.guided_regex)
    if body.guided_json is not None:
        found["guided_json"] = _schema(body.guided_json)
    if len(found) > 1:
        first, second = list(found)[:2]
        raise DsparkError(second, body.given(second), f"cannot be combined with {first}")
    return (next(iter(found.values())), next(iter(found))) if found else (None, "constraint")


def _of_format(form: ResponseFormat) -> dict[str, Constraint]:
    if form.type == "json_schema":
        if form.json_schema is None:
            raise DsparkError("response_format.json_schema", None, "is needed for this type")
        return {"response_format.json_schema.schema": _schema(form.json_schema.schema_)}
    if form.json_schema is not None:
        raise DsparkError("response_format.type", form.type, 'must be "json_schema" when json_schema is given')
    return {"response_format": Constraint("json_object")} if form.type == "json_object" else {}


def _of_structured(structured: StructuredOutputs, body: Body) -> dict[str, Constraint]:
    found = {}
    if structured.regex is not None:
        found["structured_outputs.regex"] = Constraint("regex", structured.regex)
    if structured.json_ is not None:
        found["structured_outputs.json"] = _schema(structured.json_)
    if structured.json_object:
        found["structured_outputs.json_object"] = Constraint("json_object")
    if not found:
        raise DsparkError("structured_outputs", body.given("structured_outputs"), "asks for nothing; " + _ONE)
    return found


def _schema(schema: dict[str, Any] | bool | str) -> Constraint:
    return Constraint("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

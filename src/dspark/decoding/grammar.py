"""Structured output: which tokens keep an answer inside a JSON schema or a regular expression (llguidance)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import llguidance.hf
import llguidance.numpy
import torch
from llguidance import LLMatcher
from torch import Tensor

from dspark.errors import DsparkError

MAX_TEXT = 1 << 16
"""Characters of a schema or expression: compiling takes time that grows faster than they do."""
KEPT = 32
"""Compiled grammars that are kept."""


@dataclass(frozen=True)
class Constraint:
    """What an answer must match. kind "json_schema": `text` is the schema; "json_object": any JSON object, no text;
    "regex": the whole answer matches the expression (Rust syntax)."""

    kind: Literal["json_schema", "json_object", "regex"]
    text: str = ""


class GrammarCompiler:
    """Makes matchers for one tokenizer; the tokenizer's table is built on first use (a third of a second).

    The last few are kept, and copied: a server compiles outside the engine's thread, which then finds them.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._table: Any = None
        self._kept: dict[Constraint, GrammarState] = {}

    def compile(self, constraint: Constraint) -> GrammarState:
        """A fresh state at the beginning of an answer. Raises DsparkError for a schema or expression that is not one,
        is too long or matches nothing, and for a tokenizer that llguidance cannot read (it needs a fast one)."""
        kept = self._kept.get(constraint)
        if kept is None:
            kept = self._compile(constraint)
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[constraint] = kept
        return kept.copy()

    def _compile(self, constraint: Constraint) -> GrammarState:
        if len(constraint.text) > MAX_TEXT:
            raise DsparkError(constraint.kind, f"{len(constraint.text)} characters", f"at most {MAX_TEXT} are taken")
        grammar = _source(constraint)
        problem = LLMatcher.validate_grammar(grammar)
        if problem:
            raise DsparkError(
                constraint.kind, _short(constraint.text), f"cannot be enforced: {_short(_cause(problem))}"
            )
        if self._table is None:
            try:
                self._table = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocab_size)
            except Exception as error:  # llguidance raises what its tokenizer conversion raises
                raise DsparkError("tokenizer", type(self._tokenizer).__name__, _short(str(error))) from error
        matcher = LLMatcher(self._table, grammar, log_level=0)
        if matcher.is_error():
            raise DsparkError(constraint.kind, _short(constraint.text), _short(matcher.get_error()))
        state = GrammarState(matcher, self._vocab_size)
        try:
            first = state.allowed([])
        except DsparkError:
            first = None
        if first is None or not bool(first.any()):
            raise DsparkError(constraint.kind, _short(constraint.text), "matches nothing that this tokenizer can write")
        return state


class GrammarState:
    """Where one answer stands in its grammar. Only `commit` changes it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._bits = llguidance.numpy.allocate_token_bitmask(1, vocab_size)

    def copy(self) -> GrammarState:
        """Another answer at the same point."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size)

    @property
    def ended(self) -> bool:
        """Whether nothing can follow: the answer is complete."""
        return bool(self._matcher.is_stopped())

    def commit(self, token: int) -> None:
        """Take one token of the answer. Raises DsparkError when the grammar does not allow it."""
        if not self.ended and not self._matcher.consume_token(token):
            raise DsparkError("constraint", token, _short(self._matcher.get_error() or "token outside the grammar"))

    def allowed(self, drafts: Sequence[int]) -> Tensor | None:
        """True for the ids that may follow after `drafts` [V]; None where the grammar says nothing (it is over, or
        `drafts` left it: no such slot is ever kept). Drafts are tried on a copy: what they run into stays there.

        Raises DsparkError where the grammar can go no further, or has become too large.
        """
        matcher = self._matcher
        if drafts:
            matcher = matcher.deep_copy()
            if matcher.try_consume_tokens(list(drafts)) < len(drafts):
                return None
        if matcher.is_stopped() and not matcher.is_error():
            return None
        llguidance.numpy.fill_next_token_bitmask(matcher, self._bits, 0)
        if matcher.is_error():
            raise DsparkError("constraint", "grammar", _short(matcher.get_error()))
        bits = torch.from_numpy(self._bits[0]).view(torch.uint8)
        spread = bits[:, None].bitwise_right_shift(torch.arange(8, dtype=torch.uint8)).bitwise_and_(1)
        return spread.flatten()[: self._vocab_size].bool()


def _source(constraint: Constraint) -> str:
    if constraint.kind == "regex":
        return str(LLMatcher.grammar_from_regex(constraint.text))
    schema = constraint.text if constraint.kind == "json_schema" else '{"type": "object"}'
    try:
        json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise DsparkError(constraint.kind, _short(schema), f"is not JSON ({error})") from error
    return str(LLMatcher.grammar_from_json_schema(schema))


def _cause(problem: str) -> str:
    """What is wrong with a regular expression, without the picture of where; any other problem as it is."""
    found = re.search(r"^error: (.+)$", problem, re.MULTILINE)
    return problem if found is None else f"in a regular expression, {found[1]}"


def _short(text: str) -> str:
    """One line; without llguidance's dump of its state, which holds the answer."""
    first = " ".join(text.split("<state>")[0].split())
    return first if len(first) <= 200 else first[:197] + "..."

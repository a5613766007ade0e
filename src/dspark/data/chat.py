"""Chat rendering: from messages to the ids the target reads, and to rows with a loss mask.

A template is never trusted to mark what the assistant said. Each assistant turn becomes a row of its own: the
conversation before it, rendered with the generation prompt, is context; what rendering it adds, up to and
including the stop token, is supervised.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from dspark.data.prompts import is_unicode
from dspark.data.rows import Row, check_row, row_id
from dspark.errors import DsparkError

Message = Mapping[str, Any]
_PROBE = [{"role": "user", "content": "Hello"}]
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatRenderer:
    """Renders conversations for one tokenizer.

    thinking: "on" / "off" sets the template's own switch, None leaves its default.
    template: "chat" uses the tokenizer's chat template; "none" joins the contents by line breaks (base models).
    variables: more names for the template, e.g. a fixed date for one that prints today's.
    Raises DsparkError when the tokenizer has no chat template or the template ignores the thinking switch.
    """

    def __init__(
        self,
        tokenizer: Any,
        thinking: Literal["on", "off"] | None = None,
        template: Literal["chat", "none"] = "chat",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.thinking = thinking
        self.variables = dict(variables or {})
        self.template: str | None = None
        if template not in ("chat", "none"):
            raise DsparkError("template", template, 'must be "chat" or "none"')
        if thinking not in (None, "on", "off"):
            raise DsparkError("thinking", thinking, 'must be "on", "off" or left out')
        if template == "chat":
            if not getattr(tokenizer, "chat_template", None):
                name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
                raise DsparkError("tokenizer", name, 'has no chat template; use template="none" for plain text')
            self.template = tokenizer.get_chat_template()
        if thinking is not None:
            self.variables[self._thinking_switch()] = thinking == "on"

    def recipe(self) -> dict[str, str | None]:
        """What a draft's `prompt_recipe` records: the template's hash and the thinking mode."""
        digest = hashlib.sha256(self.template.encode()).hexdigest() if self.template is not None else None
        return {"template_sha256": digest, "thinking": self.thinking}

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """The whole conversation so far and the generation prompt, as ids [T]."""
        if not messages or messages[-1].get("role") == "assistant":
            raise DsparkError("messages", len(messages), "must end with the message to be answered")
        self._check(messages, tools)
        ids = self._tokenize(self._render(messages, tools, answer_next=True), start=True)
        if not ids:
            raise DsparkError("prompt", messages[-1].get("content"), "renders to no token at all")
        return ids

    def user_turn_start(self) -> str:
        """The rendered text before the words of a first user turn. Raises DsparkError when the template alters them."""
        mark = "<<the user's words>>"
        text = self._render([{"role": "user", "content": mark}], None, answer_next=True)
        head, found, _ = text.partition(mark)
        if not found:
            raise DsparkError("template", text[:60], "does not show the user's words as they are")
        return head

    def supervised_rows(
        self,
        messages: Sequence[Message],
        stop_ids: Iterable[int],
        source: str = "conversation",
        tools: Sequence[Any] | None = None,
    ) -> list[Row]:
        """One row for each assistant turn of a conversation whose answers are given.

        Raises DsparkError when a turn's text cannot be told from its context, when the template ends it without a
        stop id, when nothing or everything would be supervised, or when a tool call would be lost.
        """
        stops = frozenset(stop_ids)
        places = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        if not places:
            raise DsparkError("messages", source, "holds no assistant turn, so nothing would be supervised")
        self._check(messages, tools)
        return [self._row(messages, index, turn, stops, source, tools) for turn, index in enumerate(places)]

    def _row(
        self,
        messages: Sequence[Message],
        index: int,
        turn: int,
        stops: frozenset[int],
        source: str,
        tools: Sequence[Any] | None,
    ) -> Row:
        where = f"{source}: messages[{index}]"
        answer = messages[index]
        if not str(answer.get("content") or "").strip() and not answer.get("tool_calls"):
            raise DsparkError(where, answer.get("content"), "is an empty answer; leave the turn out")
        if index == 0:
            raise DsparkError(where, "assistant", "opens the conversation, so there is nothing it answers")
        prompt = self._render(messages[:index], tools, answer_next=True)
        extension = self._extension(prompt, messages, index, tools, where)
        prompt_ids = self._tokenize(prompt, start=True)
        joint = self._tokenize(prompt + extension, start=True)
        # Token boundaries may move when both are read at once; then the answer is read alone, as it is generated.
        aligned = joint[: len(prompt_ids)] == prompt_ids
        answer_ids = joint[len(prompt_ids) :] if aligned else self._tokenize(extension)
        end = next((i for i, token in enumerate(answer_ids) if token in stops), None)
        if end is None:
            raise DsparkError(where, sorted(stops), "the template ends this turn with none of these stop ids")
        answer_ids = answer_ids[: end + 1]
        row = Row(
            id=row_id(prompt_ids, {"given_answer": answer_ids}),
            source=source,
            turn=turn,
            prompt_ids=prompt_ids,
            answer_ids=answer_ids,
            finish="stop",
        )
        return check_row(row, where)

    def _extension(
        self, prompt: str, messages: Sequence[Message], index: int, tools: Sequence[Any] | None, where: str
    ) -> str:
        """The text that rendering the turn adds to `prompt` (which ends with the generation prompt)."""
        whole = self._render(messages[: index + 1], tools, answer_next=False)
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        # The generation prompt supplies more than the finished turn shows, e.g. an empty think block. Then the turn
        # starts where its own text does, and all that comes before must be what the generation prompt begins with.
        base = self._render(messages[:index], tools, answer_next=False)
        content = str(messages[index].get("content") or "").strip()
        start = whole.find(content, len(base)) if content and not messages[index].get("tool_calls") else -1
        supplied = prompt[len(base) :]
        explained = prompt.startswith(base) and whole.startswith(base) and start >= 0
        if not explained or not supplied.startswith(whole[len(base) : start]):
            raise DsparkError(where, content[:60], "the template renders this turn unlike its own generation prompt")
        if "</think>" in supplied and content.startswith("<think>"):
            raise DsparkError(where, content[:60], "brings a thought, but the template has closed the think block")
        if "<think>" in supplied and "</think>" not in supplied:
            remedy = 'has no reasoning, yet the template opens a think block; use thinking="off"'
            raise DsparkError(where, content[:60], remedy)
        return whole[start:]

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, answer_next: bool) -> str:
        if self.template is None:
            text = "\n".join(str(message["content"]) for message in messages)
            return text + "\n" if answer_next else text + str(self.tokenizer.eos_token or "")
        return self._apply(messages, tools, answer_next, self.variables)

    def _apply(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, answer_next: bool, variables: Mapping[str, Any]
    ) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=answer_next,
                **variables,
            )
        except Exception as error:  # templates raise their own kinds, e.g. for a system message they do not know
            roles = [message.get("role") for message in messages]
            raise DsparkError("messages", roles, f"the chat template refuses them: {error}") from None

    def _tokenize(self, text: str, start: bool = False) -> list[int]:
        # A chat template writes its own BOS; plain text gets the tokenizer's.
        return list(self.tokenizer(text, add_special_tokens=start and self.template is None).input_ids)

    def _thinking_switch(self) -> str:
        """The name of the template variable that turns thinking on and off: the one that changes the rendering."""
        if self.template is not None:
            for name in ("enable_thinking", "thinking"):
                shown = [self._apply(_PROBE, None, True, {**self.variables, name: value}) for value in (True, False)]
                if shown[0] != shown[1]:
                    return name
        raise DsparkError("thinking", self.thinking, "this tokenizer's template has no thinking switch; leave it out")

    def _check(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        """Roles and contents have the right kinds, and no tool, tool call or tool answer is lost in rendering."""
        wanted: list[tuple[str, str]] = []
        for index, message in enumerate(messages):
            where = f"messages[{index}]"
            if message.get("role") not in _ROLES:
                raise DsparkError(f"{where}.role", message.get("role"), f"must be one of {', '.join(_ROLES)}")
            content = message.get("content")
            calls = message.get("tool_calls") or []
            if not isinstance(content, str) and not (content is None and calls):
                raise DsparkError(f"{where}.content", content, "must be a text")
            if content is not None and not is_unicode(content):
                raise DsparkError(f"{where}.content", content[:60], "is not Unicode text; write it as UTF-8")
            for number, call in enumerate(calls):
                wanted.append((f"{where}.tool_calls[{number}]", _call_name(call, f"{where}.tool_calls[{number}]")))
            if message["role"] == "tool":
                wanted.append((where, str(content).strip()))
        for number, tool in enumerate(tools or []):
            name = tool.get("function", tool).get("name") if isinstance(tool, Mapping) else tool.__name__
            wanted.append((f"tools[{number}]", str(name)))
        if not wanted:
            return
        text = self._render(messages, tools, answer_next=False)
        for where, needle in wanted:
            if needle not in text:
                raise DsparkError(where, needle[:60], "is lost: the chat template does not render it")
        self._check_arguments(messages, tools, text)

    def _check_arguments(self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str) -> None:
        """Leaving one call's arguments out must change the text; otherwise the template dropped them."""
        for index, message in enumerate(messages):
            for number, call in enumerate(message.get("tool_calls") or []):
                function = call["function"]
                if not _arguments(function):
                    continue
                empty = {**call, "function": {**function, "arguments": {}}}
                calls = [*message["tool_calls"][:number], empty, *message["tool_calls"][number + 1 :]]
                without = [*messages[:index], {**message, "tool_calls": calls}, *messages[index + 1 :]]
                if self._render(without, tools, answer_next=False) == text:
                    where = f"messages[{index}].tool_calls[{number}].arguments"
                    raise DsparkError(where, function["name"], "are lost: the chat template does not render them")


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments")
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _call_name(call: Any, where: str) -> str:
    """The function's name. Raises DsparkError for a malformed call."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DsparkError(where, str(call)[:60], 'must be {"function": {"name": "...", "arguments": {...}}}')
    try:
        arguments = _arguments(function)
    except json.JSONDecodeError as error:
        raise DsparkError(f"{where}.arguments", function["arguments"][:60], f"is not JSON ({error.msg})") from None
    if not isinstance(arguments, Mapping) and arguments is not None:
        raise DsparkError(f"{where}.arguments", str(arguments)[:60], "must be an object")
    return function["name"]

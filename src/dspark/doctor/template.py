"""The prompts that the draft was trained on against those that the target's template makes."""

from __future__ import annotations

from typing import Literal

from dspark.data.chat import ChatRenderer
from dspark.doctor.facts import TargetFacts
from dspark.doctor.findings import Finding
from dspark.drafts.kinds import Config
from dspark.errors import DsparkError

Mode = Literal["on", "off"]


def check_prompt_recipe(config: Config, target: TargetFacts) -> Finding:
    """prompt-recipe: the hash of the chat template, and the thinking mode."""
    digest, thinking = config.prompt_recipe["template_sha256"], config.prompt_recipe["thinking"]
    if target.tokenizer is None:
        return Finding("prompt-recipe", "skipped", target.no_tokenizer)
    try:
        found = ChatRenderer(target.tokenizer).recipe()["template_sha256"]
    except DsparkError as error:
        if digest is None:
            return Finding("prompt-recipe", "note", f"neither side has a chat template ({error.remedy})")
        text = f"trained with the chat template {digest[:12]}, the target has none: give it that template"
        return Finding("prompt-recipe", "loses", text)
    if digest is not None and digest != found:
        text = f"trained with the chat template {digest[:12]}, the target has {str(found)[:12]}: prompts differ"
        return Finding("prompt-recipe", "loses", text)
    modes = thinking_modes(target)
    if thinking is not None and not modes:
        text = f"trained with thinking {thinking}, and the target's template has no such switch: another template"
        return Finding("prompt-recipe", "loses", text)
    if digest is None:
        return Finding("prompt-recipe", "note", "the draft does not say which chat template it was trained with")
    if modes and thinking is None:
        return Finding("prompt-recipe", "note", "the template has a thinking switch; trained with its default")
    if thinking is not None:
        return Finding("prompt-recipe", "note", f"trained with thinking {thinking} only: serve it so")
    return Finding("prompt-recipe", "ok", f"chat template {digest[:12]}, as trained")


def thinking_modes(target: TargetFacts) -> tuple[Mode, ...]:
    """("on", "off") when the template has a thinking switch, else nothing."""
    try:
        ChatRenderer(target.tokenizer, thinking="off")
    except DsparkError:
        return ()
    return "on", "off"

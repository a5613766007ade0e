"""Drafts by hub name: `org/name` where no folder of that name is here."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from dspark.checkpoints.builtin import draft_folder
from dspark.errors import DsparkError

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "README.md", "training_prompts.txt")  # and so no pickle


def draft_source(name: str) -> Path:
    """The folder or file of a draft: `embedded`, a path, or a hub name, which is fetched into the hub's cache.

    Raises DsparkError when there is neither a path nor, on the hub or in its cache, such a repository.
    """
    path = draft_folder(name)
    if path.exists() or path.suffix in (".yaml", ".yml", ".gguf") or not _NAME.fullmatch(name):
        return path
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        why = "cannot be reached" if isinstance(error, LocalEntryNotFoundError) else _line(error)
        remedy = f"is no folder here, and no draft of that name came from the hub ({why}); give a path"
        raise DsparkError("draft", name, remedy) from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]

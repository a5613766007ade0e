"""What must be right of a draft folder before it is published: its files, tensors, card and words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dspark.checkpoints.native import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, load_draft, read_config
from dspark.checkpoints.tensors import tensor_shapes
from dspark.doctor.static import static_checks
from dspark.drafts.config import DraftConfig
from dspark.errors import DsparkError
from dspark.publishing.card import stale_facts, stated_licence, visible
from dspark.publishing.evaluation import evaluation, report_of
from dspark.publishing.secrets import path_in, strings, token_in
from dspark.targets.converted import sha256

_TEXTS = (".json", ".md", ".txt")
_LICENCES = ("LICENSE", "NOTICE")
_EMBEDDINGS = ("embed_tokens.weight", "model.embed_tokens.weight")


@dataclass(frozen=True)
class Upload:
    """A file that would go out. size: bytes."""

    name: str
    size: int
    sha256: str


def uploads(folder: Path) -> list[Upload]:
    """Every file of the folder, by name."""
    found = sorted(path for path in folder.iterdir() if path.is_file())
    return [Upload(path.name, path.stat().st_size, sha256(path)) for path in found]


def faults(folder: Path, report: Path | None = None) -> list[str]:
    """What is wrong, one line each; empty when the folder can go out. report: the card must have its figures.

    Raises DsparkError when there is no config that can be read, or the report is of other weights.
    """
    config, _ = read_config(folder)
    if not isinstance(config, DraftConfig):
        raise DsparkError("draft", str(folder), "is an EAGLE-3 baseline; only DSpark and DFlash drafts are published")
    found = [*_files(folder), *_tensors(folder, config), *_card(folder, config, report), *_words(folder)]
    return found or list(_doctor(folder, config))


def _files(folder: Path) -> Iterator[str]:
    """One safetensors file; beside it texts and a licence, and nothing else."""
    if not (folder / WEIGHTS_FILE).is_file():
        yield f"{WEIGHTS_FILE} is missing; a published draft has one safetensors file"
    for path in sorted(folder.iterdir()):
        if path.name.endswith((".safetensors", ".index.json")) and path.name != WEIGHTS_FILE:
            yield f"{path.name}: a published draft has one safetensors file, {WEIGHTS_FILE}"
        elif path.is_symlink() or not path.is_file():
            yield f"{path.name} is no plain file; take it away"
        elif path.name != WEIGHTS_FILE and (not _is_text(path) or path.name.startswith(".")):
            known = ", ".join((*_TEXTS, *_LICENCES))
            yield f"{path.name} is no part of a draft (weights, {known}); take it away"
        elif set(path.name) & set("[]*?"):
            yield f"{path.name}: a name with [ ] * or ? stands for others when it is uploaded; rename it"


def _tensors(folder: Path, config: DraftConfig) -> Iterator[str]:
    """The draft's own tensors, all of them, and none of the target's."""
    try:
        shapes = tensor_shapes(folder)[0]
        own = [name for name in _EMBEDDINGS if name in shapes]
        if shapes.get("lm_head.weight") == (config.vocab_size, config.hidden_size):
            own.append("lm_head.weight")
        if own:
            yield f"{WEIGHTS_FILE} holds the target's weights ({', '.join(own)}); dspark convert leaves them out"
        else:
            load_draft(folder)
    except DsparkError as error:
        yield str(error)


def _card(folder: Path, config: DraftConfig, report: Path | None) -> Iterator[str]:
    """A card with a licence, true to the config and, when given, to the report."""
    write = f"dspark card {folder}"
    try:
        card = visible((folder / CARD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        yield f"{CARD_FILE} is missing or no text; write it: {write} --report report.json"
        return
    if stated_licence(folder) is None:
        yield f"{CARD_FILE} names no licence; write it again: {write} --license NAME"
    for fact in stale_facts(config, card):
        yield f"{CARD_FILE} does not have the {fact} of {CONFIG_FILE}; write it again: {write}"
    if report is not None and evaluation(report_of(report, folder)) not in card:
        yield f"{CARD_FILE} does not have the figures of {report}; write it again: {write} --report {report}"


def _words(folder: Path) -> Iterator[str]:
    """Paths of this machine and tokens in the texts that go out, the header of the weights among them."""
    for path in sorted(folder.iterdir()):
        if not path.is_file() or not (path.name == WEIGHTS_FILE or _is_text(path)):
            continue
        try:
            texts, whole = _texts(path)
            places = [place for text in texts if (place := path_in(text, whole))]
            tokens = [token for text in texts if (token := token_in(text))]
        except (ValueError, RecursionError, OSError, SafetensorError) as error:
            yield f"{path.name} cannot be read ({' '.join(str(error).split())})"
            continue
        if places:
            yield f"{path.name} holds a path of this machine ({places[0]}); only names may stay"
        if tokens:
            yield f"{path.name} holds an access token ({tokens[0]}); take it out, and revoke it"


def _texts(path: Path) -> tuple[list[str], bool]:
    """The texts of a file, and whether each is a value by itself."""
    if path.name == WEIGHTS_FILE:
        with safe_open(path, framework="pt") as file:
            return list(strings(file.metadata() or {})), True
    text = path.read_text(encoding="utf-8")
    return (list(strings(json.loads(text))), True) if path.suffix == ".json" else ([text], False)


def _is_text(path: Path) -> bool:
    return path.suffix in _TEXTS or path.name in _LICENCES


def _doctor(folder: Path, config: DraftConfig) -> Iterator[str]:
    """What the static checks find broken. A target of the hub that cannot be had is not compared."""
    try:
        found = static_checks(config.target_name, str(folder))
    except DsparkError as error:
        yield str(error)
        return
    yield from (f"doctor, {one.check}: {one.text}" for one in found if one.level == "broken")

"""Target and draft as an engine takes them; a draft that is not in the engine's form yet is converted."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dspark import __version__
from dspark.checkpoints.builtin import EMBEDDED_DRAFT, draft_folder
from dspark.checkpoints.convert import convert
from dspark.checkpoints.gguf import CONFIG_KEY
from dspark.checkpoints.native import CONFIG_FILE
from dspark.checkpoints.read import GGUF_SUFFIX, Header, read_header
from dspark.checkpoints.served_form import as_it_is, convert_words, form_for
from dspark.checkpoints.tensors import INDEX_FILE
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.drafts.kinds import Config
from dspark.errors import DsparkError
from dspark.targets.embedded import EMBEDDED, cache_directory, ensure_embedded, find_gguf
from dspark.training.recipe import Recipe, load_recipe, recipe_names


@dataclass(frozen=True)
class Ready:
    """A draft for an engine. path: what the engine is given. config: None when it is not on this disk.

    convert: writes `path`, None when nothing is to be written; command: the same by hand.
    """

    path: str
    config: Config | None
    convert: Callable[[], object] | None = None
    command: tuple[str, ...] = ()


def ready_target(engine: str, target: str) -> str:
    """The target as the engine takes it: hub name or folder; for llama.cpp a .gguf file. Raises DsparkError."""
    if engine != "llamacpp":
        return str(ensure_embedded()) if target == EMBEDDED else _there("target", target)
    path = find_gguf() if target == EMBEDDED else Path(target)
    if path.suffix == GGUF_SUFFIX:
        _there("target", str(path))
    if path.suffix != GGUF_SUFFIX or not path.is_file():
        raise DsparkError("target", target, "must be a .gguf file for llama.cpp")
    return str(path)


def _there(field: str, place: str) -> str:
    """`place`, which is no hub name when it looks like a path. Raises DsparkError for a path where nothing is."""
    is_path = place.startswith((".", "/", "~")) or Path(place).suffix == GGUF_SUFFIX
    if is_path and not Path(place).exists():
        raise DsparkError(field, place, "is not on this disk")
    return place


def ready_draft(engine: str, target: str, draft: str, out: Path | None = None) -> Ready:
    """The draft as the engine takes it. target: as `ready_target` gives it. out: where a converted draft goes, else
    into the cache.

    Raises DsparkError for a draft that cannot be read, or that no form makes this engine serve.
    """
    folder = draft_folder(draft)
    if folder.suffix == GGUF_SUFFIX and folder.is_file():
        return _gguf_file(engine, draft)
    if not folder.is_dir():
        _there("draft", draft)
        return _elsewhere(engine, draft)
    if engine == "llamacpp":
        return _as_gguf(draft, folder, target, out)
    read = read_header(folder, target if Path(target).is_dir() else None)
    form, expanded = form_for(engine, read.config)
    if as_it_is(engine, read.config, read.form, read.lm_head):
        return Ready(str(folder), read.config)
    place = out or _cached(folder, form, target)
    if out is None and (place / CONFIG_FILE).is_file():
        return Ready(str(place), read.config)  # converted before
    return _as_form(draft, target, read, form, expanded, _new(place))


def known_recipe(draft: str) -> Recipe | None:
    """The recipe that comes with the package whose published draft this is; None when a path of that name is here."""
    if Path(draft).exists():
        return None
    for name in recipe_names():
        recipe = load_recipe(name)
        if recipe.serve is not None and recipe.serve.draft == draft:
            return recipe
    return None


def _as_form(draft: str, target: str, read: Header, form: str, expanded: bool, place: Path) -> Ready:
    source = target if Path(target).is_dir() else None
    words = convert_words(draft, str(place), form, expanded, source)
    return Ready(str(place), read.config, lambda: convert(draft, form, place, source, expanded), words)


def _as_gguf(draft: str, folder: Path, target: str, out: Path | None) -> Ready:
    config = read_header(folder).config
    if isinstance(config, Eagle3Config):
        raise DsparkError("draft", draft, "is an EAGLE-3 baseline; only DSpark and DFlash drafts are written as GGUF")
    path = out or _cached(folder, "gguf", target) / "draft.gguf"
    if out is None and path.is_file():
        return Ready(str(path), config)  # written before
    _new(path)
    words = ("dspark", "convert", draft, str(path), "--to", "gguf", "--target", target)
    return Ready(str(path), config, lambda: convert(draft, "gguf", path, target), words)


def _gguf_file(engine: str, draft: str) -> Ready:
    if engine != "llamacpp":
        raise DsparkError("draft", draft, "is a GGUF file, which only llama.cpp takes; give a folder")
    try:
        return Ready(draft, read_header(Path(draft)).config)
    except DsparkError as error:
        if error.field != CONFIG_KEY or error.value is not None:
            raise
        return Ready(draft, None)  # another program's


def _elsewhere(engine: str, draft: str) -> Ready:
    """A hub name, which the engine fetches itself."""
    if engine == "llamacpp" or draft.startswith((".", "/", "~")) or draft.count("/") != 1:
        remedy = "is not on this disk; give a folder, `embedded`, or, for vLLM and SGLang, a hub name (OWNER/NAME)"
        raise DsparkError("draft", draft, remedy)
    recipe = known_recipe(draft)
    if recipe is None:
        return Ready(draft, None)
    config = recipe.draft_config()
    form, expanded = form_for(engine, config)
    if expanded:
        words = shlex.join(convert_words(draft, "OUT", form, expanded, None))
        raise DsparkError("draft", draft, f"has to be converted for {engine}: {words}, then --draft OUT")
    return Ready(draft, config)


def _new(place: Path) -> Path:
    """A place to write to. Raises DsparkError when something is there: whose draft it is, nothing tells."""
    if place.is_file() or (place.is_dir() and any(place.iterdir())):
        raise DsparkError("out", str(place), "exists already; give it as --draft, or choose another place")
    return place


def _cached(folder: Path, form: str, target: str) -> Path:
    """Where a converted draft goes: a place in the cache that changes with the draft's files, the target's, and the
    version that converts."""
    digest = hashlib.sha256(f"{__version__}\n".encode())
    for path in (*_files(folder), *_files(Path(target))):
        stat = path.stat()
        digest.update(f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    name = EMBEDDED_DRAFT if folder == draft_folder(EMBEDDED_DRAFT) else folder.name
    return cache_directory() / "drafts" / f"{name}-{form}-{digest.hexdigest()[:12]}"


def _files(place: Path) -> list[Path]:
    """The files that a conversion reads: config, index and weights of a folder, or the file itself."""
    if place.is_file():
        return [place]
    patterns = (CONFIG_FILE, INDEX_FILE, "*.safetensors")
    return [path for pattern in patterns for path in sorted(place.glob(pattern))]

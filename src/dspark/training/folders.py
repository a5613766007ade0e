"""Features of one run that lie in several folders, and the rows that none of them has yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dspark.data.rows import Row
from dspark.errors import DsparkError
from dspark.targets.base import Target
from dspark.training.features import (
    CachedFeatures,
    DtypeName,
    Features,
    FeatureWriter,
    InProcessFeatures,
    cache_features,
)


class FeatureFolders:
    """A row's features come from the first folder that has it.

    Raises DsparkError when the folders differ in target, stored taps or dtype.
    """

    def __init__(self, folders: Sequence[CachedFeatures]) -> None:
        self.folders = list(folders)
        first = self.folders[0]
        for other in self.folders[1:]:
            for field in ("target", "target_dtype", "taps", "hidden_size", "num_layers", "dtype"):
                if other.index[field] != first.index[field]:
                    remedy = f"{other.folder} must agree with {first.folder}, which has {first.index[field]!r}"
                    raise DsparkError(f"features.{field}", other.index[field], remedy)
        self.taps = first.taps

    def __contains__(self, row: Row) -> bool:
        return any(row in folder for folder in self.folders)

    def get(self, row: Row) -> Features:
        """Raises DsparkError when no folder has the row."""
        return next((folder for folder in self.folders if row in folder), self.folders[0]).get(row)


def open_folders(
    names: Sequence[str],
    target: Target,
    taps: Sequence[int],
    dtype: DtypeName,
    rows: Sequence[Row],
    say: Callable[[str], None],
) -> FeatureFolders:
    """Open feature folders and compute the rows that are in none of them into the first one.

    Only the first may be new: it then gets the taps and dtype of the others, or `taps` and `dtype` when it is alone.
    Raises DsparkError when a folder belongs to another target, or has not the taps.
    """
    found = [CachedFeatures(name) for name in names if name != names[0] or (Path(name) / "index.json").exists()]
    for folder in found:
        folder.expect(target.name, taps, target.hidden_size, target.num_layers)
    folders = FeatureFolders(found) if found else None
    missing = [row for row in rows if folders is None or row not in folders]
    if missing or folders is None:
        stored, kind = (found[0].stored, found[0].index["dtype"]) if found else (tuple(taps), dtype)
        with FeatureWriter(names[0], target, stored, kind) as writer:
            cache_features(InProcessFeatures(target, stored), missing, writer, say)
        found = [CachedFeatures(name) for name in names]
        for folder in found:
            folder.expect(target.name, taps, target.hidden_size, target.num_layers)
        folders = FeatureFolders(found)
    return folders

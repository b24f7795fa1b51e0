"""What graph files say of themselves, by their first bytes: quick enough for a person who looks at a list."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ..folders import GRAPHS
from ..settings import GRAPH_SUFFIX
from .artifact import ArtifactError, Manifest
from .graph_file import manifests_in
from .store import GraphStore


@dataclass(frozen=True)
class Description:
    """What a graph file says of itself.

    Attributes:
        path: where it is.
        nbytes: its size.
        used: when it was last used, seconds since the epoch.
        manifest: what is in it; nobody has vouched for it yet.
        removable: whether it is in the folder that we write.
    """

    path: Path
    nbytes: int
    used: float
    manifest: Manifest
    removable: bool


def described(store: GraphStore) -> list[Description]:
    """Return what every graph file of a store says of itself, most recently used first; nothing is checked.

    A file that cannot be read is left out; ``GraphStore.entries`` says why.
    """
    found = []
    for folder in store.folders:
        for path in (folder / GRAPHS).glob(f"*{GRAPH_SUFFIX}"):
            with contextlib.suppress(OSError, ArtifactError):
                status = path.stat()
                (manifest,) = manifests_in(path)[:1]
                found.append(Description(path, status.st_size, status.st_mtime, manifest, folder == store.folder))
    return sorted(found, key=lambda each: each.used, reverse=True)

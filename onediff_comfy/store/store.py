"""The artifact store: compiled graphs by graph key on disk, shared by processes and restarts.

    <folder>/graphs/<graph key>.graph       one artifact each
    <folder>/calls/<call key>.json          which graph serves a call, sealed
    <folder>/options/<fingerprint>.json     which options a target reads, sealed
    <folder>/proved/<digest>.json           for which sizes a compilation agreed with eager on this machine, sealed
    <folder>/retired/<graph key>.json       that it did not, sealed
    <folder>/locks/<graph key>.lock         held while one process compiles
    <folder>/locks/notes.lock               held while one process adds to a note

Every file appears whole, by rename. Damage is noticed on reading, reported once, and answered by
compiling anew. Several processes may use one folder, on one machine or through a network drive
with working locks; further folders may be read-only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..files import TEMPORARY_SUFFIX, file_version, of_version, private_lock, remove_judged, write_atomically
from ..folders import GRAPHS, cache_folder, config_folder, shared_cache_folder, store_role, store_url
from ..messages import message
from ..settings import DISK_LIMIT_BYTES, FLEET_PACKAGES
from ..settings import GRAPH_SUFFIX as SUFFIX
from .artifact import Artifact, ArtifactError, Manifest
from .graph_file import open_graphs, pack
from .notes import Notes, path_in
from .remote.tier_counters import TierCounters
from .trust import Trust, Untrusted, VerifiedArtifact

log = logging.getLogger(__name__)


# A crashed writer's temporary file; no write of ours takes longer.
_STALE_SECONDS = 3600
_LONGEST_COMPILATION_S = 900


class Superseded(Exception):
    """Another machine's compilation of a graph is the one to use; it is in the store in place of this process's."""


@dataclass(frozen=True)
class Entry:
    """A file of the store, as ``list`` shows it.

    Attributes:
        path: where it is.
        nbytes: its size.
        used: when it was last used, seconds since the epoch.
        manifest: what is in it; None if that cannot be read, or the file is of another name.
        problem: why it cannot be read or may not be loaded, if so.
    """

    path: Path
    nbytes: int
    used: float
    manifest: Manifest | None
    problem: str | None

    @property
    def artifact(self) -> Artifact | None:
        """Return what is in the file, read now with all its parts; None if there is no ``manifest``.

        Raises:
            ArtifactError, OSError: it is another by now.
        """
        if self.manifest is None:
            return None
        with _graph_in(self.path) as found:
            return Artifact(found.manifest_text, found.seal, dict(found.data))


class GraphStore:
    """Compiled graphs on disk.

    Args:
        folder: read and written.
        trust: seals and judges.
        read_only: further folders of the same layout, looked into when ``folder`` has no match.
        limit: bytes that the graphs in ``folder`` may take together; beyond it the least recently
            used go.

    Attributes:
        folders: ``folder`` and those that are only read.
        notes: small facts about graphs and calls.
        counters: what the tier did that a fleet shares; None of a store that has none.
    """

    counters: TierCounters | None = None

    def __init__(
        self, folder: Path, trust: Trust, read_only: Sequence[Path] = (), limit: int = DISK_LIMIT_BYTES
    ) -> None:
        self.folder = folder
        self.limit = limit
        self._trust = trust
        self.folders = (folder, *read_only)
        self.notes = Notes(self.folders, trust)

    @property
    def shared(self) -> bool:
        """Return True if other processes of this install believe what this one leaves here."""
        return self._trust.outlives_process

    # -- graphs --------------------------------------------------------------------------------

    def find(self, key: str) -> VerifiedArtifact | None:
        """Return the artifact for a graph key, sealed or trusted, its parts checked; None if there is none."""
        for folder in self.folders:
            path = path_in(folder, GRAPHS, key)
            try:
                with _graph_in(path) as found:
                    artifact = self.verified(found, path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (ArtifactError, Untrusted, OSError) as error:
                log.warning("OneDiff: not using %s: %s", path, error)
                continue
            self._touch(path)
            return artifact
        return None

    def verified(self, artifact: Artifact, source: Path) -> VerifiedArtifact:
        """Return the artifact as one that may be loaded.

        Raises:
            ArtifactError, Untrusted, OSError: see ``VerifiedArtifact``.
        """
        return VerifiedArtifact(artifact, self._trust, source)

    def save(self, artifact: Artifact) -> Path:
        """Seal and keep a graph that this process compiled.

        Raises:
            OSError: it could not be written; the store is as it was.
            Superseded: by a store that machines share.
        """
        sealed = Artifact(artifact.manifest_text, self._trust.seal(artifact.manifest_text), artifact.data)
        return self._put(sealed)

    def trust(self, artifact: Artifact) -> None:
        """Believe this artifact, exactly as it is, from now on. Call it only because a person said so."""
        self._trust.trust(artifact)

    def adopt(self, artifact: Artifact, source: Path | None = None) -> Path:
        """Keep a graph that came in a file, with what its manifest knows of the calls it serves.

        Args:
            artifact: the graph.
            source: the file, for messages.

        Raises:
            ArtifactError, Untrusted: see ``VerifiedArtifact``.
            OSError: it could not be written.
        """
        verified = self.verified(artifact, source or path_in(self.folder, GRAPHS, artifact.manifest.key))
        path = self._put(verified)
        for call_key in verified.manifest.calls:
            self.notes.add_call(call_key, verified.manifest.key, verified.manifest.shapes)
        for fingerprint, names in verified.manifest.options_read.items():
            self.notes.add_options(fingerprint, names)
        return path

    def _put(self, artifact: Artifact) -> Path:
        path = path_in(self.folder, GRAPHS, artifact.manifest.key)
        write_atomically(path, pack([artifact]), _later_than_all_beside(path))
        self.prune(keep=path)
        return path

    def remove(self, key: str, judged: Callable[[Artifact], bool] | None = None) -> bool:
        """Remove the artifact of a graph key from the folder we write, if it is there. Return True if it was.

        Args:
            key: the graph key.
            judged: tells whether an artifact, of which the parts are not read, is the one to be removed: another may
                have taken its place. None for whatever is there.
        """
        path = path_in(self.folder, GRAPHS, key)
        with contextlib.suppress(OSError, ArtifactError):
            if judged is not None:
                return remove_judged(path, lambda file: _are_all(file, judged))
            path.unlink()
            return True
        return False

    @contextlib.contextmanager
    def compiling(self, key: str) -> Iterator[None]:
        """Hold a graph's lock while it is compiled. Other processes wait here, and find the graph afterwards.

        The lock goes with the process that holds it, however that ends. Whoever holds it longer than any compilation
        takes was stopped. Then, and in a folder that cannot be written to, processes compile for themselves.
        """
        path = path_in(self.folder, "locks", key)
        try:
            lock = private_lock(path, _LONGEST_COMPILATION_S)
            lock.acquire()
        except (OSError, NotImplementedError) as error:
            log.warning("OneDiff: no lock in %s (%s); another process may compile the same graph", path.parent, error)
            yield
            return
        try:
            yield
        finally:
            lock.release()

    # -- housekeeping --------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Return every graph file, most recently used first."""
        found = []
        for path in _files_in(self.folders):
            with contextlib.suppress(FileNotFoundError):  # another process may remove it meanwhile
                found.append(self._entry(path))
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def latest(self, most: int) -> list[Manifest]:
        """Return what is in the graph files that were used last, the last first; none of what may not be loaded."""
        used = dict[str, tuple[int, Path]]()  # by name: a graph may be in several folders
        for path in _files_in(self.folders):
            with contextlib.suppress(OSError):  # another process may remove it meanwhile
                used.setdefault(path.name, (path.lstat().st_mtime_ns, path))
        entries = list[Entry]()
        for _, path in sorted(used.values(), reverse=True)[:most]:
            with contextlib.suppress(OSError):
                entries.append(self._entry(path))
        return [entry.manifest for entry in entries if entry.manifest is not None and entry.problem is None]

    def _entry(self, path: Path) -> Entry:
        status = path.lstat()
        manifest = problem = None
        try:
            with _graph_in(path) as artifact:
                manifest = artifact.manifest
                self.verified(artifact, path)
        except (ArtifactError, Untrusted, OSError) as error:
            problem = str(error)
        return Entry(path, status.st_size, status.st_mtime, manifest, problem)

    def prune(self, limit: int | None = None, keep: Path | None = None) -> list[Path]:
        """Remove the least recently used graphs until the rest fits ``limit`` bytes (default: the store's).

        Also removes what crashed writers left. ``keep`` is never removed.
        """
        limit = self.limit if limit is None else limit
        files = []
        for path in (self.folder / GRAPHS).glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                files.append((file_version(path), path))
        total = sum(size for (_, size, _), _ in files)
        removed = []
        for listed, path in sorted(files):
            size = listed[1]
            if total <= limit:
                break
            # Another process may have written it anew, or used it, since it was listed.
            with contextlib.suppress(OSError):
                if path != keep and remove_judged(path, of_version(listed)):
                    removed.append(path)
                    total -= size
                    log.info("OneDiff: removed compiled graph %s to stay within %d MB", path.name, limit >> 20)
        for leftover in self.folder.glob(f"*/.*{TEMPORARY_SUFFIX}"):
            with contextlib.suppress(OSError):
                if abs(time.time() - leftover.stat().st_mtime) > _STALE_SECONDS:
                    leftover.unlink()
        return removed

    def _touch(self, path: Path) -> None:
        """Mark as most recently used: later than every other file, even if the clock was set back."""
        with contextlib.suppress(OSError):
            now = _later_than_all_beside(path)
            os.utime(path, ns=(now, now))


def _later_than_all_beside(path: Path) -> int:
    """Return the time, or a later one than that of every other graph in the folder, in nanoseconds."""
    latest = 0
    for other in path.parent.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may remove it meanwhile
            latest = max(latest, other.stat().st_mtime_ns if other != path else 0)
    return max(time.time_ns(), latest + 1000)


def _are_all(path: Path, judged: Callable[[Artifact], bool]) -> bool:
    """Return what ``judged`` says of a file's graphs, whatever its name."""
    with open_graphs(path) as artifacts:
        return all(map(judged, artifacts))


@contextlib.contextmanager
def _graph_in(path: Path) -> Iterator[Artifact]:
    """Yield the one graph in a file of the store; see ``open_graphs``.

    Raises:
        ArtifactError: it cannot be read, or is not the one that the file is named by.
        OSError: it is missing, or no file.
    """
    with open_graphs(path) as artifacts:
        if [artifact.manifest.key for artifact in artifacts] != [path.stem]:
            raise ArtifactError(message("it holds another graph than its name says"))
        yield artifacts[0]


def _files_in(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield all graph files, folder by folder."""
    for folder in folders:
        yield from (folder / GRAPHS).glob(f"*{SUFFIX}")


def default_store() -> GraphStore:
    """Return the store that ComfyUI and the command line use on this machine; see ``folders``."""
    url, local = store_url(), local_store()
    if not url:
        return local
    try:
        from .remote.tiered_store import TieredStore, open_tier

        tier = open_tier(url, store_role(), cache_folder(), config_folder())
        return TieredStore(local.folder, Trust(config_folder()), tier, _read_only(), local.limit)
    except ImportError as error:
        why = f"{error.name or error} is not installed; run {FLEET_PACKAGES}"
    except (ValueError, OSError) as error:
        why = str(error)
    log.warning("OneDiff: ONEDIFF_STORE_URL is set, but graphs are kept on this machine alone: %s", why)
    return local


def local_store() -> GraphStore:
    """Return the same without the tier that a fleet shares."""
    return GraphStore(cache_folder(), Trust(config_folder()), _read_only(), limit=_limit())


def _read_only() -> list[Path]:
    shared = shared_cache_folder()
    return [shared] if shared else []


def _limit() -> int:
    megabytes = os.environ.get("ONEDIFF_CACHE_LIMIT_MB", "")
    with contextlib.suppress(ValueError):  # no number, or one of thousands of digits
        if int(megabytes) >= 0:
            return int(megabytes) << 20
    return DISK_LIMIT_BYTES

"""What people do with a fleet's store by hand: try it, fill it, take from it, tidy it, look into it."""

from __future__ import annotations

import os
import platform
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...folders import GRAPHS
from ...settings import GRAPH_SUFFIX
from ..artifact import Artifact, ArtifactError
from ..graph_file import open_graphs
from ..signing.signed import Statement
from ..store import Entry
from ..trust import Trust
from .lease import HELD
from .objects import Listed, Looked, Objects
from .tier import Tier
from .tiered_store import TieredStore

_READERS = 16
_WRITERS, _ROUNDS = 8, 5
_PROBE_BYTES = 8 << 20
_DAY_S = 86400


@dataclass(frozen=True)
class Probed:
    """One thing that a store has to be able to do.

    Attributes:
        name: what it is.
        ok: it does.
        text: what was seen.
    """

    name: str
    ok: bool
    text: str


def probe(objects: Objects) -> Iterator[Probed]:
    """Try everything that the tier needs of a store, in a folder of its own that is removed afterwards.

    Raises:
        Unreachable: the store did not answer, or does not let us.
    """
    folder = f"v1/probe/{secrets.token_hex(8)}"
    try:
        begun = time.monotonic()
        first = objects.create(f"{folder}/one", b"1")
        yield Probed("write", first is not None, f"{_milliseconds(begun)} ms")
        begun = time.monotonic()
        piece = objects.read(f"{folder}/one", 0, 10)
        yield Probed("read", piece is not None and piece.content == b"1", f"{_milliseconds(begun)} ms")
        yield Probed("write again is refused", objects.create(f"{folder}/one", b"2") is None, "put if absent")
        yield _one_of_many(
            "one of many writers at once wins",
            lambda number: objects.create(f"{folder}/race{number}", secrets.token_bytes(8)),
        )
        second = objects.replace(f"{folder}/one", b"3", first or "")
        yield Probed("replace", second not in (None, first), "by its ETag")
        stale = objects.replace(f"{folder}/one", b"4", first or "")
        yield Probed("replace of what has changed is refused", stale is None, "by its ETag")
        yield _one_of_many("one of many replacers at once wins", _replacing(objects, f"{folder}/one", second or ""))
        content = os.urandom(_PROBE_BYTES)
        begun = time.monotonic()
        objects.create(f"{folder}/large", content)
        yield Probed("upload", True, f"{_rate(begun)} MB/s")
        begun = time.monotonic()
        pieces = [objects.read(f"{folder}/large", start, start + (4 << 20)) for start in (0, 4 << 20)]
        whole = b"".join(piece.content for piece in pieces if piece is not None)
        yield Probed("download in pieces", whole == content, f"{_rate(begun)} MB/s")
        yield Probed("list", len(objects.listed(f"{folder}/")) == 2 + _ROUNDS, "what was written is listed")
    finally:
        for listed in objects.listed(f"{folder}/"):
            objects.delete(f"{folder}/{listed.path.rpartition('/')[2]}")


def _one_of_many(name: str, write: Callable[[int], str | None]) -> Probed:
    """Have many threads do the same at once, several times; each time exactly one may succeed."""
    winners = []
    with ThreadPoolExecutor(_WRITERS) as threads:
        for number in range(_ROUNDS):
            written = list(threads.map(lambda _, number=number: write(number), range(_WRITERS)))
            winners.append(sum(version is not None for version in written))
    text = f"{_WRITERS} writers, {_ROUNDS} times: {', '.join(map(str, winners))} succeeded"
    return Probed(name, set(winners) == {1}, text)


def _replacing(objects: Objects, path: str, version: str) -> Callable[[int], str | None]:
    """Return what replaces the version that an object had when a round began, which the round before it wrote."""
    versions = {0: version}

    def replace(number: int) -> str | None:
        written = objects.replace(path, secrets.token_bytes(8), versions.get(number, ""))  # nobody won the round before
        if written is not None:
            versions[number + 1] = written
        return written

    return replace


def _milliseconds(begun: float) -> str:
    return f"{1000 * (time.monotonic() - begun):.0f}"


def _rate(begun: float) -> str:
    return f"{_PROBE_BYTES / 2**20 / max(time.monotonic() - begun, 1e-6):.0f}"


# -- graphs ----------------------------------------------------------------------------------------


def push(store: TieredStore, entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Publish graphs that this machine compiled.

    Args:
        store: a builder's.
        entries: graphs in it.

    Returns:
        Keys: ``published``; ``there``, which the fleet has already; ``left``, which another installation compiled,
        those that were fetched among them, or which cannot be read: for those nobody here can speak.

    Raises:
        Unreachable: the store did not answer.
    """
    done: dict[str, list[str]] = {"published": [], "there": [], "left": []}
    for entry in entries:
        artifact, key = entry.artifact, entry.path.stem
        if artifact is None or entry.problem is not None or not store.is_made_here(artifact):
            done["left"].append(key)
        elif not store.tier.publish(artifact):
            done["there"].append(key)
        else:
            done["published"].append(key)
    return done


def pull(store: TieredStore, wanted: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Fetch the fleet's graphs that are for certain machines.

    Args:
        store: takes them.
        wanted: of each fact about a graph (see ``Statement.about``) the values that it may have.

    Returns:
        Keys: ``fetched``; ``here``, which were here already; ``other``, for other machines; ``refused``.

    Raises:
        Unreachable: the store did not answer.
    """
    done: dict[str, list[str]] = {"fetched": [], "here": [], "other": [], "refused": []}
    for listed, statement in stated(store.tier):
        key = listed.path.rpartition("/")[2]
        if statement is None:
            done["refused"].append(key)
        elif any(statement.about.get(fact) not in values for fact, values in wanted.items()):
            done["other"].append(key)
        elif store.has(key):
            done["here"].append(key)
        else:
            done["refused" if store.find(key) is None else "fetched"].append(key)
    return done


def this_machine() -> dict[str, list[str]]:
    """Return which facts the graphs have that this Python could use, with those of its GPUs, if it sees any."""
    facts: dict[str, list[str]] = {
        "torch": [str(torch.__version__)],
        "python": [f"{sys.version_info.major}.{sys.version_info.minor}"],
        "os": [platform.system()],
        "machine": [platform.machine()],
    }
    if torch.cuda.is_available():
        capabilities = {torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())}
        facts["architecture"] = [f"sm_{major}{minor}" for major, minor in sorted(capabilities)]
    return facts


def signed_by(folder: Path, trust: Trust, key_id: str) -> list[str]:
    """Return the keys of the graphs in a store's folder that were fetched with a builder's signature.

    Raises:
        OSError: the key that they are sealed with is damaged.
    """
    found = []
    for path in sorted((folder / GRAPHS).glob(f"*{GRAPH_SUFFIX}")):
        if any(trust.fetched_from(artifact) == key_id for artifact in _manifests_of(path)):
            found.append(path.stem)
    return found


def _manifests_of(path: Path) -> list[Artifact]:
    """Return the graphs in a file without their parts; none where it cannot be read, for nobody loads it either."""
    try:
        with open_graphs(path) as artifacts:
            return [Artifact(each.manifest_text, each.seal, {}) for each in artifacts]
    except (ArtifactError, OSError):
        return []


def stated(tier: Tier) -> list[tuple[Listed, Statement | None]]:
    """Return every object that lies where graphs do, with what a believed signer says of it, if one does.

    Raises:
        Unreachable: the store did not answer.
    """
    found = tier.objects.listed("v1/graphs/")
    with ThreadPoolExecutor(_READERS) as threads:
        return list(
            zip(found, threads.map(lambda each: tier.statement(each.path.rpartition("/")[2]), found), strict=True)
        )


def prune(tier: Tier, days: float | None, limit: int | None, unbelieved: bool) -> list[str]:
    """Remove graphs from the store for every machine, the oldest first, with the notes about them.

    Args:
        tier: of the fleet.
        days: remove what was published longer ago; None for no such limit.
        limit: bytes that may remain; None for no such limit.
        unbelieved: remove what no believed key signed, too.

    Returns:
        Their keys.

    Raises:
        Unreachable: the store did not answer.
        OSError: what is unbelieved cannot be told: see ``Tier.refused``. Nothing is removed.
    """
    found = sorted(tier.objects.listed("v1/graphs/"), key=lambda listed: listed.written)
    keys = [listed.path.rpartition("/")[2] for listed in found]
    refused = _refused(tier, keys) if unbelieved else {}
    total, oldest = sum(listed.size for listed in found), time.time() - (days or 0) * _DAY_S
    removed = []
    for key, listed in zip(keys, found, strict=True):
        too_old = days is not None and listed.written < oldest
        too_much = limit is not None and total > limit
        if too_old or too_much or key in refused:
            # To judge them all takes long: by now a builder may have put a good graph in the place of this one.
            version = None if too_old or too_much else refused[key]
            if tier.objects.delete_if(f"v1/graphs/{key}", _is_still(listed, version)):
                _remove_lease(tier, key)
                removed.append(key)
                total -= listed.size
    for kind in ("calls", "options") if removed else ():
        for note in tier.objects.listed(f"v1/{kind}/"):
            *_, name, key = note.path.split("/")
            if key in removed and not tier.objects.exists(f"v1/graphs/{key}"):  # it may be published again by now
                tier.objects.delete(f"v1/{kind}/{name}/{key}")
    return removed


def _is_still(listed: Listed, version: str | None) -> Callable[[Looked], bool]:
    """Return what says whether an object is the one that was judged.

    Args:
        listed: as it was listed.
        version: by which it was judged; None if by when it was written, which clouds tell to the second only.
    """
    if version is not None:
        return lambda there: there.version == version
    return lambda there: there.written < listed.written + 1


def _remove_lease(tier: Tier, key: str) -> None:
    """Remove the lease of a graph that was removed, unless somebody may hold it.

    Whether a holder lives only who watches it can tell, and of a lease that this machine does not believe, nobody here.
    Those stay, until they have not been written for a day: they are in nobody's way.
    """
    seen, long_ago = tier.leases.look(key), time.time() - _DAY_S
    if seen is not None:
        given_back = seen.nonce != "" and seen.state != HELD
        version = seen.version
        tier.objects.delete_if(
            f"v1/leases/{key}",
            lambda there: there.version == version and (given_back or there.written < long_ago),
        )


def _refused(tier: Tier, keys: Sequence[str]) -> dict[str, str]:
    """Return the keys of graphs that nobody may use, and the version of each."""
    with ThreadPoolExecutor(_READERS) as threads:
        try:
            tier.keys.check_that_anybody_is_believed()
            refused = list(threads.map(tier.refused, keys))
        except OSError as error:
            raise OSError(f"nothing was removed: {error}") from error
    return {key: version for key, version in zip(keys, refused, strict=True) if version is not None}


def status(tier: Tier) -> dict[str, Any]:
    """Return what is in the store, for people and for JSON.

    Raises:
        Unreachable: the store did not answer.
        OSError: the list of keys is damaged.
    """
    found = stated(tier)
    kinds: Counter[tuple[str, ...]] = Counter()
    for _, statement in found:
        about = statement.about if statement else {}
        facts = (about.get(fact, "?") for fact in ("architecture", "torch", "target"))
        kinds[tuple(facts) if statement else ("refused", "", "")] += 1
    return {
        "url": tier.objects.url,
        "graphs": len(found),
        "mb": round(sum(listed.size for listed, _ in found) / 2**20, 1),
        "kinds": [
            {"architecture": architecture, "torch": torch, "target": target, "graphs": count}
            for (architecture, torch, target), count in sorted(kinds.items())
        ],
    }

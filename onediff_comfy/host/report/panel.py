"""What the editor's sidebar shows and does: graphs on disk and in memory, time saved, what ran eager."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...messages import message
from ...model_families import ALL_SIZES, GraphWords, describe
from ...store.descriptions import Description, described
from ..language import in_their_language
from ..process.process import library, metrics, store
from ..process.prompts import between_prompts
from .report import compiling_in_background, live_objects

# Who looks at a picture that has just come asks while the host still cleans up after it.
_PATIENCE = 5.0  # seconds


class Busy(Exception):
    """The host is running a prompt, which may be using the graphs; the message is for people."""


def panel() -> dict[str, Any]:
    """Return what the sidebar shows, as plain data for JSON. It reads the headers of all files, so it takes its time.

    Returns:
        ``graphs``, on disk or in memory, most recently used first; ``eager``, calls by reason in the person's
        language; ``saved_s``, seconds that calls were shorter than eager's; ``compiling``, if another process does;
        ``folder``, ``disk_bytes``, ``disk_limit``, ``memory_bytes`` and ``memory_limit``.
    """
    kept, live = described(store()), live_objects()
    served = _served(live)
    held, keys = library().cache.sizes(), {each.manifest.key for each in kept}
    graphs = [_kept(each, held, served) for each in kept]
    graphs += [_only_in_memory(key, held[key], served) for key in held if key not in keys]
    return {
        "graphs": graphs,
        "eager": {in_their_language(reason): count for reason, count in metrics().snapshot()["fallbacks"].items()},
        "saved_s": round(sum(graph["saved_s"] for graph in graphs), 3),
        "compiling": compiling_in_background(),
        "folder": str(store().folder),
        "disk_bytes": sum(each.nbytes for each in kept),
        "disk_limit": store().limit,
        "memory_bytes": sum(held.values()) + library().recordings.nbytes,
        "memory_limit": library().cache.budget,
    }


def remove(keys: Sequence[str]) -> int:
    """Remove graphs from disk and memory; return how many files went. Only what the folder that we write has.

    Raises:
        Busy: the host is running a prompt. Its next step would compile what is gone.
    """
    wanted = set(keys)
    found = [each for each in described(store()) if each.removable and each.manifest.key in wanted]
    with _unused():
        for each in found:
            library().cache.discard(each.manifest.key)
            store().remove(each.manifest.key)
    return len(found)


def clear() -> int:
    """Remove every graph from disk and memory; return how many files went.

    Raises:
        Busy: the host is running a prompt.
    """
    return remove([each.manifest.key for each in described(store())])


def free_memory() -> int:
    """Throw away what graphs and CUDA graph recordings hold in memory; return the bytes. It is loaded when needed.

    Raises:
        Busy: the host is running a prompt. A recording's memory must not go while the GPU replays it.
    """
    with _unused():
        return library().release() + library().cache.clear()


@contextlib.contextmanager
def _unused() -> Iterator[None]:
    """Keep the host from starting a prompt, so that nobody uses a graph.

    Raises:
        Busy: it is running one.
    """
    with between_prompts(_PATIENCE) as between:
        if not between:
            raise Busy(message("ComfyUI is making a picture that may use these graphs; try again when it is done"))
        yield


def _served(live: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return calls and seconds saved by graph key, of everything that is accelerated now."""
    found: dict[str, dict[str, float]] = {}
    for graph in (graph for thing in live for graph in thing["graphs"]):
        steps = [step["eager_ms"] - step["graph_ms"] for step in graph["steps"]]
        saved = graph["served"] * sum(steps) / len(steps) / 1000 if steps else 0.0
        known = found.setdefault(graph["key"], {"calls": 0, "saved_s": 0.0})
        known["calls"] += graph["served"]
        known["saved_s"] += saved
    return found


def _kept(each: Description, held: Mapping[str, int], served: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    manifest = each.manifest
    words = describe(manifest.target, manifest.shapes["axes"])
    return {
        **_counted(manifest.key, served),
        "family": in_their_language(words.family),
        "sizes": _sizes(words),
        "variant": words.variant,
        "engine": manifest.engine,
        "used": each.used,
        "disk_bytes": each.nbytes,
        "memory_bytes": held.get(manifest.key),
        "compile_s": manifest.compile_seconds,
        "removable": each.removable,
    }


def _only_in_memory(key: str, nbytes: int, served: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    made = [graph for graph in metrics().snapshot()["graphs"] if graph["key"] == key]
    words = describe(made[-1]["what"] if made else key[:12])
    return {
        **_counted(key, served),
        "family": in_their_language(words.family),
        "sizes": _sizes(words),
        "variant": words.variant,
        "engine": made[-1]["engine"] if made else "",
        "used": made[-1]["at"] if made else 0,
        "disk_bytes": None,
        "memory_bytes": nbytes,
        "compile_s": made[-1]["seconds"] if made else 0,
        "removable": False,
    }


def _sizes(words: GraphWords) -> str:
    """Return which sizes a graph serves, in the person's language."""
    return in_their_language(message("all sizes")) if words.sizes == ALL_SIZES else words.sizes


def _counted(key: str, served: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    known = served.get(key, {"calls": 0, "saved_s": 0.0})
    return {"key": key, "calls": int(known["calls"]), "saved_s": round(known["saved_s"], 3)}

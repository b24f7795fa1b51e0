"""What served an accelerated object's calls, what was slow about it and why: as data and as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ...messages import Message, joined, message
from ...serving.dispatcher import Dispatcher
from ...store.remote.tier_counters import fleet_counters
from ..adapters.adapter import dispatcher_of
from ..compatibility import KINDS, host_changes
from ..process.process import accelerated, library, metrics, store
from .reasons import size_in_their_words


def report(things: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of objects and of the process, as plain data for JSON.

    Args:
        things: the host's objects, by keys of ``compatibility.KINDS``.

    Returns:
        ``objects``, as of ``object_report`` for each of ``things``; ``process``, as of ``process_report``; and
        ``problems``, what this host no longer has that we rely on.
    """
    objects = [
        {"kind": KINDS[kind], "accelerated": False}
        if (dispatcher := dispatcher_of(kind, thing)) is None
        else {"kind": KINDS[kind], "accelerated": True, **object_report(dispatcher)}
        for kind, thing in things.items()
    ]
    return {"objects": objects, "process": process_report(), "problems": host_changes()}


def object_report(dispatcher: Dispatcher) -> dict[str, Any]:
    """Return what served the calls of one accelerated object since its node made it.

    Returns:
        ``served`` and ``eager``, numbers of calls; ``reused``, those of the served that took deep layers from an
        earlier step; ``fallbacks``, eager calls by reason; ``run_s``, seconds in compiled graphs, of blocks whose
        weights move from one call in eight; and ``graphs``, those that served it, most calls first, with the ``steps``
        of each: what calls of a size take eager and from it.
    """
    counted = dispatcher.metrics.snapshot()
    served, seconds = dispatcher.metrics.served_by(), dispatcher.times.seconds()
    speeds, origin = dispatcher.speeds(), accelerated().get(dispatcher)
    pixels = origin.pixels if origin is not None else 0
    made, held, evicted = _graphs_made(), library().cache.sizes(), metrics().evictions()
    graphs = [
        {
            "key": key,
            "served": calls,
            "run_s": round(seconds.get(key, 0.0), 3),
            "steps": [
                {
                    "call": size_in_their_words(speed.call, pixels),
                    "eager_ms": _milliseconds(speed.eager_s),
                    "graph_ms": _milliseconds(speed.graph_s),
                }
                for speed in speeds
                if speed.graph_key == key
            ],
            **_graph_report(key, made[key], held, evicted),
        }
        for key, calls in served.items()
    ]
    return {
        "served": counted["served"],
        "reused": counted["reused"],
        "eager": sum(counted["fallbacks"].values()),
        "fallbacks": counted["fallbacks"],
        "run_s": round(sum(seconds.values()), 3),
        "graphs": sorted(graphs, key=lambda graph: -graph["served"]),
    }


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)


def process_report() -> dict[str, Any]:
    """Return the counters of this process, and what its graphs hold in memory."""
    made, counted = _graphs_made(), metrics().snapshot()
    seconds = {
        how: sum(graph["seconds"] for graph in counted["graphs"] if graph["how"] == how)
        for how in ("compiled", "loaded")
    }
    return {
        **counted,
        "eager": sum(counted["fallbacks"].values()),
        "compile_s": round(seconds["compiled"], 3),
        "load_s": round(seconds["loaded"], 3),
        "recompiled": sum(_recompiled(records) for records in made.values()),
        "background": compiling_in_background(),
        "graphs_in_memory": len(library().cache),
        "graph_bytes": library().cache.nbytes,
        "recording_bytes": library().recordings.nbytes,
        "budget_bytes": library().cache.budget,
        "fleet": fleet_counters(store().counters),
    }


def compiling_in_background() -> bool:
    """Return True if another process compiles for this one now."""
    background = library().background
    return background is not None and background.busy()


def live_objects() -> list[dict[str, Any]]:
    """Return the ``object_report`` of everything that is accelerated now, with its kind and its node's id."""
    found = accelerated()
    dispatchers = [reference() for reference in found.keyrefs()]  # a copy: prompts run on another thread
    return [
        {"kind": origin.kind, "node": origin.node_id, **object_report(dispatcher)}
        for dispatcher in dispatchers
        if dispatcher is not None and (origin := found.get(dispatcher)) is not None
    ]


def _graphs_made() -> dict[str, list[dict[str, Any]]]:
    """Return what this process compiled and loaded, in order, by graph key."""
    made: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in metrics().snapshot()["graphs"]:
        made[record["key"]].append(record)
    return made


def _graph_report(
    key: str, records: list[dict[str, Any]], held: Mapping[str, int], evicted: Mapping[str, int]
) -> dict[str, Any]:
    def seconds(how: str) -> float:
        return round(sum(record["seconds"] for record in records if record["how"] == how), 3)

    return {
        "what": records[-1]["what"] if records else key[:12],
        "engine": records[-1]["engine"] if records else "",
        "compile_s": seconds("compiled"),
        "load_s": seconds("loaded"),
        "recompiled": _recompiled(records),
        "loads": sum(record["how"] == "loaded" for record in records),
        "evicted": evicted.get(key, 0),
        "in_memory": key in held,
        "bytes": held.get(key, 0),
    }


def _recompiled(records: list[dict[str, Any]]) -> int:
    return max(0, sum(record["how"] == "compiled" for record in records) - 1)


# -- as text -----------------------------------------------------------------------------------


def text_of(found: Mapping[str, Any]) -> Message:
    """Return a report as text for people: what came of it in a line, a few lines per object, then the process."""
    lines = [line for thing in found["objects"] for line in _object_lines(thing)]
    return joined("\n", [*headline(found["objects"]), *lines, *_process_lines(found["process"]), *found["problems"]])


def headline(objects: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return ``1.7x · 12.4 s saved · 0 calls eager`` of all objects that had calls; nothing where none had.

    Args:
        objects: as ``report`` has them.
    """
    called = [thing for thing in objects if thing["accelerated"] and thing["served"] + thing["eager"]]
    if not called:
        return []
    eager_s, graph_s = (sum(times) for times in zip(*map(_times, called), strict=True))
    parts: list[str] = []
    if graph_s:
        saved = eager_s - graph_s
        told = message("{seconds:.1f} s saved", seconds=saved)
        parts = [f"{eager_s / graph_s:.1f}x", told if saved >= 0 else message("{seconds:.1f} s lost", seconds=-saved)]
    count = sum(thing["eager"] for thing in called)
    return [joined(" · ", [*parts, message("{calls} eager", calls=_calls(count))])]


def _times(thing: Mapping[str, Any]) -> tuple[float, float]:
    """Return the seconds that an object's calls would have taken eager, and took, of those of which both are known."""
    eager_s = graph_s = 0.0
    for graph in thing["graphs"]:
        for step in graph["steps"]:
            calls = graph["served"] / len(graph["steps"])  # how many were of which size is not counted
            eager_s += calls * step["eager_ms"] / 1000
            graph_s += calls * step["graph_ms"] / 1000
    return eager_s, graph_s


def _object_lines(thing: Mapping[str, Any]) -> list[Message]:
    kind = thing["kind"]
    if not thing["accelerated"]:
        return [
            message(
                "{kind}: not accelerated. It did not come through a OneDiff speedup node, or that node says why it "
                "could not accelerate it.",
                kind=kind,
            )
        ]
    served, calls = thing["served"], thing["served"] + thing["eager"]
    if not calls:
        return [
            message(
                '{kind}: no calls yet. Connect what was made with it to "after", so that this runs last.',
                kind=kind,
            )
        ]
    lines = [
        message("{kind}: {served} of {calls} calls served by compiled graphs", kind=kind, served=served, calls=calls)
    ]
    if thing["reused"]:
        lines.append(_indented(message("{reused} of them by the step cache", reused=thing["reused"])))
    lines += [_indented(line) for graph in thing["graphs"] for line in _graph_lines(graph)]
    return lines + [
        _indented(message("{count} eager: {reason}", count=count, reason=reason))
        for reason, count in thing["fallbacks"].items()
    ]


def _graph_lines(graph: Mapping[str, Any]) -> list[Message]:
    size = f"{graph['bytes'] / 2**20:.1f} MB" if graph["in_memory"] else message("not in memory now")
    first = [joined(" · ", (graph["what"], graph["engine"], size)), ": ", _calls(graph["served"])]
    if graph["served"]:
        each = 1000 * graph["run_s"] / graph["served"]
        first.append(message(" in {seconds:.2f} s ({each:.1f} ms each)", seconds=graph["run_s"], each=each))
    if graph["compile_s"]:
        first.append(message("; compiled in {seconds:.1f} s", seconds=graph["compile_s"]))
    if graph["loads"]:
        first.append(message("; loaded in {seconds:.1f} s", seconds=graph["load_s"]))
    lines = [joined("", first)]
    if graph["recompiled"]:
        lines.append(_indented(message("compiled again: {count}", count=graph["recompiled"])))
    if graph["evicted"]:
        lines.append(_indented(message("left memory to make room: {count}", count=graph["evicted"])))
    lines += [_indented(_step_line(step)) for step in graph["steps"]]
    return lines


def _step_line(step: Mapping[str, Any]) -> Message:
    return message(
        "{call}: {graph_ms:.1f} ms, eager {eager_ms:.1f} ms ({gain:.2f}x)",
        call=step["call"],
        graph_ms=step["graph_ms"],
        eager_ms=step["eager_ms"],
        gain=step["eager_ms"] / step["graph_ms"],
    )


def _process_lines(process: Mapping[str, Any]) -> list[Message]:
    megabytes = {name: process[f"{name}_bytes"] >> 20 for name in ("graph", "recording", "budget")}
    held = message(
        "{graphs} in memory, {held} of {budget} MB",
        graphs=_graphs(process["graphs_in_memory"]),
        held=megabytes["graph"],
        budget=megabytes["budget"],
    )
    if process["recording_bytes"]:
        held = joined("", (held, message(" and {megabytes} MB of CUDA graphs", megabytes=megabytes["recording"])))
    return [
        message(
            "All together: {calls} served, {eager} eager; {held}",
            calls=_calls(process["served"]),
            eager=process["eager"],
            held=held,
        ),
        _indented(
            message(
                "{compiled} compiled ({compile_s:.1f} s), {recompiled} of them again; {loaded} loaded "
                "({load_s:.1f} s); {recorded} recorded; {evicted} evicted; {retired} retired; {failed} failed",
                **{name: process[name] for name in _COUNTED},
            )
        ),
    ]


_COUNTED = (
    *("compiled", "compile_s", "recompiled", "loaded", "load_s"),
    *("recorded", "evicted", "retired", "failed"),
)


def _indented(line: Message) -> Message:
    return joined("", ("  ", line))


def _calls(number: int) -> Message:
    return message("{number} call", number=number) if number == 1 else message("{number} calls", number=number)


def _graphs(number: int) -> Message:
    return message("{number} graph", number=number) if number == 1 else message("{number} graphs", number=number)

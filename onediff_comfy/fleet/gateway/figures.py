"""What a person or Prometheus sees of the fleet: workers, queues, graphs, and how often what happened."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .clients import Clients
from .journal import Ledger
from .link import Link
from .prompt import Prompt

_COUNTED = {
    "success": "prompts that were carried out",
    "error": "prompts that failed or were stopped",
    "retried": "prompts that were handed to another worker because theirs died",
    "recovered": "unfinished prompts of an earlier gateway that this one took over",
    "adopted": "those of them that a worker still had",
    "workers_lost": "workers that died",
    "journal_errors": "results or files that the journal could not keep",
}
_SECONDS = (0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800)
_NAME = re.compile(r"[a-zA-Z_]\w*", re.ASCII)  # what Prometheus takes
_GRAPH_FIELDS = ("what", "engine", "how", "seconds", "key")


class Figures:
    """Reads the gateway's parts when it is asked.

    Args:
        about: of the gateway itself: its process, its journal.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._about = dict(about)
        self._since = time.time()
        self._took: Counter[float] = Counter()
        self._sum = 0.0
        self._ledger: Ledger | None = None
        self._links: Mapping[str, Link] = {}
        self._clients: Clients | None = None

    def watch(self, ledger: Ledger, links: Mapping[str, Link], clients: Clients) -> None:
        """Say where the figures are."""
        self._ledger, self._links, self._clients = ledger, links, clients

    def took(self, seconds: float) -> None:
        """Count the seconds from a prompt's coming to its result."""
        self._took[next((bound for bound in _SECONDS if seconds <= bound), float("inf"))] += 1
        self._sum += seconds

    def status(self) -> dict[str, Any]:
        """Return what ``/fleet/status`` says.

        Returns:
            ``gateway``; ``counts``, by ``_COUNTED``; ``queue``, unfinished prompts by state; and ``workers``, with the
            prompts that each has, and the graphs that each compiled or loaded.
        """
        counts = self._ledger.counts if self._ledger else {}
        about = {**self._about, "up_s": round(time.time() - self._since, 1), "clients": len(self._clients or ())}
        return {
            "gateway": about,
            "counts": {name: counts.get(name, 0) for name in _COUNTED},
            "queue": self._queue(),
            "workers": [_worker(link) for _, link in sorted(self._links.items())],
        }

    def _queue(self) -> dict[str, int]:
        states = Counter(map(_state, self._ledger.open.values() if self._ledger else ()))
        return {state: states[state] for state in ("waiting", "handed", "running")}

    def prometheus(self) -> bytes:
        """Return the figures in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return bytes(generate_latest(registry))

    def collect(self) -> Iterable[Any]:
        """Return the metrics; called by prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        status = self.status()
        for name, text in _COUNTED.items():
            yield CounterMetricFamily(f"onediff_fleet_{name}", text, value=status["counts"][name])
        queue = GaugeMetricFamily("onediff_fleet_queue", "unfinished prompts", labels=["state"])
        for state, number in status["queue"].items():
            queue.add_metric([state], number)
        yield queue
        workers = GaugeMetricFamily("onediff_fleet_workers", "workers", labels=["state"])
        for state, number in Counter(worker["state"] for worker in status["workers"]).items():
            workers.add_metric([state], number)
        yield workers
        yield GaugeMetricFamily("onediff_fleet_clients", "open connections of /ws", value=status["gateway"]["clients"])
        yield HistogramMetricFamily(
            "onediff_fleet_prompt_seconds", "from a prompt's coming to its result", self._buckets(), self._sum
        )
        yield from self._worker_metrics(GaugeMetricFamily)

    def _buckets(self) -> list[tuple[str, float]]:
        bounds, total = (*_SECONDS, float("inf")), 0.0
        buckets: list[tuple[str, float]] = []
        for bound in bounds:
            total += self._took[bound]
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        return buckets

    def _worker_metrics(self, family: Any) -> Iterable[Any]:
        """Return each number of the workers' ``/onediff/report``."""
        families: dict[str, Any] = {}
        for link in self._links.values():
            for name, value in _numbers(link.report):
                made = families.setdefault(
                    name, family(f"onediff_worker_{name}", f"{name} of /onediff/report", labels=["worker"])
                )
                made.add_metric([link.name], value)
        return families.values()


def _numbers(report: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    """Find the numbers of a report, and those one level below. Reasons for fallbacks are texts, and only counted."""
    for name, value in report.items():
        if not _NAME.fullmatch(name):
            continue
        if isinstance(value, int | float) and abs(value) < 1 << 63:
            yield prefix + name, float(value)
        elif isinstance(value, dict) and not prefix and all(map(_NAME.fullmatch, value)):
            yield from _numbers(value, f"{name}_")


def _state(prompt: Prompt) -> str:
    return "waiting" if prompt.worker is None else "running" if prompt.started else "handed"


def _worker(link: Link) -> dict[str, Any]:
    prompts = [{"id": prompt.id, "state": _state(prompt)} for prompt in link.prompts.values()]
    report = link.report
    graphs, fallbacks = report.get("graphs"), report.get("fallbacks")
    listed = [graph for graph in graphs if isinstance(graph, dict)] if isinstance(graphs, list) else []
    return {
        **link.facts,
        "seen_s": round(time.monotonic() - link.seen, 1),
        "checkpoint": list(link.checkpoint or ()),
        "prompts": prompts,
        "graphs": [{name: graph.get(name) for name in _GRAPH_FIELDS} for graph in listed],
        "report": dict(_numbers(report)),
        "fallbacks": fallbacks if isinstance(fallbacks, dict) else {},
    }

"""Measures the coverage matrix: families × patches × engine, each cell compared with ComfyUI's own result.

    python tests/coverage/matrix.py COMFY_DIR CHECKPOINTS REPORT [--rows TEXT] [--break NAME]

Writes a report in JSON. A process of its own, because ComfyUI changes the interpreter it is imported into.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from patches import Row
    from scenes import Models, Scene

BOUND = 1e-4
"""Largest difference, as a share of the image's range, that is rounding: as pictures.assert_same_picture explains."""
VISIBLE = 1e-3
"""A patch that changes an image by less proves nothing."""
ORDERS = ("before the patch", "behind the patch")
"""Where the speedup node stands in the workflow."""


@dataclass(frozen=True)
class Cell:
    """What came out of one row for one family and engine.

    Attributes:
        difference: the largest, as a share of the image's range.
        effect: how much the patch itself changes the image, the same way.
        calls: how often the model was called.
        served: how often a compiled graph answered.
        fallbacks: how often ComfyUI's own code answered, by reason.
        exact: whether a graph for one set of sizes alone took part.
        captured: how often something was captured after the first scene, for rows of one graph.
        graphs_lost: graphs that failed or were retired.
        host_failure: with what ComfyUI itself failed, if it did: there is nothing to compare then.
    """

    row: str
    group: str
    family: str
    engine: str
    order: str
    difference: float
    effect: float
    inert: bool
    calls: int
    served: int
    fallbacks: dict[str, int]
    exact: bool
    captured: int
    graphs_lost: int
    seconds: float
    host_failure: str | None = None

    def faults(self) -> list[str]:
        """What is wrong with it; nothing should be."""
        if self.host_failure is not None:
            return []
        counted = self.served + sum(self.fallbacks.values())
        told = {
            f"off by {self.difference:.1e} of the range": not self.difference <= BOUND,  # it may be no number
            f"the patch changes the image by {self.effect:.1e} only": self.effect < VISIBLE and not self.inert,
            f"{counted} of {self.calls} calls are accounted for": counted != self.calls,
            f"captured or compiled {self.captured} times more": self.captured > 0,
            f"{self.graphs_lost} graphs failed": self.graphs_lost > 0,
        }
        return [fault for fault, is_so in told.items() if is_so]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comfy_dir")
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--rows", default="", help="only rows with this in their name")
    parser.add_argument("--families", nargs="*", help="only these")
    parser.add_argument("--engines", nargs="*", help="only these")
    parser.add_argument("--break", dest="broken", help="one of breakages.BREAKAGES")
    options = parser.parse_args()
    sys.argv = sys.argv[:1]  # the host parses the command line when it is imported
    sys.path.insert(0, options.comfy_dir)
    from comfy.cli_args import args

    args.cpu = args.use_pytorch_cross_attention = True
    logging.getLogger().setLevel(logging.ERROR)
    import torch
    from breakages import BREAKAGES

    if options.broken:
        BREAKAGES[options.broken].apply()
    with torch.inference_mode():  # as the host's executor runs every node
        cells = list(Matrix(options.checkpoints).measure(options.rows, options.families, options.engines))
    fields = [{**asdict(cell), "faults": cell.faults(), "bound": BOUND} for cell in cells]
    options.report.write_text(json.dumps(fields, indent=1))


class Matrix:
    """The cells of all rows, measured one after the other in this process.

    They share one library of graphs and what it learned, like workflows that follow each other, so
    that a graph borrowed from another row shows.
    """

    def __init__(self, checkpoints: Path) -> None:
        from scenes import FAMILIES, Models

        self._models = {name: Models(family, checkpoints) for name, family in FAMILIES.items()}
        self._ordinary: dict[str, torch.Tensor] = {}

    def measure(
        self, rows: str = "", families: Sequence[str] | None = None, engines: Sequence[str] | None = None
    ) -> Iterator[Cell]:
        from patches import ROWS

        for family, models in self._models.items():
            if families and family not in families:
                continue
            for row in ROWS:
                if family in row.families and rows in row.name:
                    tried = ("eager", "inductor") if family in row.compiled else ("eager",)
                    chosen = [engine for engine in tried if not engines or engine in engines]
                    yield from self._row(row, family, models, chosen)

    def _row(self, row: Row, family: str, models: Models, engines: Sequence[str]) -> Iterator[Cell]:
        from onediff_comfy.host.adapters.model import accelerate

        try:
            scenes = _sequence(row, models.scene())
            expected = [scene.eager_image() for scene in scenes]
        except Exception as error:  # without anything of ours
            for engine in engines:
                yield from (_failed_in_host(row, family, engine, order, error) for order in ORDERS)
            return
        ordinary = self._ordinary_image(family, models)
        effect = max(_difference(image, ordinary) for image, _ in expected if image.shape == ordinary.shape)
        for engine in engines:
            speedup = functools.partial(accelerate, engine=engine)
            before = _sequence(row, models.accelerated(speedup).scene())
            behind = [scene.on(speedup(scene.model)) for scene in scenes]
            for order, fast in zip(ORDERS, (before, behind), strict=True):
                yield self._cell(row, family, engine, order, fast, expected, effect)

    def _cell(
        self,
        row: Row,
        family: str,
        engine: str,
        order: str,
        scenes: Sequence[Scene],
        expected: Sequence[tuple[torch.Tensor, int]],
        effect: float,
    ) -> Cell:
        start, before = time.monotonic(), _snapshot()
        difference, afterwards = 0.0, None
        for scene, (image, _) in zip(scenes, expected, strict=True):
            difference = max(difference, _difference(scene.image(), image))
            afterwards = afterwards or _snapshot()
        now = _snapshot()
        counted = {name: now[name] - before[name] for name in ("served", "retired", "failed")}
        fallbacks = {
            reason: times - before["fallbacks"].get(reason, 0)
            for reason, times in now["fallbacks"].items()
            if times > before["fallbacks"].get(reason, 0)
        }
        broken = [reason for reason in fallbacks if "compiled graph failed" in reason]
        return Cell(
            row=row.name,
            group=row.group,
            family=family,
            engine=engine,
            order=order,
            difference=difference,
            effect=effect,
            inert=row.inert,
            calls=sum(calls for _, calls in expected),
            served=counted["served"],
            fallbacks=fallbacks,
            exact=any(map(_has_exact_graph, scenes)),
            captured=sum(now[name] - afterwards[name] for name in ("captured", "compiled")) if row.one_graph else 0,
            graphs_lost=counted["retired"] + counted["failed"] + len(broken),
            seconds=round(time.monotonic() - start, 2),
        )

    def _ordinary_image(self, family: str, models: Models) -> torch.Tensor:
        if family not in self._ordinary:
            self._ordinary[family] = models.scene().image()
        return self._ordinary[family]


def _failed_in_host(row: Row, family: str, engine: str, order: str, error: Exception) -> Cell:
    place = (row.name, row.group, family, engine, order)
    return Cell(*place, 0.0, 0.0, True, 0, 0, {}, False, 0, 0, 0.0, f"{type(error).__name__}: {error}")


def _sequence(row: Row, scene: Scene) -> list[Scene]:
    made = row.scenes(scene)
    return list(made) if isinstance(made, (list, tuple)) else [made]


def _has_exact_graph(scene: Scene) -> bool:
    from onediff_comfy.host.adapters.model import find_dispatcher
    from onediff_comfy.host.process.process import library

    dispatcher = find_dispatcher(scene.model)
    assert dispatcher is not None, "the speedup node's wrapper was lost"
    graphs = map(library().cache.get, dispatcher.graph_keys())
    return any(graph is not None and not graph.shapes.general for graph in graphs)


def _snapshot() -> dict[str, Any]:
    from onediff_comfy.host.process.process import metrics

    return metrics().snapshot()


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    span = float(expected.max() - expected.min())
    return float((actual - expected).abs().max()) / max(span, 1e-3)


if __name__ == "__main__":
    main()

"""Serves a call whose attention no trace can look into, from a folder of kept graphs, and prints what was done.

    python tests/unit/opaque_restarted.py FOLDER

Run by ``test_opaque_function.py``, in a process that has traced nothing before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from restarted import Keeping
from test_opaque_function import Served, of_scale

from onediff_comfy import engines
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.metrics import Metrics
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust


def main(folder: Path) -> None:
    store = GraphStore(folder / "cache", Trust(folder / "config"))
    engines.ENGINES["eager"] = Keeping()
    served = Served("eager", GraphLibrary(GraphCache(1 << 30), Metrics(), store))
    assert served(of_scale(2.0))
    figures = served.library.metrics.snapshot()
    json.dump({name: figures[name] for name in ("compiled", "loaded", "served")}, sys.stdout)


main(Path(sys.argv[1]))

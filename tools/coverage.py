"""What is accelerated, measured in ComfyUI: runs the coverage matrix and writes docs/coverage.md from what came out.

python -m tools.coverage [--write]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dev.environment import comfyui_path, repository

from .models.checkpoints import ensure_checkpoints

Cell = dict[str, Any]
"""What was measured in one cell: the fields of ``Cell`` in tests/coverage/matrix.py, and ``faults``."""

DOCUMENT = repository() / "docs" / "coverage.md"
CHECKPOINTS = ("sd15_deep", "sd15_inpaint", "sd15_control", "sdxl_deep", "sdxl_control", "flux_min")
FAMILIES = ("sd15", "sdxl", "flux", "flux scaled fp8", "sd15 inpainting")

_HEAD = """\
# What is accelerated, and what runs as ComfyUI runs it

<!-- Written by python -m tools.coverage --write from what it measured. Do not edit. -->

Each cell is a workflow that ran in ComfyUI {host}, on tiny models of random weights, on the CPU: once without
OneDiff Model Speedup, and with it before and behind the node in question. The pictures were compared; in no cell
did they differ by more than {bound:g} of their range.

- **accelerated**: compiled graphs answered every call of the model. In bold: also with the Inductor engine; the
  others with our capture and PyTorch's own kernels.
- **per size**: accelerated, but each size needs a graph of its own.
- **partly**: some calls ran as ComfyUI runs them, others were accelerated.
- **eager**: all calls ran as ComfyUI runs them, for the reason given below. The picture is right, only not faster.
- **fails**: ComfyUI fails without OneDiff Model Speedup too, in the way given below.
- **–**: the node is not made for this family.

{counted}
"""


def measure_all(folder: Path, timeout_s: float = 3400) -> list[Cell]:
    """Run the whole matrix, families beside each other.

    Raises:
        RuntimeError: some of it did not run to its end; has the output.
    """

    def of_family(name: str) -> list[Cell]:
        return measure(folder / f"{name}.json", "--families", name, timeout_s=timeout_s)

    _ensure_checkpoints()
    with ThreadPoolExecutor(max_workers=2) as workers:
        return [cell for cells in workers.map(of_family, FAMILIES) for cell in cells]


def _ensure_checkpoints() -> Path:
    folder = repository() / ".cache" / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    ensure_checkpoints(comfyui_path(), folder, CHECKPOINTS)
    return folder


def measure(report: Path, *arguments: str, timeout_s: float = 1700) -> list[Cell]:
    """Run the matrix in a process of its own.

    Args:
        report: where it writes what it measured.
        arguments: options of tests/coverage/matrix.py.

    Raises:
        RuntimeError: it did not run to its end; has the output.
    """
    comfy, folder = comfyui_path(), _ensure_checkpoints()
    script = repository() / "tests" / "coverage" / "matrix.py"
    with tempfile.TemporaryDirectory() as own:  # nothing that was compiled or learned before takes part
        names = ("ONEDIFF_CACHE_DIR", "ONEDIFF_CONFIG_DIR", "TORCHINDUCTOR_CACHE_DIR")
        folders = {name: str(Path(own) / name) for name in names}
        done = subprocess.run(
            [sys.executable, str(script), str(comfy), str(folder), str(report), *arguments],
            cwd=repository(),
            env={**os.environ, **folders, "PYTHONPATH": str(repository())},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the coverage matrix did not run to its end:\n{done.stdout[-1000:]}{done.stderr[-4000:]}")
    cells: list[Cell] = json.loads(report.read_text())
    return cells


def document(cells: Sequence[Cell]) -> str:
    """The text of docs/coverage.md for these cells."""
    from dev.environment import COMFYUI_VERSION

    reasons: list[str] = []
    states = {key: _state(of_pair, reasons) for key, of_pair in _pairs(cells).items()}
    families = list(dict.fromkeys(cell["family"] for cell in cells))
    counted = Counter(state.partition(" (")[0].strip("*") for state in states.values())
    told = ", ".join(f"{number} {state}" for state, number in counted.most_common())
    text = _HEAD.format(host=COMFYUI_VERSION, bound=cells[0]["bound"], counted=f"Of {len(states)}: {told}.")
    for group in dict.fromkeys(cell["group"] for cell in cells):
        text += f"\n## {group}\n\n| | {' | '.join(families)} |\n|---|{'---|' * len(families)}\n"
        for row in dict.fromkeys(cell["row"] for cell in cells if cell["group"] == group):
            text += f"| {row} | {' | '.join(states.get((row, family), '–') for family in families)} |\n"
    text += "\n## Reasons\n\n"
    return text + "".join(f"{_wrapped(f'{number}. {reason}')}\n" for number, reason in enumerate(reasons, 1))


def _wrapped(item: str) -> str:
    return textwrap.fill(item, 120, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False)


def _pairs(cells: Sequence[Cell]) -> dict[tuple[str, str], list[Cell]]:
    pairs: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        pairs.setdefault((cell["row"], cell["family"]), []).append(cell)
    return pairs


def _state(cells: Sequence[Cell], reasons: list[str]) -> str:
    """What a row is for a family; ``reasons`` collects why."""
    failed = [cell["host_failure"] for cell in cells if cell["host_failure"] is not None]
    found = list(dict.fromkeys([*failed, *(reason for cell in cells for reason in cell["fallbacks"])]))
    reasons.extend(reason for reason in found if reason not in reasons)
    numbers = ", ".join(str(reasons.index(reason) + 1) for reason in found)
    served = {engine: sum(cell["served"] for cell in cells if cell["engine"] == engine) for engine in _engines(cells)}
    if any(cell["faults"] for cell in cells):
        return "WRONG"
    if failed:
        return f"fails ({numbers})"
    if not any(served.values()):
        return f"eager ({numbers})"
    if found:
        return f"partly ({numbers})"
    state = "per size" if any(cell["exact"] for cell in cells) else "accelerated"
    return f"**{state}**" if served.get("inductor") else state


def _engines(cells: Sequence[Cell]) -> Iterator[str]:
    yield from dict.fromkeys(cell["engine"] for cell in cells)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write where asked to; see the module's docstring."""
    with tempfile.TemporaryDirectory() as folder:
        cells = measure_all(Path(folder))
    for cell in cells:
        for fault in cell["faults"]:
            print(f"{cell['family']}, {cell['row']}, {cell['engine']}, {cell['order']}: {fault}", file=sys.stderr)
    text = document(cells)
    if arguments == ["--write"]:
        DOCUMENT.write_text(text, encoding="utf-8")
    print(text)
    return any(cell["faults"] for cell in cells)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

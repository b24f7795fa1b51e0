"""Time sampling runs of a UNet that other nodes have put functions into: what they cost eager, and what ours.

    COMFYUI_PATH=... python -m benchmarks.patched --model sdxl --size 1024x1024 --steps 20
    ... python -m benchmarks.patched --model tiny_unet --variants eager,onediff-eager    on a CPU, to see that it runs

The patches are FreeU_V2, by ComfyUI's own node, and an image prompt as IP-Adapter makes it: keys and values of an image
beside those of the prompt, in every cross-attention, between two noise levels. Where COMFYUI_IPADAPTER_PLUS names a
folder that has ComfyUI_IPAdapter_plus, its own functions are called; else a stand-in of the same structure. Where
sageattention is installed, there is attention by it too. All patches and variants take turns, image by image. Options
and results are those of ``benchmarks.sampling``, one for each patch.

Graphs that take minutes to compile can be made before, by a process for each (``--patches FreeU_V2 --rounds 1``).
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from .files import Report
from .host import reported, start_host
from .sampling import Bench, arguments, ours_failed, print_table

MODELS = ("sdxl", "sd15", "tiny_unet")


def main() -> int:
    """Run the benchmark; write JSON, print a table for each patch. Ends with 1 if one of ours failed or ran eager."""
    options = arguments(str(__doc__), MODELS, _add_patches)
    start_host(cuda_malloc=not options.disable_cuda_malloc)
    reports = reported(lambda: _timed(options), options.output)["patches"]
    for name, report in reports.items():
        print(f"\n{name}", end="")
        print_table(report)
    return any(map(ours_failed, reports.values()))


def _add_patches(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--patches", type=lambda text: text.split(","), help="some of them alone; none is one")


def _timed(options: Any) -> Report:
    """The report of each patch, of benches that take turns."""
    from .patches import PACK, PATCHES  # not before the host has chosen PyTorch's allocator, which torch asks for once

    first = Bench(options)
    benches = {"none": first} | {
        name: Bench(options, lambda *_, patched=patched: patched(first.model)) for name, patched in PATCHES.items()
    }
    if options.patches is not None:
        benches = {name: benches[name] for name in options.patches}
    for bench in benches.values():
        bench.first_images()
    for _ in range(options.rounds):
        for bench in benches.values():
            bench.round()
    reports = {name: bench.report() for name, bench in benches.items()}
    maker = "ComfyUI_IPAdapter_plus" if PACK in os.environ else "stand-in"
    return {"environment": next(iter(reports.values()))["environment"], "image prompt by": maker, "patches": reports}


if __name__ == "__main__":
    sys.exit(main())

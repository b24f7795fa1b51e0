"""Graphs that were used last, loaded before a prompt asks for them.

    python latest_graphs.py COMFY_DIR CHECKPOINT make|found|others|damaged

``make`` leaves two graphs in the store. ``found`` loads them as the host waits, ``others`` does so where PyTorch
computes otherwise, ``damaged`` after a byte of each has changed. Prints as JSON how many graphs were
in memory, and what was counted, before an image and after it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

comfyui, checkpoint, what = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from tiny_flux import sampled  # noqa: E402

from onediff_comfy.folders import GRAPHS, cache_folder  # noqa: E402
from onediff_comfy.host.adapters.model import accelerate  # noqa: E402
from onediff_comfy.host.process import latest_graphs  # noqa: E402
from onediff_comfy.host.process.process import library, metrics  # noqa: E402


def made() -> dict[str, int]:
    found = metrics().snapshot()
    return {"there": len(library().cache), **{name: found[name] for name in ("loaded", "compiled")}}


def main() -> None:
    if what == "others":
        torch.set_float32_matmul_precision("high")
    if what == "damaged":
        folder = cache_folder()
        assert folder is not None
        for file in (folder / GRAPHS).iterdir():
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
    if what != "make":
        latest_graphs.load()
    before = made()
    if what in ("make", "found"):
        for dtype in (torch.float32, torch.bfloat16):
            model, *_ = comfy.sd.load_checkpoint_guess_config(
                checkpoint, output_vae=False, output_clip=False, model_options={"dtype": dtype}
            )
            sampled(accelerate(model, "inductor"), 1)
    sys.stdout.write(json.dumps({"before": before, "after": made()}) + "\n")


with torch.inference_mode():
    main()

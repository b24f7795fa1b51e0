"""One UNet step by eager, Inductor and OneFlow, in one process, in turn.

    .cache/oneflow/bin/python -m benchmarks.oneflow CHECKPOINT.safetensors --output FILE

Needs a Python that has OneFlow (``make test-oneflow`` makes one on a machine without a GPU) and ComfyUI
(``COMFYUI_PATH``). Runs unchanged on a CUDA machine; an engine that cannot serve its GPU is reported with its reason.
A step's time is the difference between a long and a short sampling run, divided by the difference in steps; of
several rounds, in which the engines take turns, the fastest counts: other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from .host import reported, start_host

ENGINES = ("eager", "inductor", "oneflow")
_SHORT, _LONG = 2, 8


def main() -> int:
    """Run the benchmark and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--pixels", type=int, default=256)
    parser.add_argument("--context", type=int, default=768, help="width of the text conditioning")
    parser.add_argument("--pooled", type=int, default=0, help="width of the pooled conditioning; 1280 for SDXL")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    start_host()
    import torch

    if not torch.cuda.is_available():
        import comfy.cli_args

        comfy.cli_args.args.use_pytorch_cross_attention = True
    reported(lambda: _measured(options), options.output)
    return 0


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    import comfy.sample
    import comfy.sd
    import torch

    from onediff_comfy.engines import choose
    from onediff_comfy.engines.base import EngineError
    from onediff_comfy.host.adapters.model import accelerate

    loaded = comfy.sd.load_checkpoint_guess_config(str(options.checkpoint), output_vae=False, output_clip=False)
    model = loaded[0]
    side = options.pixels // 8
    latent = torch.zeros(1, 4, side, side)
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(1))
    pooled = {"pooled_output": torch.zeros(1, options.pooled)} if options.pooled else {}
    prompt = [[torch.randn(1, 77, options.context, generator=torch.Generator().manual_seed(2)), pooled]]

    def seconds(chosen: Any, steps: int) -> float:
        start = time.perf_counter()
        comfy.sample.sample(
            chosen, noise, steps, 7.0, "euler", "normal", prompt, prompt, latent, seed=1, disable_pbar=True
        )
        return time.perf_counter() - start

    report: dict[str, Any] = {
        "checkpoint": options.checkpoint.name,
        "pixels": options.pixels,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "refused": {},
        "first_image_s": {},
        "ms_per_step": {},
    }
    models: dict[str, Any] = {}
    for engine in options.engines:
        try:
            choose(engine, model.load_device)
        except EngineError as error:
            report["refused"][engine] = str(error)
            continue
        models[engine] = model if engine == "eager" else accelerate(model, engine, None)
        report["first_image_s"][engine] = round(seconds(models[engine], _SHORT), 2)
    times: dict[str, list[float]] = {engine: [] for engine in models}
    for _ in range(options.rounds):
        for engine, chosen in models.items():
            short, long = seconds(chosen, _SHORT), seconds(chosen, _LONG)
            times[engine].append((long - short) / (_LONG - _SHORT))
    report["ms_per_step"] = {engine: round(1000 * min(values), 1) for engine, values in times.items()}
    return report


if __name__ == "__main__":
    sys.exit(main())

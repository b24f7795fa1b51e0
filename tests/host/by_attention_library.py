"""A MODEL in a ComfyUI that was started with an attention library, in this process.

    python by_attention_library.py COMFY_DIR CHECKPOINT sage|ck

The last is which start flag says so. The library is SageAttention's by either: hosts since autumn 2026 have the other.

Prints as JSON how far the pictures of an engine, that of the variable ENGINE, are from the host's, how far those are
from exact attention's, and what served. Without a GPU the library is the one in ``attention_library``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

comfyui, checkpoint, flag = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
import torch  # noqa: E402

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    sys.path.append(str(Path(__file__).with_name("attention_library")))
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = not ON_GPU
args.use_sage_attention = True
import comfy.ldm.modules.attention as attention  # noqa: E402
import comfy.sd  # noqa: E402
from tiny_flux import figures, sampled, with_lora  # noqa: E402

from onediff_comfy.host.adapters.model import accelerate, find_dispatcher  # noqa: E402


def picture(model: Any, seed: int, override: Any = None) -> torch.Tensor:
    if override is not None:
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = override
    return sampled(model, seed)


def exact(_chosen: Any, *given: Any, **options: Any) -> torch.Tensor:
    output: torch.Tensor = attention.attention_pytorch(*given, **options)
    return output


def called_once(fast: Any, model: Any) -> dict[str, float]:
    """How far pictures are off where another extension's attention draws numbers, or counts in a tensor.

    A graph calls it, and eager does, which the graph is compared with.
    """
    found = {}
    for name, attend in {"draws": drawing, "counts": counting}.items():
        states = []
        for each in (fast, model):
            torch.manual_seed(1)
            counted = torch.zeros(1)
            images = [picture(each, seed, functools.partial(attend, counted)) for seed in (1, 2)]
            states.append(torch.cat([*(image.flatten() for image in images), counted, torch.rand(1)]))
        ours, by_host = states
        found[name] = float((ours - by_host).abs().max())
    return found


def drawing(_counted: torch.Tensor, chosen: Any, *given: Any, **options: Any) -> torch.Tensor:
    output: torch.Tensor = chosen(*given, **options)
    return output * (1 + 0.01 * torch.rand(1))


def counting(counted: torch.Tensor, chosen: Any, *given: Any, **options: Any) -> torch.Tensor:
    counted.add_(1)
    output: torch.Tensor = chosen(*given, **options)
    return output * (1 + 0.01 * counted.to(output.device))


def main() -> None:
    assert attention.optimized_attention is attention.attention_sage
    args.use_sage_attention = False
    setattr(args, f"use_{flag}_attention", True)
    with torch.inference_mode():
        model = comfy.sd.load_checkpoint_guess_config(checkpoint, output_clip=False, output_vae=False)[0]
        fast = accelerate(model, os.environ.get("ENGINE", "eager"))
        exactly = picture(model, 1, exact)
        pairs = [(picture(fast, seed), picture(model, seed)) for seed in (1, 2)]
        pairs.append((picture(with_lora(fast, 0.5), 1), picture(with_lora(model, 0.5), 1)))
        pairs.append((picture(fast, 1, exact), exactly))
    dispatcher = find_dispatcher(fast)
    assert dispatcher is not None
    found = figures(dispatcher.metrics.snapshot(), pairs, exactly)
    with torch.inference_mode():
        found["called once"] = called_once(fast, model)
    found["served then"] = dispatcher.metrics.snapshot()["served"] - found["served"]
    sys.stdout.write(json.dumps(found) + "\n")


main()

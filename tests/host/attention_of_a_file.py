"""A MODEL whose file chooses the attention of its layers, as newer hosts let it, in this process.

    python attention_of_a_file.py COMFY_DIR CHECKPOINT pytorch|split

The last is the attention that ComfyUI is started with. Prints as JSON how far our pictures are from the host's, how far
those are from exact attention's, and what served.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

comfyui, checkpoint, started_with = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
import torch  # noqa: E402
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = True
setattr(args, f"use_{started_with}_cross_attention", True)
import comfy.ldm.flux.math as flux_math  # noqa: E402
import comfy.ldm.modules.attention as attention  # noqa: E402
import comfy.sd  # noqa: E402
from tiny_flux import figures, sampled  # noqa: E402


class ComfyAttention(torch.nn.Module):
    """As the host's of that name: the layer of a block that says which attention its file chose."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function


if not hasattr(attention, "ComfyAttention"):
    attention.ComfyAttention = ComfyAttention

from onediff_comfy.host.adapters.model import accelerate, find_dispatcher  # noqa: E402


@attention.wrap_attn
def coarse(q: Any, k: Any, v: Any, *given: Any, **options: Any) -> torch.Tensor:
    """Attend with queries and keys of few bits."""
    output: torch.Tensor = attention.attention_pytorch(_rounded(q), _rounded(k), v, *given, **options)
    return output


def _rounded(values: torch.Tensor) -> torch.Tensor:
    step = values.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 16
    return (values / step).round() * step


def preferring(function: Any, preferred: ComfyAttention) -> Any:
    """As the host's ``wrap_attn`` does it: an override in the options comes first, then what the layer prefers."""

    @functools.wraps(function)
    def attend(*given: Any, **options: Any) -> Any:
        override = (options.get("transformer_options") or {}).get("optimized_attention_override")
        if override is None and preferred.function is not None:
            return preferred.function(*given, **options)
        return function(*given, **options)

    return attend


def main() -> None:
    with torch.inference_mode():
        model = comfy.sd.load_checkpoint_guess_config(checkpoint, output_clip=False, output_vae=False)[0]
        exactly = sampled(model, 1)
        chosen = attention.ComfyAttention(coarse)
        model.model.diffusion_model.add_module("comfy_attention", chosen)
        flux_math.optimized_attention = preferring(flux_math.optimized_attention, chosen)
        fast = accelerate(model, "eager")
        pairs = [(sampled(fast, seed), sampled(model, seed)) for seed in (1, 1, 2)]
    dispatcher = find_dispatcher(fast)
    assert dispatcher is not None
    sys.stdout.write(json.dumps(figures(dispatcher.metrics.snapshot(), pairs, exactly)) + "\n")


main()

"""The tiny Flux checkpoint in a process that has imported ComfyUI: an image of it, and a LoRA on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import comfy.sample
import comfy.sd
import torch


def sampled(model: Any, seed: int, steps: int = 2, side: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    prompt = [[torch.randn(1, 77, 64, generator=generator), {"pooled_output": torch.randn(1, 32, generator=generator)}]]
    latent = torch.zeros(1, 16, side, side)
    noise = torch.randn(latent.shape, generator=generator)
    result = comfy.sample.sample(
        model, noise, steps, 1.0, "euler", "simple", prompt, prompt, latent, disable_pbar=True, seed=seed
    )
    assert isinstance(result, torch.Tensor)
    return result


def with_lora(model: Any, strength: float) -> Any:
    """``model`` with a LoRA on every matrix."""
    generator = torch.Generator().manual_seed(3)
    lora = {}
    for name, weight in model.model.diffusion_model.state_dict().items():
        if name.endswith(".weight") and weight.ndim == 2:
            layer = f"diffusion_model.{name.removesuffix('.weight')}"
            lora[f"{layer}.lora_up.weight"] = torch.randn(weight.shape[0], 4, generator=generator) * 0.2
            lora[f"{layer}.lora_down.weight"] = torch.randn(4, weight.shape[1], generator=generator) * 0.1
    return comfy.sd.load_lora_for_models(model, None, lora, strength, 0)[0]


def figures(
    counted: Mapping[str, Any], pairs: Sequence[Sequence[torch.Tensor]], exactly: torch.Tensor
) -> dict[str, Any]:
    """How far pictures are from the host's, how far the host's first is from exact attention's, and what served.

    Args:
        counted: a dispatcher's metrics.
        pairs: of pictures, ours and the host's.
        exactly: by exact attention, with the seed of the first pair.
    """
    plain = pairs[0][1]
    span = float(plain.max() - plain.min())
    return {
        "off": [float((ours - eager).abs().max()) / span for ours, eager in pairs],
        "rounded": float((plain - exactly).abs().max()) / span,
        **{name: counted[name] for name in ("served", "fallbacks", "recorded", "retired")},
    }

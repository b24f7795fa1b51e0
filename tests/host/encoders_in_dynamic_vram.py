"""CLIPs in Dynamic VRAM, whose text encoders are served from the pages that the host keeps their weights in.

    python encoders_in_dynamic_vram.py COMFY_DIR

Prints as JSON of each prompt how far it is from one of an ordinary CLIP, and what served it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

(comfyui,) = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
here = Path(__file__).resolve().parent
sys.path[:0] = [comfyui, str(here.parents[1]), str(here / "tiny_nodes")]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.model_management as memory  # noqa: E402
import comfy.sd  # noqa: E402
import pages_of_cpu  # noqa: E402
import text_encoders  # noqa: E402
import torch  # noqa: E402
from comfy.patcher_extension import CallbacksMP  # noqa: E402
from comfy.text_encoders.flux import FluxTokenizer, flux_clip  # noqa: E402
from pages_of_cpu import Pages, looked_at  # noqa: E402
from text_encoders import TinyTextEncoder  # noqa: E402

from onediff_comfy.host.adapters.text_encoder import accelerate_clip, find_clip_dispatcher, stacks_of  # noqa: E402
from onediff_comfy.host.weights import pinned_module  # noqa: E402
from tools.models.formats import checkpoint  # noqa: E402

# Of matrices that the host does not leave on the device.
_T5 = {"num_layers": 3, "d_model": 128, "d_ff": 256, "d_kv": 32, "num_heads": 4}
_CLIP_L = {"num_hidden_layers": 3, "intermediate_size": 256}
FAMILIES = ("sd15", "sdxl", "flux", "flux in 8 bits", SCALED := "flux in scaled 8 bits", "z_image")
_PARTS = {"clip_l": _CLIP_L, "t5xxl": _T5}
for name, dtype in (("flux", torch.float16), ("flux in 8 bits", torch.float8_e4m3fn)):
    parts = (flux_clip(dtype), FluxTokenizer, _PARTS)
    text_encoders._FAMILIES[name] = lambda parts=parts: parts
PROMPTS = ("a lighthouse on a cliff", "a (lighthouse:1.4) on a long road, " * 9)


def loaded(family: str) -> Any:
    """Return a CLIP, in Dynamic VRAM since that has begun, with weights that are not on the device."""
    clip = in_scaled_8_bits() if family == SCALED else TinyTextEncoder.execute(family, 0).args[0]
    if clip.patcher.is_dynamic():
        pages_of_cpu.off_device(clip.patcher)
    return clip


def in_scaled_8_bits() -> Any:
    """Return a Flux' CLIP as the host makes it of a file whose T5 has quantised layers."""
    weights = TinyTextEncoder.execute("flux", 0).args[0].cond_stage_model.state_dict()
    target = SimpleNamespace(params={}, clip=flux_clip(torch.float16, {"mixed_ops": True}), tokenizer=FluxTokenizer)
    options = {f"{name}_model_config": config for name, config in _PARTS.items()}
    return comfy.sd.CLIP(target, state_dict=checkpoint(weights, "fp8"), model_options=options)


def encoded(clip: Any, prompt: str) -> list[torch.Tensor]:
    """Return what a prompt becomes, as the host's node CLIPTextEncode asks for it."""
    ((embedding, extras),) = clip.encode_from_tokens_scheduled(clip.tokenize(prompt))
    return [embedding, *(extras[name] for name in sorted(extras) if isinstance(extras[name], torch.Tensor))]


def with_lora(clip: Any, strength: float) -> Any:
    """Return ``clip`` with a LoRA on every matrix of its stacks."""
    generator = torch.Generator().manual_seed(3)
    patches = {}
    for name, weight in clip.patcher.model.state_dict().items():
        if name.endswith(".weight") and weight.ndim == 2 and "embed" not in name and "shared" not in name:
            patches[name] = ("diff", (torch.randn(weight.shape, generator=generator) * 0.05,))
    clone = clip.clone()
    clone.add_patches(patches, strength)
    return clone


def with_norms(clip: Any) -> Any:
    """Return ``clip`` with other weights in its norms, put there whenever the host has loaded it: small ones alone."""

    def put(patcher: Any, *_: Any) -> None:
        for name, layer in patcher.model.named_modules():
            if "norm" in name and layer._parameters.get("weight") is not None:
                weight = (layer.weight.float() + 0.2).to(layer.weight.dtype)
                layer.weight = torch.nn.Parameter(weight, requires_grad=False)

    clone = clip.clone()
    clone.patcher.add_callback(CallbacksMP.ON_LOAD, put)
    return clone


def off(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, as a share of the range of what was expected."""
    pairs = zip(actual, expected, strict=True)
    return max(float((ours - host).abs().max() / (host.max() - host.min())) for ours, host in pairs)


def case(clip: Any, expected: Sequence[torch.Tensor], prompt: str = PROMPTS[0]) -> dict[str, Any]:
    dispatcher = find_clip_dispatcher(clip)
    assert dispatcher is not None
    actual, found = looked_at(dispatcher, clip.patcher, lambda: encoded(clip, prompt))
    return {"off": off(actual, expected), **found}


def of_family(family: str, expected: list[list[torch.Tensor]]) -> dict[str, Any]:
    """Prompts of one family, beside those of an ordinary CLIP; with a LoRA beside the host's own from Dynamic VRAM.

    In the call in which it adds a LoRA there the host computes with the sum, and later with what it keeps of it, as an
    ordinary CLIP does. So do we, but for 8 bits, of which that call is the host's.
    """
    memory.unload_all_models()
    clip, (first, other) = loaded(family), expected
    by_host = with_lora(loaded(family), 0.8)
    stronger = [encoded(by_host, PROMPTS[0]) for _ in range(2)]
    memory.unload_all_models()
    of_norms = encoded(with_norms(loaded(family)), PROMPTS[0])
    memory.unload_all_models()
    fast = accelerate_clip(clip, "eager")
    with_it = with_lora(fast, 0.8)
    found: dict[str, Any] = {
        "encoders": len(stacks_of(clip)),
        "shared": fast.patcher.model is clip.patcher.model,
        "effect": off(first, stronger[1]),
        "effect of norms": off(first, of_norms),
        "first": case(fast, first),
        "another prompt": case(fast, other, PROMPTS[1]),
        "norms": case(with_norms(fast), of_norms),
        "norms as they were": case(fast, first),
        "LoRA": case(with_it, [stronger["8 bits" not in family][0], *stronger[1][1:]]),
        "LoRA again": case(with_it, stronger[1]),
        "without it": case(fast, first),
    }
    fast.patcher.partially_unload(None, 1e30)
    found["taken away and back"] = case(fast, first)
    Pages.room = 1
    fast.patcher.partially_unload(None, 1e30)
    found["no room"] = case(fast, first)
    Pages.room = 1 << 20
    found["room again"] = case(fast, first)
    return found


def wrong_weights(expected: Sequence[torch.Tensor]) -> dict[str, Any]:
    """A prompt where what an image holds is not what the host computes with, as on a host that has moved on."""
    memory.unload_all_models()
    fast, right = accelerate_clip(loaded("flux"), "eager"), pinned_module.put
    pinned_module.put = lambda weights, found: right(  # type: ignore[assignment]
        weights, tuple(None if weight is None else weight * 1.5 for weight in found)
    )
    cases = {"wrong": case(fast, expected), "wrong again": case(fast, expected)}
    pinned_module.put = right
    return cases


def main() -> None:
    with torch.inference_mode():
        expected = {}
        for family in FAMILIES:
            plain = loaded(family)
            expected[family] = [encoded(plain, prompt) for prompt in PROMPTS]
        memory.unload_all_models()
        pages_of_cpu.begin()
        pinned_module.is_moved = lambda *_layer: False  # what has scales cannot say that it is on another device
        memory.text_encoder_device = memory.get_torch_device
        pages_of_cpu._Buffer.bytes = 256 << 20  # the host asks for embeddings of all tokens at once
        found = {family: of_family(family, expected[family]) for family in FAMILIES}
        wrong = wrong_weights(expected["flux"][0])
    sys.stdout.write(json.dumps({"families": found, **wrong}) + "\n")


if __name__ == "__main__":
    main()

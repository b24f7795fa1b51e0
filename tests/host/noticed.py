"""Replaces functions that ComfyUI's models call, as extensions do, and prints as JSON whether each is noticed.

    python noticed.py COMFY_DIR

Then it replaces whatever modules of ComfyUI have, one after the other, and compares with what the models are when they
are described anew: whatever changes that has to be noticed by those that are only compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

comfyui, STEP = sys.argv[1], int(sys.argv[2])
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.ldm.flux.math  # noqa: E402
import comfy.ldm.flux.model  # noqa: E402
import comfy.ldm.modules.attention  # noqa: E402
import comfy.ldm.modules.diffusionmodules.openaimodel as openai  # noqa: E402
import comfy.model_management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.model_prefetch  # noqa: E402
import comfy.ops  # noqa: E402
import torch  # noqa: E402

from onediff_comfy.capture.target.target import Target  # noqa: E402
from onediff_comfy.host.process.services import host_services  # noqa: E402

FLUX = comfy.ldm.flux.model.Flux(
    image_model="flux", in_channels=4, out_channels=4, vec_in_dim=8, context_in_dim=8, hidden_size=32, mlp_ratio=2.0,
    num_heads=2, depth=1, depth_single_blocks=1, axes_dim=[4, 6, 6], theta=10000, patch_size=2, qkv_bias=True,
    guidance_embed=False, txt_ids_dims=[], dtype=torch.float32, device="meta", operations=comfy.ops.manual_cast,
)  # fmt: skip
UNET = openai.UNetModel(
    image_size=8, in_channels=4, model_channels=32, out_channels=4, num_res_blocks=[1, 1], channel_mult=[1, 2],
    num_heads=2, use_spatial_transformer=True, transformer_depth=[1, 1], context_dim=16, transformer_depth_middle=1,
    transformer_depth_output=[1] * 4, dtype=torch.float32, device="meta", operations=comfy.ops.manual_cast,
)  # fmt: skip
REPLACED: tuple[tuple[torch.nn.Module, Any, str], ...] = (
    (FLUX, comfy.ldm.flux.math, "apply_rope"),
    (FLUX, comfy.ldm.flux.layers, "rope"),
    (FLUX, comfy.ldm.flux.math, "optimized_attention"),
    (FLUX, comfy.ldm.flux.model, "timestep_embedding"),
    (FLUX, comfy.ldm.common_dit, "pad_to_patch_size"),
    (FLUX, comfy.ldm.flux.layers.DoubleStreamBlock, "forward"),
    (FLUX, comfy.ops, "cast_bias_weight"),
    (FLUX, torch.nn.functional, "layer_norm"),
    (UNET, comfy.ldm.modules.attention, "optimized_attention"),
    (UNET, comfy.ldm.modules.attention.CrossAttention, "forward"),
    (UNET, openai, "timestep_embedding"),
    (UNET, openai, "apply_control"),
    (UNET, comfy.model_management, "cast_to"),
    (UNET, torch.nn.GroupNorm, "forward"),
)


def noticed(module: torch.nn.Module, holder: Any, name: str) -> list[bool]:
    """Whether the model is another while a function is replaced, and the same before and after."""
    target, original = Target(module, host_services().code), getattr(holder, name)
    assert target.refusal is None, target.refusal
    before = settled(target)
    setattr(holder, name, lambda *arguments, **_: arguments)
    during = target.is_current()
    setattr(holder, name, original)
    return [before, not during, target.is_current()]


def settled(target: Target) -> bool:
    """Whether the model is what it was, asked until it is compared by identity and not described anew."""
    return all(target.is_current() for _ in range(3))


def replaced_anywhere(module: torch.nn.Module, step: int) -> dict[str, Any]:
    """Replace every so manyth variable of ComfyUI's modules and member of their classes.

    Returns:
        How many, how many of them make another model when it is described anew, and those that go unnoticed then.
    """
    code = host_services().code
    target, held = Target(module, code), list[tuple[Any, str]]()
    assert settled(target)
    for name, of in sorted(sys.modules.items()):
        if name.partition(".")[0] == code.package and name not in code.machinery:
            kinds = [kind for kind in vars(of).values() if type(kind) is type and kind.__module__ == name]
            held += [(holder, key) for holder in (of, *kinds) for key in sorted(vars(holder)) if key[:2] != "__"]
    counted, unnoticed = 0, []
    for holder, key in held[::step]:
        value = vars(holder)[key]
        setattr(holder, key, (lambda *arguments, **_: arguments) if callable(value) else object())
        again = Target(module, code)
        differs = (again.fingerprint, again.refusal) != (target.fingerprint, target.refusal)
        counted += differs
        if differs and target.is_current():
            unnoticed.append(f"{holder.__name__}.{key}")
        setattr(holder, key, value)
        assert settled(target)
    return {"replaced": len(held[::step]), "differ": counted, "unnoticed": unnoticed}


def counted_bookkeeping(module: torch.nn.Module) -> list[str]:
    """Give every variable of the host's memory management another value, as it does itself, on a GPU most of all.

    Returns:
        Those that make another model.
    """
    code = host_services().code
    before = Target(module, code).fingerprint
    layer, counted, tried = next(module.children()), [], 0
    for name in sorted(code.machinery & sys.modules.keys()):
        for key, value in list(vars(sys.modules[name]).items()):
            if callable(value) or isinstance(value, ModuleType) or key.startswith("__"):
                continue
            for noted in ((layer, 1 << 30), (None, 0), {layer: [layer]}, [layer], 1 << 30, None, "text"):
                setattr(sys.modules[name], key, noted)
                tried += 1
                if Target(module, code).fingerprint != before:
                    counted.append(f"{name}.{key} = {noted}")
            setattr(sys.modules[name], key, value)
    assert tried > 100, tried
    return counted


def main() -> None:
    found: dict[str, Any] = {f"{k.__name__}.{name}": noticed(module, k, name) for module, k, name in REPLACED}
    # What memory management does with its own variables makes no other model.
    target = Target(UNET, host_services().code)
    comfy.model_management.current_loaded_models.append(None)
    comfy.model_management.TOTAL_PINNED_MEMORY = 1
    found["bookkeeping"] = [target.is_current()]
    found["counted bookkeeping"] = counted_bookkeeping(FLUX) + counted_bookkeeping(UNET)
    found["anything"] = replaced_anywhere(UNET, STEP)
    sys.stdout.write(json.dumps(found) + "\n")


main()

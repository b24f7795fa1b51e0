"""What other nodes do to a MODEL or its conditioning: the rows of the coverage matrix.

Nodes of the host's core are the host's own; patches of other extensions are written here as these
extensions write them. ComfyUI is imported inside the functions, so that tests can list the rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from scenes import Scene

UNETS = ("sd15", "sdxl")
FLUX = ("flux", "flux scaled fp8")
ALL = (*UNETS, *FLUX)


@dataclass(frozen=True)
class Row:
    """A patch, as what it makes of a scene without one.

    Attributes:
        scenes: one scene, or several that a person would make one after the other.
        families: to which it can be applied at all.
        one_graph: nothing may be captured or compiled after the first scene.
        compiled: the families for which it is also tried with Inductor.
        inert: the image may be that of the scene without it.
    """

    name: str
    group: str
    scenes: Callable[[Scene], Scene | Sequence[Scene]]
    families: tuple[str, ...] = ALL
    one_graph: bool = False
    compiled: tuple[str, ...] = ()
    inert: bool = False


def node(module: str, name: str, *inputs: Any, **widgets: Any) -> Any:
    """The first output of a node of the host's core."""
    return node_outputs(module, name, *inputs, **widgets)[0]


def node_outputs(module: str, name: str, *inputs: Any, **widgets: Any) -> Any:
    kind = getattr(importlib.import_module(module), name)
    if hasattr(kind, "execute"):  # V3
        output = kind.execute(*inputs, **widgets)
        return output if isinstance(output, tuple) else output.args
    return getattr(kind(), kind.FUNCTION)(*inputs, **widgets)


def _patched(module: str, name: str, **widgets: Any) -> Callable[[Scene], Scene]:
    return lambda scene: scene.on(node(f"comfy_extras.{module}", name, scene.model, **widgets))


# -- weights ---------------------------------------------------------------------------------------


def _lora(scene: Scene, seed: int = 1) -> dict[str, torch.Tensor]:
    """A LoRA of rank 4 on every matrix of every attention."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    lora = {}
    for name, weight in scene.model.model.diffusion_model.named_parameters():
        if weight.ndim == 2 and any(part in name for part in ("attn", "linear1", "linear2")):
            layer = f"diffusion_model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            lora[f"{layer}.lora_up.weight"] = torch.randn(rows, 4, generator=generator) * 0.5
            lora[f"{layer}.lora_down.weight"] = torch.randn(4, columns, generator=generator) * columns**-0.5
    return lora


def _with_lora(scene: Scene, strength: float, seed: int = 1) -> Scene:
    import comfy.sd

    return scene.on(comfy.sd.load_lora_for_models(scene.model, None, _lora(scene, seed), strength, 0)[0])


def _lora_changes(scene: Scene) -> list[Scene]:
    added = _with_lora(scene, 0.8)
    return [added, _with_lora(scene, 0.3), _with_lora(added, 0.6, seed=2), added]


def _lora_off_and_on(scene: Scene) -> list[Scene]:
    return [_with_lora(scene, 0.8), scene, _with_lora(scene, 0.8)]


def _hooks(scene: Scene, seed: int = 1) -> Any:
    import comfy.hooks

    hooks = comfy.hooks.create_hook_lora(_lora(scene, seed), 0.8, 0.0)
    keyframes = node("comfy_extras.nodes_hooks", "CreateHookKeyframe", 1.0, 0.0)
    keyframes = node("comfy_extras.nodes_hooks", "CreateHookKeyframe", 0.2, 0.4, keyframes)
    return node("comfy_extras.nodes_hooks", "SetHookKeyframes", hooks, keyframes)


def _lora_by_hooks(scene: Scene) -> Scene:
    positive = node("comfy_extras.nodes_hooks", "SetModelHooksOnCond", scene.positive, _hooks(scene))
    return replace(scene.with_prompt(positive), steps=4)


def _lora_by_hooks_in_halves(scene: Scene) -> Scene:
    """Two LoRAs, each on one half of the image, as with Cond Set Props."""
    import torch

    left = torch.zeros(1, *scene.size)
    left[:, :, : scene.size[1] // 2] = 1
    halves = [
        node("comfy_extras.nodes_hooks", "ConditioningSetProperties", scene.positive, 1.0, "default", mask, hooks)[0]
        for mask, hooks in ((left, _hooks(scene)), (1 - left, _hooks(scene, seed=2)))
    ]
    return scene.with_prompt(halves)


def _checkpoints(scene: Scene) -> list[Scene]:
    return [scene, scene.on(scene.models.other), scene]


# -- the model's own code --------------------------------------------------------------------------


def _attention_patch(scene: Scene) -> Scene:
    import torch

    generator = torch.Generator().manual_seed(3)
    model = scene.model.clone()
    shift = torch.randn(1, 1, scene.family.context, generator=generator)

    def patch(q: Any, k: Any, v: Any, extra_options: Any) -> Any:
        return q, k + shift.to(k), v + 0.3 * shift.to(v)

    model.set_model_attn2_patch(patch)
    return scene.on(model)


def _self_attention_patch(scene: Scene) -> Scene:
    model = scene.model.clone()
    # A UNet hands over three tensors, Flux named arguments.
    if "flux" in type(scene.model.model.diffusion_model).__module__:
        model.set_model_attn1_patch(lambda q, k, v, pe=None, **_: {"q": q * 1.5, "k": k, "v": v, "pe": pe})
    else:
        model.set_model_attn1_patch(lambda q, k, v, extra_options: (q * 1.5, k, v))
    return scene.on(model)


def _output_patch(scene: Scene, strength: float = 1.2) -> Scene:
    model = scene.model.clone()
    model.set_model_attn1_output_patch(lambda out, extra_options: out * strength)
    return scene.on(model)


def _two_patches(scene: Scene) -> list[Scene]:
    """Two models of one architecture that take turns, and the plain one between them."""
    one, other = _output_patch(scene), _self_attention_patch(scene)
    return [scene, one, other, scene, other, one]


def _ropes(scene: Scene) -> list[Scene]:
    """The same with numbers that a graph can take: each has a graph of its own."""

    def scaled(scale: float) -> Scene:
        values = {"scale_x": scale, "shift_x": 2.0, "scale_y": 1.0, "shift_y": 0.0, "scale_t": 1.0, "shift_t": 0.0}
        return _patched("nodes_rope", "ScaleROPE", **values)(scene)

    one, other = scaled(1.5), scaled(3.0)
    return [one, scene, other, one, other]


def _image_prompt(scene: Scene, seed: int = 4, weight: float = 0.7) -> Scene:
    """As IP-adapter extensions do: keys and values of an image, beside those of the prompt."""
    import torch
    from comfy.ldm.modules.attention import optimized_attention

    features = torch.randn(1, 4, 1, generator=torch.Generator().manual_seed(seed))

    class ImagePrompt:
        def __init__(self, features: torch.Tensor) -> None:
            self.features = features

        def __call__(self, q: Any, k: Any, v: Any, extra_options: Any) -> Any:
            heads = extra_options["n_heads"]
            image = self.features.to(q).expand(q.shape[0], -1, q.shape[-1]).contiguous()
            prompted = optimized_attention(q, k, v, heads)
            return prompted + weight * optimized_attention(q, image, image * 0.5, heads)

    model = scene.model.clone()
    for block in range(9):
        for place in ("input", "output"):
            model.set_model_attn2_replace(ImagePrompt(features), place, block)
    model.set_model_attn2_replace(ImagePrompt(features), "middle", 0)
    return scene.on(model)


def _image_prompts(scene: Scene) -> list[Scene]:
    """Another image, another weight, and none again, in one workflow."""
    first, second = _image_prompt(scene), _image_prompt(scene, seed=8)
    return [first, second, scene, _image_prompt(scene, weight=0.2), first]


def _block_replace(scene: Scene) -> Scene:
    def patch(arguments: Any, extra: Any) -> Any:
        out = extra["original_block"](arguments)
        return {**out, "img": out["img"] * 1.1}

    model = scene.model.clone()
    model.set_model_patch_replace(patch, "dit", "double_block", 0)
    return scene.on(model)


def _attention_override(scene: Scene) -> Scene:
    """As SageAttention extensions do; this one also sharpens, so that it shows."""

    def override(attention: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        return attention(q * 1.3, *args, **kwargs)

    model = scene.model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = override
    return scene.on(model)


def _hypernetwork(scene: Scene) -> Scene:
    """The host's node reads a file by name: what it does with the file, on one made here."""
    import tempfile

    import torch
    from comfy_extras.nodes_hypernetwork import load_hypernetwork_patch

    generator = torch.Generator().manual_seed(6)
    context = scene.family.context
    layers = [
        {
            "linear.0.weight": torch.randn(context, context, generator=generator) * context**-0.5,
            "linear.0.bias": torch.zeros(context),
        }
        for _ in "kv"
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hypernetwork.pt"
        torch.save({context: layers}, file)
        patch = load_hypernetwork_patch(str(file), 0.5)
    model = scene.model.clone()
    model.set_model_attn1_patch(patch)
    model.set_model_attn2_patch(patch)
    return scene.on(model)


def _replaced_forward(scene: Scene) -> list[Scene]:
    """As extensions do that edit one layer: an object patch in place of its forward."""
    model = scene.model.clone()
    layers = scene.model.model.diffusion_model.named_modules()
    name, layer = next(pair for pair in layers if pair[0].endswith(("attn1.to_q", "img_attn.qkv")))
    forward = type(layer).forward  # the layer's own may be the patch of the scene before
    model.add_object_patch(f"diffusion_model.{name}.forward", lambda *args: forward(layer, *args) * 1.3)
    return [scene.on(model), scene]


# -- around the model ------------------------------------------------------------------------------


def _function_wrapper(scene: Scene) -> Scene:
    model = scene.model.clone()
    model.set_model_unet_function_wrapper(
        lambda apply, args: apply(args["input"] * 1.02, args["timestep"], **args["c"]) * 0.97
    )
    return scene.on(model)


def _forward_wrapper(scene: Scene) -> Scene:
    from comfy.patcher_extension import WrappersMP

    def wrapper(executor: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(x * 1.02, *args, **kwargs) * 0.97

    model = scene.model.clone()
    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "another extension", wrapper)
    return scene.on(model)


def _timesteps_in_double(scene: Scene) -> list[Scene]:
    """The same numbers in another dtype, in turns with the usual one."""
    from comfy.patcher_extension import WrappersMP

    def wrapper(executor: Any, x: Any, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(x, timestep.double(), *args, **kwargs)

    model = scene.model.clone()
    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "another extension", wrapper)
    return [scene, scene.on(model), scene]


def _options_of_an_extension(scene: Scene) -> Scene:
    """An option that no model reads, whose value no graph could take."""
    model = scene.model.clone()
    model.model_options["transformer_options"]["another extension"] = object()
    return scene.on(model)


def _torch_compile(scene: Scene) -> Scene:
    """What the host's TorchCompileModel does, without its slow backend."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    model = scene.model.clone()
    set_torch_compile_wrapper(model, backend="eager")
    return scene.on(model)


def _differential(scene: Scene) -> Scene:
    import torch

    patched = _patched("nodes_differential_diffusion", "DifferentialDiffusion", strength=0.7)(scene)
    mask = torch.linspace(0, 1, scene.size[1]).expand(1, 1, *scene.size).contiguous()
    generator = torch.Generator().manual_seed(7)
    latent = torch.randn(1, scene.family.latent_channels, *scene.size, generator=generator)
    return replace(patched, mask=mask, latent=latent, steps=3)


def _inpainting(scene: Scene) -> Scene:
    """What InpaintModelConditioning adds to the prompts, without the VAE."""
    import node_helpers
    import torch

    generator = torch.Generator().manual_seed(8)
    mask = torch.zeros(1, 1, scene.size[0] * 8, scene.size[1] * 8)
    mask[..., : scene.size[1] * 4] = 1
    latent = torch.randn(1, scene.family.latent_channels, *scene.size, generator=generator)
    values = {"concat_latent_image": latent, "concat_mask": mask}
    prompts = (node_helpers.conditioning_set_values(p, values) for p in (scene.positive, scene.negative))
    return replace(scene.with_prompt(*prompts), latent=latent, mask=mask)


def _cached(scene: Scene, name: str) -> Scene:
    options = {"reuse_threshold": 5.0, "start_percent": 0.15, "end_percent": 0.95, "verbose": False}
    return replace(_patched("nodes_easycache", name, **options)(scene), steps=6)


def _compute_dtypes(scene: Scene) -> list[Scene]:
    return [scene, _patched("nodes_model_advanced", "ModelComputeDtype", dtype="bf16")(scene), scene]


# -- conditioning ----------------------------------------------------------------------------------


def _area(scene: Scene) -> Scene:
    from scenes import prompt

    part = node("nodes", "ConditioningSetArea", prompt(scene.family, 3), 64, 32, 16, 16, 1.0)
    return scene.with_prompt(scene.positive + part)


def _masked(scene: Scene, bounds: str = "default") -> Scene:
    import torch
    from scenes import prompt

    mask = torch.zeros(1, scene.size[0] * 8, scene.size[1] * 8)
    mask[:, 16:48, 24:80] = 1
    part = node("nodes", "ConditioningSetMask", prompt(scene.family, 3), mask, bounds, 0.8)
    return scene.with_prompt(scene.positive + part)


def _timestep_range(scene: Scene) -> Scene:
    from scenes import prompt

    early = node("nodes", "ConditioningSetTimestepRange", scene.positive, 0.0, 0.5)
    late = node("nodes", "ConditioningSetTimestepRange", prompt(scene.family, 3, tokens=154), 0.5, 1.0)
    return replace(scene.with_prompt(early + late), steps=4)


def _sizes(scene: Scene) -> list[Scene]:
    from scenes import prompt

    taller = replace(scene, size=(16, 8))
    long = scene.with_prompt(prompt(scene.family, 3, tokens=154))
    return [scene, taller, replace(scene, batch=3), long, replace(scene, cfg=1.0), scene]


def _controlled(scene: Scene, strength: float = 0.8, start: float = 0.0, end: float = 1.0, seed: int = 1) -> Scene:
    import torch

    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(1, scene.size[0] * 8, scene.size[1] * 8, 3, generator=generator)
    positive, negative = node_outputs(
        *("nodes", "ControlNetApplyAdvanced", scene.positive, scene.negative, scene.models.control(), image),
        *(strength, start, end),
    )
    return replace(scene.with_prompt(positive, negative), steps=3)


def _control_strengths(scene: Scene) -> list[Scene]:
    """More and less of it, none, and again."""
    return [_controlled(scene, 0.8), _controlled(scene, 0.3), _controlled(scene, 0.0), _controlled(scene, 0.8, seed=2)]


def _control_part(scene: Scene) -> Scene:
    return _controlled(scene, 0.8, start=0.3, end=0.7)


def _control_chained(scene: Scene) -> Scene:
    return _controlled(_controlled(scene, 0.5), 0.4, seed=2)


def _gligen(scene: Scene) -> Scene:
    """What GLIGENTextBoxApply adds to the prompt, with a GLIGEN model of random weights for this UNet."""
    import comfy.model_management
    import comfy.model_patcher
    import torch
    from comfy.gligen import GatedSelfAttentionDense, Gligen, PositionNet

    torch.manual_seed(9)
    fusers = [
        GatedSelfAttentionDense(block.norm1.weight.shape[0], scene.family.context, 8, block.norm1.weight.shape[0] // 8)
        for _, block in scene.model.model.diffusion_model.named_modules()
        if type(block).__name__ == "BasicTransformerBlock"
    ]
    gligen = Gligen(fusers, PositionNet(scene.family.context, scene.family.context), scene.family.context)
    for weight in gligen.parameters():
        torch.nn.init.normal_(weight, 0, 0.5 if weight.ndim < 2 else weight[0].numel() ** -0.5)
    device = comfy.model_management.get_torch_device()
    loaded = comfy.model_patcher.CoreModelPatcher(gligen, load_device=device, offload_device=device)
    box = (torch.randn(1, scene.family.context), 4, 6, 2, 3)
    return scene.with_prompt(
        [[text, {**extras, "gligen": ("position", loaded, [box])}] for text, extras in scene.positive]
    )


# -- the rows --------------------------------------------------------------------------------------

_PLAIN, _WEIGHTS, _CODE, _AROUND, _CONDITIONING = (
    "Nothing special",
    "Other weights",
    "Patches inside the model",
    "Patches around the model",
    "Conditioning",
)


def _downscale(scene: Scene) -> Scene:
    values = {"block_number": 3, "downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 0.6}
    methods = {"downscale_after_skip": True, "downscale_method": "bicubic", "upscale_method": "bicubic"}
    return _patched("nodes_model_downscale", "PatchModelAddDownscale", **values, **methods)(scene)


def _skipped_layers(scene: Scene) -> Scene:
    values = {"scale": 3.0, "start_percent": 0.0, "end_percent": 0.9, "double_layers": "0", "single_layers": "0"}
    return _patched("nodes_slg", "SkipLayerGuidanceDiT", **values)(scene)


_FREEU = _patched("nodes_freelunch", "FreeU", b1=1.1, b2=1.2, s1=0.9, s2=0.2)
_FREEU_V2 = _patched("nodes_freelunch", "FreeU_V2", b1=1.3, b2=1.4, s1=0.9, s2=0.2)
_HYPERTILE = _patched("nodes_hypertile", "HyperTile", tile_size=32, swap_size=2, max_depth=0, scale_depth=False)
_MULTIPLY = _patched("nodes_attention_multiply", "UNetCrossAttentionMultiply", q=1.2, k=1.1, v=0.9, out=1.1)
_V_PREDICTION = _patched("nodes_model_advanced", "ModelSamplingDiscrete", sampling="v_prediction", zsnr=True)
_EDM = _patched("nodes_model_advanced", "ModelSamplingContinuousEDM", sampling="eps", sigma_max=20.0, sigma_min=0.1)
_SHIFT = _patched("nodes_model_advanced", "ModelSamplingFlux", max_shift=4.0, base_shift=0.5, width=1024, height=1024)

SD15 = ("sd15",)
BOTH = ("sd15", *FLUX)

ROWS: tuple[Row, ...] = (
    Row("sizes, batches, prompt lengths, cfg", _PLAIN, _sizes, inert=True),
    Row("LoRA: added, strength, two, one again", _WEIGHTS, _lora_changes, one_graph=True, compiled=SD15),
    Row("LoRA: on, off, on", _WEIGHTS, _lora_off_and_on, one_graph=True, compiled=SD15),
    Row("LoRA scheduled by hooks", _WEIGHTS, _lora_by_hooks, one_graph=True, compiled=SD15),
    Row("LoRAs by hooks, one for each half", _WEIGHTS, _lora_by_hooks_in_halves, BOTH, one_graph=True),
    Row("another checkpoint and back", _WEIGHTS, _checkpoints, one_graph=True, compiled=SD15),
    Row("UNetCrossAttentionMultiply", _WEIGHTS, _MULTIPLY, SD15, one_graph=True),
    Row("FreeU", _CODE, _FREEU, SD15),
    Row("FreeU_V2", _CODE, _FREEU_V2, UNETS),
    Row("HyperTile", _CODE, _HYPERTILE, SD15),
    Row("PatchModelAddDownscale (deep shrink)", _CODE, _downscale, SD15),
    Row("TomePatchModel", _CODE, _patched("nodes_tomesd", "TomePatchModel", ratio=0.3), SD15),
    Row("hypernetwork", _CODE, _hypernetwork, SD15),
    Row(
        "SelfAttentionGuidance", _CODE, _patched("nodes_sag", "SelfAttentionGuidance", scale=0.5, blur_sigma=2.0), SD15
    ),
    Row("PerturbedAttentionGuidance", _CODE, _patched("nodes_pag", "PerturbedAttentionGuidance", scale=3.0), UNETS),
    Row("SkipLayerGuidanceDiT", _CODE, _skipped_layers, FLUX),
    Row("NAGuidance", _CODE, _patched("nodes_nag", "NAGuidance", nag_scale=5.0, nag_alpha=0.5, nag_tau=2.5), BOTH),
    Row("ScaleROPE: two in one workflow", _CODE, _ropes, FLUX),
    Row("attention patch: attn1_patch", _CODE, _self_attention_patch, BOTH),
    Row("attention patch: attn1_output_patch", _CODE, _output_patch, BOTH),
    Row("attention patch: attn2_patch", _CODE, _attention_patch, SD15),
    Row("two attention patches in one workflow", _CODE, _two_patches, BOTH),
    Row("image prompt (IP-adapter): attn2_replace", _CODE, _image_prompt, UNETS),
    Row("image prompts: several in one workflow", _CODE, _image_prompts, SD15),
    Row("block replaced: patches_replace dit", _CODE, _block_replace, FLUX),
    Row("optimized_attention_override", _CODE, _attention_override, BOTH),
    Row("forward of a layer replaced, and put back", _CODE, _replaced_forward, BOTH),
    Row("GLIGEN", _CODE, _gligen, SD15),
    Row("RescaleCFG", _AROUND, _patched("nodes_model_advanced", "RescaleCFG", multiplier=0.7), UNETS),
    Row("ModelSamplingDiscrete", _AROUND, _V_PREDICTION, SD15),
    Row("ModelSamplingContinuousEDM", _AROUND, _EDM, SD15),
    Row("ModelSamplingFlux", _AROUND, _SHIFT, FLUX),
    Row("DifferentialDiffusion", _AROUND, _differential),
    Row("FreSca", _AROUND, _patched("nodes_fresca", "FreSca", scale_low=1.0, scale_high=1.5, freq_cutoff=2), BOTH),
    Row("CFGZeroStar", _AROUND, _patched("nodes_cfg", "CFGZeroStar"), BOTH),
    Row("TCFG", _AROUND, _patched("nodes_tcfg", "TCFG"), BOTH),
    Row("APG", _AROUND, _patched("nodes_apg", "APG", eta=0.8, norm_threshold=2.0, momentum=0.3), BOTH),
    Row("EasyCache", _AROUND, lambda scene: _cached(scene, "EasyCacheNode"), FLUX),
    Row("LazyCache", _AROUND, lambda scene: _cached(scene, "LazyCacheNode"), FLUX),
    Row("set_model_unet_function_wrapper", _AROUND, _function_wrapper, BOTH),
    Row("another extension's DIFFUSION_MODEL wrapper", _AROUND, _forward_wrapper, BOTH),
    Row("another extension's timesteps in float64", _AROUND, _timesteps_in_double, FLUX, inert=True),
    Row("another extension's option that no model reads", _AROUND, _options_of_an_extension, FLUX, inert=True),
    Row("inpainting model (9 channels)", _CONDITIONING, _inpainting, ("sd15 inpainting",)),
    Row("area", _CONDITIONING, _area),
    Row("mask", _CONDITIONING, _masked, BOTH),
    Row("mask bounds", _CONDITIONING, lambda scene: _masked(scene, "mask bounds"), BOTH),
    Row("timestep range, prompts of two lengths", _CONDITIONING, _timestep_range, BOTH),
    Row("ControlNet: strengths, off, another image", _CONDITIONING, _control_strengths, BOTH),
    Row("ControlNet: start and end", _CONDITIONING, _control_part, BOTH),
    Row("ControlNet: two chained", _CONDITIONING, _control_chained, BOTH),
    # The last, for what they do to a model's layers lasts: later rows would be captured anew. Of a UNet, bfloat16
    # differs from itself by as much as from float32, depending on the order of sums.
    Row("ModelComputeDtype: bf16 and back", _AROUND, _compute_dtypes, FLUX),
    Row("torch.compile wrapper (backend eager)", _AROUND, _torch_compile, FLUX, inert=True),
)

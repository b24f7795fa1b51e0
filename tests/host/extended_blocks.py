"""What extensions do to a MODEL in Dynamic VRAM that does not fit, beside the host's own pictures of the same.

    python extended_blocks.py COMFY_DIR CHECKPOINT

Prints as JSON for each of them how far our pictures are off, how many calls were served, and for how many a graph was
asked for.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

comfyui, checkpoint = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
import torch  # noqa: E402
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.model_management as memory  # noqa: E402
import comfy.sd  # noqa: E402
import pages_of_cpu  # noqa: E402
from tiny_flux import sampled, with_lora  # noqa: E402

from onediff_comfy.host.adapters.model import accelerate, find_dispatcher  # noqa: E402
from onediff_comfy.serving.dispatcher import Dispatcher  # noqa: E402

Pictures = list[torch.Tensor]


def twice(model: Any, steps: int = 2) -> Pictures:
    return [sampled(model, 1, steps), sampled(model, 2, steps)]


def step_skipper(model: Any) -> Pictures:
    """As TeaCache does it: it exchanges a method for the time of a call, and keeps what it needs on the model."""
    module = model.model.diffusion_model

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        output = type(self).forward_orig(self, *given, **named)
        before, self.before = getattr(self, "before", None), output
        return output if before is None else output + 0.3 * before

    def wrapper(apply: Any, given: dict[str, Any]) -> Any:
        with patch.multiple(module, forward_orig=types.MethodType(forward, module)):
            return apply(given["input"], given["timestep"], **given["c"])

    model = model.clone()
    model.set_model_unet_function_wrapper(wrapper)
    return twice(model)


def counting_patch(model: Any) -> Pictures:
    """Keeps on the model how often it was called."""
    module = model.model.diffusion_model

    def replace(given: dict[str, Any], extra: dict[str, Any]) -> Any:
        module.calls = getattr(module, "calls", 0) + 1
        output = extra["original_block"](given)
        return {**output, "img": output["img"] * (1 + 0.05 * module.calls)}

    model = model.clone()
    model.set_model_patch_replace(replace, "dit", "double_block", 0)
    return twice(model)


def another_class(model: Any) -> Pictures:
    """As token merging does it, and undone again."""
    blocks = model.model.diffusion_model.double_blocks
    before = type(blocks[0])

    class Scaled(before):  # type: ignore[misc, valid-type]
        def forward(self, *given: Any, **named: Any) -> Any:
            img, txt = super().forward(*given, **named)
            return img * 1.1, txt

    found = twice(model)
    for kind in (Scaled, before):
        for block in blocks:
            block.__class__ = kind
        found += twice(model)
    return found


def shared_layer(model: Any) -> Pictures:
    shared = torch.nn.GELU(approximate="tanh")
    for block in model.model.diffusion_model.single_blocks:
        block.mlp_act = shared
    for block in model.model.diffusion_model.double_blocks:
        block.img_mlp[1] = block.txt_mlp[1] = shared
    return twice(model)


def forward_in_a_forward(model: Any) -> Pictures:
    """A patch runs the model once more, for a reference, and then the block."""
    inside: list[bool] = []

    def wrapper(apply: Any, given: dict[str, Any]) -> Any:
        def run(options: dict[str, Any]) -> Any:
            return apply(given["input"], given["timestep"], **{**given["c"], "transformer_options": options})

        options = given["c"]["transformer_options"]

        def replace(of_block: dict[str, Any], extra: dict[str, Any]) -> Any:
            if not inside:
                inside.append(True)
                of_block = {**of_block, "img": of_block["img"] * (1 + 0.1 * run(options).mean())}
                inside.clear()
            return extra["original_block"](of_block)

        return run({**options, "patches_replace": {"dit": {("double_block", 0): replace}}})

    model = model.clone()
    model.set_model_unet_function_wrapper(wrapper)
    return twice(model)


def hook_of_all_modules(model: Any) -> Pictures:
    kind = type(model.model.diffusion_model.single_blocks[0])
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _given, output: output * 1.1 if type(module) is kind else None
    )
    try:
        return twice(model)
    finally:
        hook.remove()


def call_of_a_class(model: Any) -> Pictures:
    block = model.model.diffusion_model.single_blocks[0]
    with patch.object(type(block), "__call__", lambda self, *given, **named: 1.1 * self.forward(*given, **named)):
        return twice(model)


def table_of_blocks(model: Any) -> Pictures:
    """A forward that asks which block it has by comparing, and by looking it up."""
    module = model.model.diffusion_model
    block, forward = module.single_blocks[0], type(module).forward_orig
    module.chosen, module.strengths = [block], {block: 1.1}

    def asking(self: Any, *given: Any, **named: Any) -> Any:
        first = self.single_blocks[0]
        strength = self.strengths.get(first, 0.5) if first in self.chosen else 0.0
        return forward(self, *given, **named) * strength

    with patch.object(type(module), "forward_orig", asking):
        return twice(model)


def weights_on_the_device(model: Any) -> Pictures:
    """The host takes such weights as they are, with no LoRA that it would add while it brings them."""
    changed = with_lora(model, 0.8)
    found = [*twice(model), *twice(changed)]
    for layer in model.model.diffusion_model.double_blocks[0].modules():
        for name, weight in layer._parameters.items():
            if weight is not None:
                there = torch.empty(weight.shape).copy_(weight)
                layer._parameters[name] = torch.nn.Parameter(there, requires_grad=False)
    found += [*twice(model), *twice(changed)]
    model.model.diffusion_model.double_blocks[0].img_attn.qkv.weight.data.mul_(1.3)
    return [*found, *twice(model)]


def function_of_a_weight(model: Any) -> Pictures:
    """An extension's, which counts its calls, and writes to the weight that it is given: that stays in its page."""
    counted, model = torch.zeros(1), model.clone()

    def changed(weight: torch.Tensor) -> torch.Tensor:
        counted.add_(1)
        return weight.mul_(1 + 0.01 * counted)

    model.add_weight_wrapper("diffusion_model.double_blocks.0.img_mlp.0.weight", changed)
    return [*twice(model), counted]


def attention_that_counts(model: Any) -> Pictures:
    """An extension's attention notes in the options how often it was called."""

    def attention(host: Callable[..., Any], *given: Any, **named: Any) -> Any:
        options = named["transformer_options"]
        options["calls"] = options.get("calls", 0) + 1
        return host(*given, **named) * (1 + 0.05 * options["calls"])

    model = model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = attention
    return twice(model, 4)


def kept_in_the_options(model: Any) -> Pictures:
    """Each block finds there what the one before has left, and takes away what the node has put there."""
    for name in ("double_blocks", "single_blocks"):
        for block in getattr(model.model.diffusion_model, name):
            before: Any = type(block)

            class Keeping(before):  # type: ignore[misc, valid-type]
                def forward(self, *given: Any, transformer_options: Any, **named: Any) -> Any:
                    left, once = transformer_options.get("left"), transformer_options.pop("once", 0.0)
                    output = super().forward(*given, **named, transformer_options=transformer_options)
                    first = output[0] if isinstance(output, tuple) else output
                    transformer_options["left"] = first.mean()
                    first = first * (1 + once) + (0 if left is None else left)
                    return (first, *output[1:]) if isinstance(output, tuple) else first

            block.__class__ = Keeping
    model = model.clone()
    model.model_options["transformer_options"]["once"] = 0.3
    return twice(model)


def views_handed_on(model: Any) -> Pictures:
    """A block that is left out gives views of what it was given. A patch keeps that, and writes to what comes out."""
    (block,) = model.model.diffusion_model.double_blocks

    class Skipped(type(block)):  # type: ignore[misc]
        def forward(self, img: Any, txt: Any, *_given: Any, **_named: Any) -> Any:
            return img.view_as(img), txt[:, :]

    def replace(given: dict[str, Any], extra: dict[str, Any]) -> Any:
        before, output = given["img"], extra["original_block"](given)
        output["img"].mul_(1.1)
        return {**output, "img": output["img"] + 0.5 * before}

    block.__class__ = Skipped
    model = model.clone()
    model.set_model_patch_replace(replace, "dit", "double_block", 0)
    return twice(model)


def off(script: Callable[[Any], Pictures]) -> dict[str, Any]:
    pictures, served, asked, attempt = [], 0, [0], Dispatcher.attempt

    def counted(self: Dispatcher, *given: Any) -> Any:
        asked[0] += 1
        return attempt(self, *given)

    for ours in (False, True):
        model = comfy.sd.load_checkpoint_guess_config(checkpoint, output_clip=False, output_vae=False)[0]
        model = pages_of_cpu.off_device(model)
        model = accelerate(model, "eager") if ours else model
        with torch.inference_mode(), patch.object(Dispatcher, "attempt", counted):
            pictures.append(script(model))
        served = find_dispatcher(model).metrics.snapshot()["served"] if ours else 0
        memory.unload_all_models()
    span = float(pictures[0][0].max() - pictures[0][0].min())
    return {
        "off": [float((given - expected).abs().max()) / span for expected, given in zip(*pictures, strict=True)],
        "served": served,
        "asked": asked[0],
    }


if __name__ == "__main__":
    pages_of_cpu.begin()
    memory.get_free_memory = lambda _device=None, torch_free_too=False: (1024, 1024) if torch_free_too else 1024
    scripts = (
        *(step_skipper, counting_patch, another_class, shared_layer, forward_in_a_forward, hook_of_all_modules),
        *(call_of_a_class, table_of_blocks, weights_on_the_device, function_of_a_weight),
        *(attention_that_counts, kept_in_the_options, views_handed_on),
    )
    sys.stdout.write(json.dumps({script.__name__: off(script) for script in scripts}) + "\n")

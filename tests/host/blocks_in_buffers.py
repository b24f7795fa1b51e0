"""Many blocks whose weights pass through two buffers of the host's, which take turns from step to step.

    python blocks_in_buffers.py COMFY_DIR CHECKPOINT [DOUBLE SINGLE]

A Flux of so many tiny blocks, in scaled 8 bits and as the checkpoint has them, does not fit. Prints as JSON of each,
for an image behind others, how often tensors were made of a layer's weights in each step, how far it is from the host's
own, and what served it. So many blocks that the two buffers take turns with an odd number of them, as in Flux.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

comfyui, checkpoint_file, *counts = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.model_management as memory  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import pages_of_cpu  # noqa: E402
import torch  # noqa: E402
from counting import answered  # noqa: E402
from pages_of_cpu import Pages  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from benchmarks.memory_modes import off  # noqa: E402
from onediff_comfy.host.adapters.model import accelerate, find_dispatcher  # noqa: E402
from onediff_comfy.host.weights import residency  # noqa: E402
from onediff_comfy.host.weights.residency import StreamedModules  # noqa: E402
from tools.models.formats import checkpoint  # noqa: E402

BLOCKS = dict(zip(("double", "single"), map(int, counts or (4, 5)), strict=True))
STEPS, STAYS = 5, 0.7  # of the pages
PREFIX = "model.diffusion_model."


def weights(form: str) -> dict[str, torch.Tensor]:
    """Return the weights of a file of many blocks, each with other values, in 32 bits or in scaled 8 bits."""
    found = {}
    for name, weight in load_file(checkpoint_file).items():
        if not name.startswith(PREFIX):
            continue
        block = re.fullmatch(r"(double|single)(_blocks\.)0(\..*)", name.removeprefix(PREFIX))
        if block is None:
            found[name.removeprefix(PREFIX)] = weight.float()
            continue
        kind, middle, rest = block.groups()
        found |= {f"{kind}{middle}{index}{rest}": weight.float() * 0.97**index for index in range(BLOCKS[kind])}
    return checkpoint(found, form) if form == "fp8" else found


class Buffers:
    """The host's buffers, each with another beside it: blocks of an odd number find them exchanged in each step."""

    def __init__(self) -> None:
        self._others: dict[int, torch.Tensor] = {}

    def exchange(self, *_of_a_step: Any) -> None:
        for buffer in memory.STREAM_AIMDO_CAST_BUFFERS.values():
            other = self._others.get(id(buffer))
            if other is None:
                other = torch.frombuffer(bytearray(buffer.bytes), dtype=torch.uint8)
            self._others[id(buffer)], buffer.memory = buffer.memory, other
            buffer.base_addr = buffer.memory.data_ptr()


def sampled(model: Any, callback: Any = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    prompt = [[torch.randn(1, 77, 64, generator=generator), {"pooled_output": torch.randn(1, 32, generator=generator)}]]
    latent = torch.zeros(1, 16, 8, 8)
    noise = torch.randn(latent.shape, generator=generator)
    picture: torch.Tensor = comfy.sample.sample(
        model,
        noise,
        STEPS,
        1.0,
        "euler",
        "simple",
        prompt,
        prompt,
        latent,
        callback=callback,
        disable_pbar=True,
        seed=1,
    )
    return picture


def loaded(form: str) -> Any:
    return comfy.sd.load_diffusion_model_state_dict(weights(form), model_options={"dtype": torch.float32})


def of_form(form: str, expected: torch.Tensor) -> dict[str, Any]:
    memory.unload_all_models()
    Pages.room = 1 << 20
    fast = accelerate(pages_of_cpu.off_device(loaded(form)), "eager")
    dispatcher, buffers, made = find_dispatcher(fast), Buffers(), [0]
    assert dispatcher is not None
    sampled(fast)
    *others, its = (sum(pages.there) for pages in Pages.all)
    Pages.room = sum(others) + int(STAYS * its)
    of_steps, resolved = list[int](), StreamedModules._resolved

    def counted(self: Any, *given: Any) -> Any:
        made[0] += 1
        return resolved(self, *given)

    def after_step(*_given: Any) -> None:
        of_steps.append(made[0] - sum(of_steps))
        buffers.exchange()

    for _ in range(3):  # what is made once for the blocks is there in the third
        fast.partially_unload(None, 1e30)
        of_steps.clear()
        made[0], before = 0, dispatcher.metrics.snapshot()
        StreamedModules._resolved = counted  # type: ignore[method-assign]
        picture = sampled(fast, after_step)
        StreamedModules._resolved = resolved  # type: ignore[method-assign]
    layers = sum("_v" in vars(layer) for layer in fast.model.modules())
    found = {"made": of_steps, "off": off(picture, expected), "layers": layers, "blocks": sum(BLOCKS.values())}
    return found | answered(before, dispatcher.metrics.snapshot())


def main() -> None:
    forms = "32 bits", "fp8"
    with torch.inference_mode():
        expected = {form: sampled(loaded(form)) for form in forms}
        memory.unload_all_models()
        pages_of_cpu.begin()
        Pages.bytes_of_new, pages_of_cpu._Buffer.bytes = 64 << 10, 64 << 20
        residency.is_moved = lambda *_layer: False  # what has scales cannot say that it is on another device
        found = {form: of_form(form, expected[form]) for form in forms}
    sys.stdout.write(json.dumps(found) + "\n")


main()

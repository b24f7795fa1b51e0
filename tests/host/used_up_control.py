"""A UNet in Dynamic VRAM with all weights there, which takes what a ControlNet gives from lists: what it takes is gone.

    python used_up_control.py COMFY_DIR CHECKPOINT

Prints as JSON how far pictures are from the host's where memory runs out late in a call, which is then answered in
another way; how much the ControlNet's part of a picture is; and how often a forward ran that an extension has ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

comfyui, checkpoint = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.model_management as memory  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import pages_of_cpu  # noqa: E402
import torch  # noqa: E402
from pages_of_cpu import Pages  # noqa: E402

from onediff_comfy.engines.eager import EagerGraph  # noqa: E402
from onediff_comfy.host.adapters.model import accelerate  # noqa: E402
from onediff_comfy.serving.decision import Invocation  # noqa: E402


class Ended(Exception):
    """An extension's, by which it ends a forward that it needs no more of."""


def loaded() -> Any:
    model = comfy.sd.load_checkpoint_guess_config(checkpoint, output_clip=False, output_vae=False)[0]
    return pages_of_cpu.off_device(model)


def sampled(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    prompt = [[torch.randn(1, 77, 768, generator=generator), {}]]
    latent = torch.zeros(1, 4, 16, 16)
    noise = torch.randn(latent.shape, generator=generator)
    options = {"disable_pbar": True, "seed": 1}
    picture: torch.Tensor = comfy.sample.sample(
        model, noise, 2, 1.0, "euler", "simple", prompt, prompt, latent, **options
    )
    return picture


def controlled(model: Any, shapes: list[torch.Size]) -> Any:
    """The model with what a ControlNet gives for each output block, in lists that the forward pops from."""
    clone = model.clone()

    def wrapper(apply: Any, given: dict[str, Any]) -> Any:
        generator = torch.Generator().manual_seed(7)
        control = {"output": [torch.randn(shape, generator=generator) * 0.5 for shape in shapes]}
        return apply(given["input"], given["timestep"], **given["c"], control=control)

    clone.set_model_unet_function_wrapper(wrapper)
    return clone


def short_of_memory(model: Any, shapes: list[torch.Size], graph_fails: bool) -> torch.Tensor:
    """A picture where memory runs out: in graphs of the whole model, or near the end of the host's own forward.

    It does the first time that this runs on the host's layers, to be compared with a graph.
    """
    memory.load_models_gpu([model])
    (vbar,) = model.model.dynamic_vbars.values()
    call, fault, left, answered = EagerGraph.__call__, Pages.fault, [0 if graph_fails else 20], list[bool]()
    failed: list[bool] = []

    def graph(self: Any, *given: Any) -> Any:
        answered.append(True)
        if graph_fails and sum(map(bool, vbar.pins)) == sum(vbar.there):
            failed.append(True)
            raise torch.OutOfMemoryError
        return call(self, *given)

    def faulting(self: Any, *given: Any) -> Any:
        if answered and left[0] and self is vbar:
            left[0] -= 1
            if not left[0]:
                raise torch.OutOfMemoryError
        return fault(self, *given)

    EagerGraph.__call__, Pages.fault = graph, faulting  # type: ignore[method-assign]
    try:
        picture = sampled(controlled(model, shapes))
    finally:
        EagerGraph.__call__, Pages.fault = call, fault  # type: ignore[method-assign]
    assert not left[0] and bool(failed) is graph_fails, "memory did not run out"
    return picture


def proof_without_memory(model: Any, shapes: list[torch.Size]) -> torch.Tensor:
    """A picture where memory runs out at the end of the forward that a graph is compared with the first time."""
    memory.load_models_gpu([model])
    own, failed = Invocation.eager, list[bool]()

    def eager(invocation: Invocation) -> Any:
        output = own(invocation)
        if failed:
            return output
        failed.append(True)
        raise torch.OutOfMemoryError

    Invocation.eager = eager  # type: ignore[method-assign]
    try:
        picture = sampled(controlled(model, shapes))
    finally:
        Invocation.eager = own  # type: ignore[method-assign]
    assert failed, "nothing was compared"
    return picture


def ended_forwards(model: Any) -> int:
    """How often a forward ran that an extension's patch ends with an exception of its own, and waits for."""
    clone, ran = model.clone(), list[int]()

    def patch(hidden: torch.Tensor, _options: Any) -> torch.Tensor:
        ran.append(1)
        raise Ended

    def wrapper(apply: Any, given: dict[str, Any]) -> Any:
        try:
            return apply(given["input"], given["timestep"], **given["c"])
        except Ended:
            return given["input"] * 0.5

    clone.set_model_patch(patch, "input_block_patch")
    clone.set_model_unet_function_wrapper(wrapper)
    sampled(clone)
    return len(ran)


def main() -> None:
    pages_of_cpu.begin()
    memory.get_free_memory = lambda _device=None, torch_free_too=False: (1 << 34, 1) if torch_free_too else 1 << 34
    shapes = list[torch.Size]()
    with torch.inference_mode():
        base, seen = loaded(), loaded()
        seen.set_model_patch(lambda hidden, _options: shapes.append(hidden.shape) or hidden, "input_block_patch")
        sampled(seen)
        del shapes[len(seen.model.diffusion_model.input_blocks) :]
        expected, plain = sampled(controlled(base, shapes)), sampled(base)
        span = float(expected.max() - expected.min())
        found = {"effect": float((expected - plain).abs().max()) / span, "ended by the host": ended_forwards(base)}
        fast = accelerate(loaded(), "eager")
        found["proof"] = float((proof_without_memory(fast, shapes) - expected).abs().max()) / span
        for name, graph_fails in (("comparing", False), ("graph, then blocks", True)):
            fast = accelerate(loaded(), "eager")
            found[name] = float((short_of_memory(fast, shapes, graph_fails) - expected).abs().max()) / span
        found["ended"] = ended_forwards(accelerate(loaded(), "eager"))
    sys.stdout.write(json.dumps(found) + "\n")


main()

"""Where a run's prompts are while it samples, and how often the CPU waits for the GPU, in this process.

    python prompts.py COMFY_DIR CHECKPOINT

Prints as JSON what the host's kinds of arguments become on another device, what a run makes of its prompts, and on a
GPU how many waits PyTorch counts in runs of few and of more steps.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

comfyui, checkpoint = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
import torch  # noqa: E402 - the host's path first
from comfy.cli_args import args  # noqa: E402

args.cpu = not torch.cuda.is_available()
import comfy.conds  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
from comfy.patcher_extension import WrapperExecutor, WrappersMP  # noqa: E402

from benchmarks.host import waits_of  # noqa: E402
from onediff_comfy.host.adapters.conditioning import arguments_on, keep_on_device, put_in_place  # noqa: E402
from onediff_comfy.host.adapters.model import accelerate  # noqa: E402

FEW, MORE = 4, 9


def device_of(cond: Any) -> list[str]:
    held = cond.cond if isinstance(cond.cond, list) else [cond.cond]
    return [each.device.type if isinstance(each, torch.Tensor) else type(each).__name__ for each in held]


def kinds() -> dict[str, Any]:
    """What each of the host's kinds of arguments is on another device, and what stays the same object."""
    tensor = torch.ones(1, 4, 2, 2)
    held = {
        "CONDRegular": tensor,
        "CONDNoiseShape": tensor,
        "CONDCrossAttn": tensor[0, 0][None],
        "CONDList": [tensor, tensor],
        "CONDConstant": 3.5,
    }
    conds = {name: getattr(comfy.conds, name)(value) for name, value in held.items()}
    conds["of another extension"] = SimpleNamespace(what=tensor)
    mask = torch.ones(1, 2, 2)
    own, device = dict(conds), torch.device("meta")
    prompts = {"positive": [{"model_conds": conds, "mask": mask}, {"model_conds": conds}], "negative": []}
    with put_in_place(arguments_on(prompts, device)):
        moved = dict(conds)
        again = [each.name for each in arguments_on(prompts, device)]
        conds["CONDList"] = changed = comfy.conds.CONDList([tensor])
    return {
        "moved": {name: device_of(moved[name]) for name in held},
        "classes": all(type(moved[name]) is type(own[name]) for name in held),
        "as they were": [name for name in conds if conds[name] is own[name]],
        "same": [name for name in conds if moved[name] is own[name]],
        "moved again": again,
        "changed meanwhile": conds["CONDList"] is changed,
        "mask": prompts["positive"][0]["mask"] is mask and prompts["positive"][0]["model_conds"] is conds,
    }


def large() -> dict[str, Any]:
    """Where arguments are that are too large in one prompt, or in two together, and one that is not."""
    much = torch.empty(40 << 20, dtype=torch.uint8)
    conds = {"little": comfy.conds.CONDRegular(torch.ones(1)), "much": comfy.conds.CONDRegular(much)}
    small = {**conds, "much": comfy.conds.CONDRegular(much[:1])}
    found = {}
    for name, prompts in {
        "one prompt": {"positive": [conds]},
        "two prompts": {"positive": [conds], "negative": [conds]},
        "unequal ones": {"positive": [conds, conds], "negative": [small]},
    }.items():
        given = {which: [{"model_conds": dict(each)} for each in listed] for which, listed in prompts.items()}
        with put_in_place(arguments_on(given, torch.device("meta"))):
            found[name] = [
                {key: device_of(cond)[0] for key, cond in each["model_conds"].items()}
                for listed in given.values()
                for each in listed
            ]
    return found


def _note(seen: list[tuple[Any, Any]], executor: WrapperExecutor, guider: Any, *more: Any) -> Any:
    """A wrapper that notes the guider and its prompts."""
    seen.append((guider, guider.conds))
    return executor(guider, *more)


def stopped() -> bool:
    """Whether a guider has its own prompts again after a run that somebody stopped."""
    own, seen = comfy.conds.CONDRegular(torch.ones(1)), list[Any]()
    guider = SimpleNamespace(
        conds={"positive": [{"model_conds": {"c": own}}]},
        model_patcher=SimpleNamespace(load_device=torch.device("meta")),
    )

    def stop(guider: Any) -> Any:
        seen.append(guider.conds["positive"][0]["model_conds"]["c"])
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        keep_on_device(stop, guider)  # type: ignore[arg-type]
    return guider.conds["positive"][0]["model_conds"]["c"] is own is not seen[0]


def changed_between_steps(plain: Any) -> float:
    """How far a picture is from the host's own, where another extension changes a prompt after each step."""
    effect, found = list[torch.Tensor](), list[torch.Tensor]()
    for changes, into in ((False, effect), (True, effect), (True, found)):
        model, guiders = plain.clone(), list[Any]()

        def note(guiders: list[Any], executor: WrapperExecutor, guider: Any, *more: Any) -> Any:
            guiders.append(guider.conds["positive"][0]["model_conds"])
            return executor(guider, *more)

        def change(guiders: list[Any], executor: WrapperExecutor, *given: Any, **options: Any) -> Any:
            output = executor(*given, **options)
            arguments = guiders[-1]
            arguments["c_crossattn"] = comfy.conds.CONDCrossAttn(arguments["c_crossattn"].cond * 1.5)
            return output

        model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "another's", functools.partial(note, guiders))
        if changes:
            model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "another's", functools.partial(change, guiders))
        into.append(sampled(accelerate(model, "eager") if into is found else model, 1, FEW))
    plainly, by_host = effect
    assert not torch.allclose(plainly, by_host, rtol=1e-2, atol=1e-2), "it could not be seen"
    return float((found[0] - by_host).abs().max() / by_host.abs().max())


def sampled(model: Any, seed: int, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, 4, 16, 16, generator=generator)
    prompts = [[[torch.randn(1, 77, 768, generator=generator), {}]] for _ in range(2)]
    latent: torch.Tensor = comfy.sample.sample(
        model, noise, steps, 7.0, "euler", "normal", *prompts, torch.zeros_like(noise), disable_pbar=True, seed=seed
    )
    return latent


def runs(plain: Any) -> dict[str, Any]:
    """What a run of an accelerated model makes of its prompts."""
    seen: list[tuple[Any, Any]] = []
    note = functools.partial(_note, seen)
    model = plain.clone()
    model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "before", note)
    model = accelerate(model, "eager")
    model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "behind", note)
    sampled(model, 1, FEW)
    (_, before), (_, behind) = seen
    only_moved = plain.clone()
    only_moved.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "ours", keep_on_device)
    return {
        "same bits": torch.equal(sampled(only_moved, 1, FEW), sampled(plain, 1, FEW)),
        "before": sorted({kind for cond in before["positive"][0]["model_conds"].values() for kind in device_of(cond)}),
        "behind": sorted({kind for cond in behind["positive"][0]["model_conds"].values() for kind in device_of(cond)}),
        "same": before is behind,
    }


def with_another_guider() -> Any:
    """What guiders give that have no prompts as the host's have, or come in another way."""
    odd = SimpleNamespace(conds=None)
    return [
        keep_on_device(lambda guider, *more: [guider.conds, *more], odd, 1, 2),
        keep_on_device(lambda *, guider: [guider.conds], guider=odd),
        keep_on_device(lambda sampler: [sampler], "no guider"),
    ]


def waits(plain: Any) -> dict[str, list[int]]:
    """How often the CPU waits for the GPU while few and while more steps are made, in runs like others before."""
    found = {}
    for name, model in {"eager": plain, "ours": accelerate(plain, "inductor")}.items():
        counted: list[int] = []
        model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "behind", functools.partial(_count_waits, counted))
        for steps in (FEW, FEW, FEW, FEW, MORE):
            sampled(model, 4, steps)
        found[name] = counted[-2:]
    return found


def _count_waits(counted: list[int], executor: WrapperExecutor, *args: Any) -> Any:
    """A wrapper behind ours: what the host does before the first step, it does with waits of its own."""
    answers: list[Any] = []
    counted.append(sum(waits_of(lambda: answers.append(executor(*args))).values()))
    return answers[0]


def main() -> None:
    with torch.inference_mode():
        plain = comfy.sd.load_checkpoint_guess_config(checkpoint, output_clip=False, output_vae=False)[0]
        found = {"kinds": kinds(), "run": runs(plain), "another guider": with_another_guider()}
        found |= {"large": large(), "stopped": stopped(), "changed": changed_between_steps(plain)}
        if not args.cpu:
            found["waits"] = waits(plain.clone())
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

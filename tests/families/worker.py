"""Measures model families: images of each with and without the speedup, of several sizes, and what served them.

    python tests/families/worker.py COMFY_DIR REPORT [--engine ENGINE] [--keys] [--offloaded] [NAME...]

Appends one line of JSON per family to REPORT: the fields of ``Result``, or with ``--keys`` those of ``Keys``. A process
of its own, because ComfyUI changes the interpreter it is imported into. ``--offloaded`` has ComfyUI take the device
for one that holds no weights, as under --novram.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tools.models.encoders import Encoder
    from tools.models.families import Family

STEPS = 2


@dataclass(frozen=True)
class Result:
    """What came out of one family with one engine.

    Attributes:
        difference: of the first image, the largest, as a share of the image's range.
        worst_difference: the same of all images.
        response: of models of few bits, how far ComfyUI's own images are off whose noise is hardly another: the
            largest, the same way.
        images: how many there were, of different sizes, batches and prompts.
        served: calls of the model that a compiled graph answered.
        fallbacks: calls that ComfyUI's own code answered, by reason.
        captured: how often something was captured for the first image.
        captured_later: names of the changes that something more was captured for.
        captures_of_a_change: how often at most.
        problem: what went wrong besides.
    """

    family: str
    engine: str
    difference: float
    worst_difference: float
    images: int
    served: int
    fallbacks: dict[str, int]
    captured: int
    captured_later: list[str]
    captures_of_a_change: int
    seconds: float
    problem: str | None = None
    response: float = 0.0


@dataclass(frozen=True)
class Keys:
    """What is to be the same in every process: a family's fingerprint, and the keys of its first image's graphs."""

    family: str
    engine: str
    fingerprint: str
    refusal: str | None
    graphs: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comfy_dir")
    parser.add_argument("report", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--engine", default="eager")
    parser.add_argument("--keys", action="store_true")
    parser.add_argument("--offloaded", action="store_true")
    options = parser.parse_args()
    sys.argv = sys.argv[:1]  # the host parses the command line when it is imported
    sys.path.insert(0, options.comfy_dir)
    from comfy.cli_args import args

    args.cpu = args.use_pytorch_cross_attention = True
    import comfy.model_management
    import torch

    from tools.models.encoders import ENCODERS
    from tools.models.families import FAMILIES, NARROW, QUANTISED

    # As on a GPU that multiplies in 8 bits; the CPU has the same operators, only slower.
    comfy.model_management.supports_fp8_compute = lambda _device=None: True
    if options.offloaded:
        comfy.model_management.vram_state = comfy.model_management.VRAMState.NO_VRAM
        comfy.model_management.is_device_cpu = lambda _device: False
    known = {**FAMILIES, **QUANTISED, **(NARROW if options.engine == "inductor" else {})}
    with torch.inference_mode(), options.report.open("a") as report:  # as the host's executor runs every node
        for name in options.names or (*known, *ENCODERS):
            if name in ENCODERS:
                row: Result | Keys = measured(_measure_encoder, name, ENCODERS[name], options.engine)
            elif options.keys:
                row = keys(name, known[name], options.engine)
            else:
                row = measured(_measure, name, known[name], options.engine)
            print(json.dumps(asdict(row)), file=report, flush=True)


def keys(name: str, family: Family, engine: str) -> Keys:
    """Of a small image of two steps: the first call of some families is ComfyUI's."""
    from onediff_comfy.capture.target.target import Target
    from onediff_comfy.host.adapters.model import accelerate
    from onediff_comfy.host.process.process import library
    from onediff_comfy.host.process.services import host_services

    plain = family.load()
    target = Target(plain.model.diffusion_model, host_services().code)
    before = library().cache.sizes().keys()
    image(family, accelerate(plain, engine), steps=2)
    return Keys(name, engine, target.fingerprint, target.refusal, sorted(library().cache.sizes().keys() - before))


def measured(measure: Callable[[str, Any, str], Result], name: str, model: Any, engine: str) -> Result:
    """What came out with and without the speedup. What fails is a problem of the result."""
    try:
        return measure(name, model, engine)
    except Exception as error:
        return Result(
            name, engine, float("inf"), float("inf"), 0, 0, {}, 0, [], 0, 0.0, f"{type(error).__name__}: {error}"
        )


def _measure(name: str, family: Family, engine: str) -> Result:
    from onediff_comfy.host.adapters.model import accelerate
    from onediff_comfy.host.process.process import metrics

    start = time.perf_counter()
    plain = family.load()
    fast = accelerate(plain, engine)
    before = metrics().snapshot()
    differences, captured, response = {}, {}, 0.0
    for change, values in changes(family):
        already = metrics().snapshot()["captured"]
        expected = image(family, plain, **values)
        differences[change] = difference(image(family, fast, **values), expected)
        captured[change] = metrics().snapshot()["captured"] - already
        if family.weights != "float32" and engine != "eager":
            response = max(response, difference(image(family, plain, off=_HARDLY, **values), expected))
    for change, strength in _LORAS if family.weights != "float32" else ():
        already = metrics().snapshot()["captured"]
        differences[change] = difference(*(image(family, with_lora(model, strength)) for model in (fast, plain)))
        captured[change] = metrics().snapshot()["captured"] - already
    return _result(name, engine, before, start, differences, captured, response)


def _result(
    name: str,
    engine: str,
    before: Mapping[str, Any],
    start: float,
    differences: Mapping[str, float],
    captured: Mapping[str, int],
    response: float = 0.0,
) -> Result:
    """Return what was measured since ``start``, when the counters were ``before``. By change: differences, captures."""
    from onediff_comfy.host.process.process import metrics

    after = metrics().snapshot()
    first, *later = captured
    return Result(
        name,
        engine,
        differences[first],
        max(differences.values()),
        len(differences),
        after["served"] - before["served"],
        _more(before["fallbacks"], after["fallbacks"]),
        captured[first],
        [change for change in later if captured[change]],
        max(captured[change] for change in later),
        round(time.perf_counter() - start, 1),
        response=response,
    )


_PROMPTS = {"first": "a lighthouse on a cliff", "prompt": "two dogs", "long": "a long road, " * 60, "empty": ""}


def _measure_encoder(name: str, encoder: Encoder, engine: str) -> Result:
    """Prompts of several lengths, and with a LoRA of two strengths."""
    from onediff_comfy.host.adapters.text_encoder import accelerate_clip
    from onediff_comfy.host.process.process import metrics

    start = time.perf_counter()
    plain = encoder.load()
    fast = accelerate_clip(plain, engine)
    before = metrics().snapshot()
    differences, captured = {}, {}
    changes = [(change, text, 0.0) for change, text in _PROMPTS.items()]
    for change, text, strength in (*changes, *((change, "two dogs", strength) for change, strength in _LORAS)):
        already = metrics().snapshot()["captured"]
        clips = [with_encoder_lora(clip, strength) if strength else clip for clip in (fast, plain)]
        actual, expected = (clip.encode_from_tokens(clip.tokenize(text)) for clip in clips)
        differences[change] = difference(actual, expected)
        captured[change] = metrics().snapshot()["captured"] - already
    return _result(name, engine, before, start, differences, captured)


def with_encoder_lora(clip: Any, strength: float) -> Any:
    """The CLIP with a LoRA of rank 4 on the matrices of its layers."""
    import comfy.sd

    weights = clip.cond_stage_model.named_parameters()
    matrices = {name: weight.shape for name, weight in weights if weight.ndim == 2 and ".layers." in name}
    factors = _factors({f"text_encoders.{name}": shape for name, shape in matrices.items()})
    return comfy.sd.load_lora_for_models(None, clip, factors, 0, strength)[1]


_HARDLY = 2.0**-14
_LORAS = (("lora", 0.8), ("lora strength", 0.4))


def with_lora(model: Any, strength: float) -> Any:
    """The model with a LoRA of rank 4 on the matrices of its blocks."""
    import comfy.sd

    weights = model.model.diffusion_model.named_parameters()
    matrices = {name: weight.shape for name, weight in weights if weight.ndim == 2 and "block" in name}
    factors = _factors({f"diffusion_model.{name}": shape for name, shape in matrices.items()})
    return comfy.sd.load_lora_for_models(model, None, factors, strength, 0)[0]


def _factors(matrices: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """A LoRA of rank 4 for matrices of these names and shapes."""
    import torch

    generator = torch.Generator().manual_seed(1)
    factors = {}
    for name, (rows, columns) in matrices.items():
        if name.endswith(".weight"):
            layer = name.removesuffix(".weight")
            factors[f"{layer}.lora_up.weight"] = torch.randn(rows, 4, generator=generator) * 0.1
            factors[f"{layer}.lora_down.weight"] = torch.randn(4, columns, generator=generator) * columns**-0.5
    return factors


def changes(family: Family) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What a person changes between two images, by name; the first is the image to begin with."""
    side, step = family.side, family.step
    yield "first", {}
    yield "seed", {"seed": 2}
    yield "size", {"height": side + 4 * step, "width": side + 2 * step}
    if family.batches:
        yield "batch", {"batch": 2 * family.batch}
    yield "prompt", {"tokens": 2 * family.tokens}
    if family.frames is not None and family.frames > 1:
        yield "frames", {"frames": family.frames + 2}


def image(
    family: Family,
    model: Any,
    seed: int = 1,
    tokens: int | None = None,
    steps: int = STEPS,
    off: float = 0.0,
    **sizes: int,
) -> torch.Tensor:
    """What the host's sampler makes, in latent units; ``off`` is by which share of itself the noise is another."""
    import comfy.sample
    import torch

    latent = family.latent(**sizes)
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed))
    noise *= 1 + off * torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed + 1)).sign()
    positive, negative = family.conditioning(1, tokens), family.conditioning(2, tokens)
    done: torch.Tensor = comfy.sample.sample(
        model, noise, steps, family.cfg, "euler", "normal", positive, negative, latent, disable_pbar=True, seed=seed
    )
    return done


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, as a share of the range; as in ``pictures.assert_same_picture``."""
    return float((actual - expected).abs().max() / (expected.max() - expected.min()))


def _more(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {reason: count - before.get(reason, 0) for reason, count in after.items() if count > before.get(reason, 0)}


if __name__ == "__main__":
    main()

"""Time what a VAE read from a file does in Dynamic VRAM, and note the memory of a process: eager, or ours.

    COMFYUI_PATH=... python -m benchmarks.decoding --model flux --variant eager --folder FOLDER --output FILE
    ... --variant onediff-inductor        another process: what it gives is compared with what eager gave
    ... --left 4                          on a card on which so many GiB are free

The VAE is in Dynamic VRAM, as the host's server has it by default on NVIDIA, unless it is tiny. Some images and videos
are made behind something that takes its weights away. The first process writes random weights to FOLDER, and all read
them there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .any_card import end_of_node, held
from .host import reported, seconds_of, start_host
from .memory_modes import off
from .process_memory import memory_of_device, memory_of_process
from .sampling import counters, environment
from .vae import random_vae
from .variants import Variant
from .video_vae import random_video_vae

if TYPE_CHECKING:
    import torch

_ALLOWED = 2e-2  # relative error: a VAE of random weights is off by 1.2e-2 in 16 bits, by rounding in another order


class Sizes(NamedTuple):
    """What is made, in pixels: sides, another size's, and frames of a video; None for images.

    Attributes:
        channels: of the VAE's first level.
    """

    channels: int
    width: int
    height: int
    other: tuple[int, int]
    frames: int | None = None


_LATENT, _SIDE, _FRAMES = 16, 8, 4  # channels of a latent; pixels of a side and frames for each of its own
_MODELS = {
    "flux": Sizes(128, 1024, 1024, (832, 1216)),
    "wan": Sizes(96, 832, 480, (480, 640), 33),
    "tiny": Sizes(128, 64, 64, (64, 96)),
    "tiny-wan": Sizes(16, 64, 48, (48, 64), 33),
}


def main() -> int:
    """Run the benchmark, print what it finds and write JSON. Ends with 1 if ours ran eager or gave something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=_MODELS, default="flux", help="tiny ones: for a CPU, to see that it runs")
    parser.add_argument("--variant", default="eager", help="eager, onediff-inductor, ...")
    parser.add_argument("--left", type=float, help="GiB of the device's memory")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for files of weights")
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    is_ours = Variant.parse(options.variant).compiler is not None
    if is_ours and not _expected(options).exists():
        parser.error(f"nothing to compare with in {options.folder}; run it with --variant eager first")
    start_host(dynamic_vram=not options.model.startswith("tiny"))
    report = reported(lambda: _run(options), options.output)
    print(*report["rows"], {name: report[name] for name in ("load_s", "most_mib", "is_dynamic")}, sep="\n", flush=True)
    rows = report["rows"]
    served = all(row["served"] > 0 for row in rows if row["may_be_served"])
    return 0 if (served or not is_ours) and max(row["relative_error"] for row in rows) <= _ALLOWED else 1


def _run(options: argparse.Namespace) -> dict[str, Any]:
    import comfy.sd  # noqa: F401 - not a part of loading
    import torch

    from .measures import relative_error

    vaes, made, rows = list[Any](), list[torch.Tensor](), list[dict[str, Any]]()
    make(options)
    load_s = seconds_of(lambda: vaes.append(loaded(options)))
    (vae,) = vaes
    compiler = Variant.parse(options.variant).compiler
    if compiler is not None:
        from onediff_comfy.host.adapters.vae import accelerate_vae
        from onediff_comfy.host.process.process import library

        library().background = None  # no graph of one size is made while others are timed
        vae = accelerate_vae(vae, compiler)
    with contextlib.nullcontext() if options.left is None else held(options.left):
        for what, job in _jobs(_MODELS[options.model]).items():
            if what in _HAPPENINGS:
                _HAPPENINGS[what](vae)
            before = counters()
            seconds = seconds_of(functools.partial(at_end_of_node, job, vae, made))
            after = counters()
            counted = {name: after[name] - before[name] for name in ("served", "fallbacks", "recorded")}
            rows.append({"what": what, "s": seconds, **counted})
    if compiler is None:
        torch.save(made, _expected(options))
    for row, ours, eager in zip(rows, made, torch.load(_expected(options)), strict=True):
        row |= {"relative_error": relative_error(ours, eager)}
        row |= {"off": off(ours, eager), "may_be_served": "encoded" not in row["what"] or made[0].ndim < 5}
    return {
        "what": {key: str(value) for key, value in vars(options).items() if key != "output"},
        "environment": environment(vae.device),
        "dtype": str(vae.vae_dtype),
        "is_dynamic": vae.is_dynamic(),
        "load_s": load_s,
        "rows": rows,
        "most_mib": memory_of_process() | {"device": memory_of_device(vae.device)},
    }


def _jobs(sizes: Sizes) -> dict[str, Callable[[Any], torch.Tensor]]:
    """Return what is done with the VAE, by what it is or what happened before."""
    import torch

    generator = torch.Generator().manual_seed(1)
    frames = [] if sizes.frames is None else [1 + (sizes.frames - 1) // _FRAMES]

    def latent(width: int, height: int) -> torch.Tensor:
        return torch.randn(1, _LATENT, *frames, height // _SIDE, width // _SIDE, generator=generator)

    one, other = latent(sizes.width, sizes.height), latent(*sizes.other)
    pixels = torch.rand(sizes.frames or 1, sizes.height, sizes.width, 3, generator=generator)

    def decoded(vae: Any) -> torch.Tensor:
        return vae.decode(one)

    return {
        "decoded": decoded,
        "decoded again": decoded,
        "decoded once more": decoded,
        "of another size": lambda vae: vae.decode(other),
        "encoded": lambda vae: vae.encode(pixels),
        "encoded again": lambda vae: vae.encode(pixels),
        **dict.fromkeys(_HAPPENINGS, decoded),
        "decoded in the end": decoded,
    }


def _unloaded(_vae: Any) -> None:
    import comfy.model_management

    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()


def _weights_taken(vae: Any) -> None:
    """All weights make way, as for another model."""
    for vbar in getattr(vae.patcher.model, "dynamic_vbars", {}).values():
        vbar.free_memory(1 << 60)


_HAPPENINGS: dict[str, Callable[[Any], None]] = {"unloaded": _unloaded, "all weights taken": _weights_taken}


def at_end_of_node(job: Callable[[Any], torch.Tensor], vae: Any, made: list[torch.Tensor]) -> None:
    """Add what is made of a VAE, on the CPU, to ``made``."""
    try:
        made.append(job(vae).cpu())
    finally:
        end_of_node()


def file(options: argparse.Namespace) -> Path:
    """Return the file of the VAE's weights."""
    folder: Path = options.folder
    return folder / f"{options.model}-vae.safetensors"


def _expected(options: argparse.Namespace) -> Path:
    """Return the file of what eager gave."""
    folder: Path = options.folder
    return folder / f"{options.model}-vae-{options.left}.pt"


def make(options: argparse.Namespace) -> None:
    """Write the file of weights if it is not there."""
    from safetensors.torch import save_file

    sizes = _MODELS[options.model]
    if not file(options).exists():
        made = random_vae(sizes.channels, latent=_LATENT) if sizes.frames is None else random_video_vae(sizes.channels)
        save_file({name: weight.contiguous() for name, weight in made.get_sd().items()}, file(options))


def loaded(options: argparse.Namespace) -> Any:
    """Return the VAE, as the host's loaders make it of a file."""
    import comfy.sd
    import comfy.utils

    weights, metadata = comfy.utils.load_torch_file(str(file(options)), return_metadata=True)
    return comfy.sd.VAE(sd=weights, metadata=metadata)


if __name__ == "__main__":
    sys.exit(main())

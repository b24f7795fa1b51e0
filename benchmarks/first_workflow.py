"""Time a process's first images with text encoders, a model and a VAE that are read from files: eager, or ours.

    COMFYUI_PATH=... python -m benchmarks.first_workflow --variant eager --folder FOLDER --output FILE
    ... --variant onediff-inductor        twice: the second process finds the graphs that the first one has kept

Weights are in Dynamic VRAM, as in the host's server by default on NVIDIA, unless they are tiny. Ours imports a compiler
and loads the graphs that were used last before anything else, as it does in a server that waits for its first prompt.
The first process writes files of random weights to FOLDER, and later ones find them in the page cache.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from . import any_card, decoding, prompts
from .host import reported, seconds_of, start_host
from .process_memory import memory_of_device, memory_of_process
from .sampling import Sampler, counters, environment, when_done
from .variants import Variant, variant

_FORM = "fp8"  # of the weights of the model and of T5
_STEPS, _IMAGES = 4, 3


def main() -> int:
    """Run the benchmark, print what it finds and write JSON. Ends with 1 if no graph of ours has answered anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", choices=("flux", "tiny"), default="flux", help="tiny: for a CPU, to see that it runs"
    )
    parser.add_argument("--variant", default="eager", help="eager, onediff-inductor, ...")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the files of weights")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--make", action="store_true", help="write the files of weights, and end")
    options = parser.parse_args()
    parts = Namespace(model=options.model, form=_FORM, folder=options.folder)
    if options.make:  # a process of its own, for in Dynamic VRAM the host makes no layers without weights
        start_host()
        prompts.make(parts)
        decoding.make(parts)
        any_card.make(parts, _FORM)
        return 0
    if not all(file.exists() for file in (*prompts.files(parts), decoding.file(parts), any_card.file(parts, _FORM))):
        subprocess.run([sys.executable, "-m", "benchmarks.first_workflow", *sys.argv[1:], "--make"], check=True)
    start_host(dynamic_vram=options.model != "tiny")
    report = reported(lambda: _run(options, parts), options.output)
    print({name: report[name] for name in ("prepared_s", "load_s", "counted", "most_mib")}, flush=True)
    return int(Variant.parse(options.variant).compiler is not None and report["counted"]["served"] == 0)


def _run(options: Namespace, parts: Namespace) -> dict[str, Any]:
    import comfy.model_management
    import comfy.sd

    compiler, prepared_s, loaded = Variant.parse(options.variant).compiler, 0.0, dict[str, Any]()
    if compiler is not None:
        prepared_s = seconds_of(_prepare)

    def load() -> None:
        loaded.update(clip=prompts.loaded(parts), vae=decoding.loaded(parts), model=any_card.from_file(parts, _FORM))

    load_s = seconds_of(load)
    if compiler is not None:
        from onediff_comfy.host.adapters.text_encoder import accelerate_clip
        from onediff_comfy.host.adapters.vae import accelerate_vae

        loaded["clip"], loaded["vae"] = (
            accelerate_clip(loaded["clip"], compiler),
            accelerate_vae(loaded["vae"], compiler),
        )
        loaded["model"] = variant(loaded["model"], options.variant)
    sampler, images = Sampler(options.model, None, 1, _STEPS), list[dict[str, float]]()
    for seed in range(_IMAGES):
        images.append(_image(sampler, seed, **loaded))
        print(images[-1], flush=True)
    return {
        "what": {key: str(value) for key, value in vars(options).items() if key not in ("output", "make")},
        "environment": environment(comfy.model_management.get_torch_device()),
        "prepared_s": prepared_s,
        "load_s": load_s,
        "images": images,
        "counted": counters(),
        "most_mib": memory_of_process() | {"device": memory_of_device(loaded["vae"].device)},
    }


def _prepare() -> None:
    """Do what ``host/preparation/first_prompt.py`` has done while a server waits."""
    from onediff_comfy.host.adapters import model  # noqa: F401 - the core
    from onediff_comfy.host.process import latest_graphs

    latest_graphs.import_compiler()
    latest_graphs.load()


def _image(sampler: Sampler, seed: int, clip: Any, vae: Any, model: Any) -> dict[str, float]:
    """Make an image, and return the seconds of its parts."""
    ends = [when_done()]
    prompts.encode(clip, f"a lighthouse on a cliff, number {seed}", [])
    ends.append(when_done())
    latent = sampler(model, seed)
    any_card.end_of_node()
    ends.append(when_done())
    decoding.at_end_of_node(lambda vae: vae.decode(latent), vae, [])
    ends.append(when_done())
    text, steps, decoded = (after - before for before, after in itertools.pairwise(ends))
    return {"text_s": text, "steps_s": steps, "decoding_s": decoded, "whole_s": ends[-1] - ends[0]}


if __name__ == "__main__":
    sys.exit(main())

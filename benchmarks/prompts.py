"""Time prompts through a Flux' text encoders read from files, and note the memory of a process: eager, or ours.

    COMFYUI_PATH=... python -m benchmarks.prompts --form fp16 --variant eager --folder FOLDER --output FILE
    ... --variant onediff-inductor        another process: what it gives is compared with what eager gave

The CLIP is in Dynamic VRAM, as the host's server has it by default on NVIDIA, unless it is tiny. CLIP-L and T5 get
random weights; with ``fp8`` T5's are of scaled 8 bits. The first process writes them to FOLDER, and all read them
there.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .any_card import end_of_node
from .host import reported, seconds_of, start_host
from .memory_modes import off
from .process_memory import memory_of_device, memory_of_process
from .sampling import environment
from .variants import Variant

if TYPE_CHECKING:
    import torch

_ROUNDS = 3
_STACKS = 2  # of layers, which a prompt goes through
_ALLOWED = 1e-3  # of the range: what rounding in another order explains
_PROMPTS = ("a lighthouse on a cliff", "two dogs in the evening light, " * 8, "a road", "a (house:1.3) by the sea")
_SIZES: dict[str, dict[str, dict[str, int]]] = {
    "flux": {},
    "tiny": {
        "clip_l": {"num_hidden_layers": 2, "intermediate_size": 256},
        "t5xxl": {"num_layers": 2, "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4},
    },
}
_FORMS = ("fp16", "fp8")


def main() -> int:
    """Run the benchmark, print what it finds and write JSON. Ends with 1 if ours ran eager or gave something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=_SIZES, default="flux", help="tiny: for a CPU, to see that it runs")
    parser.add_argument("--form", choices=_FORMS, default="fp16", help="of T5's weights")
    parser.add_argument("--variant", default="eager", help="eager, onediff-inductor, ...")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the files of weights")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--make", action="store_true", help="write the files, and end")
    options = parser.parse_args()
    if options.make:  # a process of its own, for in Dynamic VRAM the host makes no layers without weights
        start_host()
        make(options)
        return 0
    is_ours = Variant.parse(options.variant).compiler is not None
    if is_ours and not _expected(options).exists():
        parser.error(f"nothing to compare with in {options.folder}; run it with --variant eager first")
    if not all(file.exists() for file in files(options)):
        subprocess.run([sys.executable, "-m", "benchmarks.prompts", *sys.argv[1:], "--make"], check=True)
    start_host(dynamic_vram=options.model != "tiny")
    report = reported(lambda: _run(options), options.output)
    print(report)
    is_served = report["served"] == _STACKS * _ROUNDS * len(_PROMPTS) and not report["fallbacks"]
    return 0 if (is_served or not is_ours) and max(report["off"]) <= _ALLOWED else 1


def files(options: argparse.Namespace) -> list[Path]:
    """Return the files of weights of both text encoders."""
    return [options.folder / f"{options.model}-{part}.safetensors" for part in ("clip_l", f"t5xxl-{options.form}")]


def _expected(options: argparse.Namespace) -> Path:
    """Return the file of what eager gave."""
    folder: Path = options.folder
    return folder / f"{options.model}-prompts-{options.form}.pt"


def _target(model: str, form: str) -> tuple[Any, dict[str, Any]]:
    """Return what the host makes a CLIP of: its classes, and sizes other than the real ones."""
    import torch
    from comfy.text_encoders.flux import FluxTokenizer, flux_clip

    encoders = flux_clip(torch.float16, {"mixed_ops": True} if form == "fp8" else None)
    configs = {f"{name}_model_config": config for name, config in _SIZES[model].items()}
    return SimpleNamespace(params={}, clip=encoders, tokenizer=FluxTokenizer), configs


def make(options: argparse.Namespace) -> None:
    import torch
    from safetensors.torch import save_file

    from tools.models.formats import checkpoint

    from .models import random_weight

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    target, configs = _target(options.model, "fp16")
    with torch.device("meta"):
        encoders = target.clip(device="meta", dtype=torch.float16, model_options=configs)
    for part, file in zip(("clip_l", "t5xxl"), files(options), strict=True):
        weights = {
            name: random_weight(name, torch.empty(like.shape, device=device, dtype=torch.float16), generator).cpu()
            for name, like in getattr(encoders, part).transformer.state_dict().items()
        }
        in_form = checkpoint(weights, "fp8") if options.form == "fp8" and part == "t5xxl" else weights
        save_file(in_form, file, metadata={"format": "pt"})


def _run(options: argparse.Namespace) -> dict[str, Any]:
    import comfy.model_management
    import torch

    device = comfy.model_management.text_encoder_device()
    clips, seconds, given = list[Any](), list[list[float]](), list[torch.Tensor]()
    load_s = seconds_of(lambda: clips.append(loaded(options)))
    (clip,) = clips
    compiler, dispatcher = Variant.parse(options.variant).compiler, None
    if compiler is not None:
        from onediff_comfy.host.adapters.text_encoder import accelerate_clip, find_clip_dispatcher

        clip = accelerate_clip(clip, compiler)
        dispatcher = find_clip_dispatcher(clip)
    for _ in range(_ROUNDS):
        given.clear()
        seconds.append([seconds_of(functools.partial(encode, clip, prompt, given)) for prompt in _PROMPTS])
    found = {} if dispatcher is None else dispatcher.metrics.snapshot()
    if dispatcher is None:
        torch.save(given, _expected(options))
    pairs = zip(given, torch.load(_expected(options)), strict=True)
    return {
        "what": {key: str(value) for key, value in vars(options).items() if key not in ("output", "make")},
        "environment": environment(device),
        "is_dynamic": clip.patcher.is_dynamic(),
        "load_s": load_s,
        "prompts_s": seconds,
        "off": [off(ours, eager) for ours, eager in pairs],
        "most_mib": memory_of_process() | {"device": memory_of_device(device)},
        "served": found.get("served", 0),
        "fallbacks": found.get("fallbacks", {}),
    }


def loaded(options: argparse.Namespace) -> Any:
    """Return the CLIP, as the host's loaders make it of what a file is."""
    import comfy.sd
    import comfy.utils

    target, configs = _target(options.model, options.form)
    weights = [comfy.utils.load_torch_file(str(file)) for file in files(options)]
    return comfy.sd.CLIP(target, state_dict=weights, model_options=configs)


def encode(clip: Any, prompt: str, given: list[torch.Tensor]) -> None:
    """Add what a prompt becomes, on the CPU, to ``given``."""
    try:
        ((embedding, extras),) = clip.encode_from_tokens_scheduled(clip.tokenize(prompt))
        given += [embedding.float().cpu(), extras["pooled_output"].float().cpu()]
    finally:
        end_of_node()


if __name__ == "__main__":
    sys.exit(main())

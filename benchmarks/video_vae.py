"""Time decoding a video: eager and ours by turns, with a VAE of Wan's size and random weights.

    COMFYUI_PATH=... ONEDIFF_CACHE_DIR=EMPTY_FOLDER python -m benchmarks.video_vae --size 832x480 --frames 81
    ... python -m benchmarks.video_vae --model tiny --size 64x48 --frames 33 --engine eager     on a CPU

The first video of ours is timed as a person waits for it, compilation included. Each output is compared with eager's,
and eager's with itself on the same latent, since its convolutions need not give the same bits twice.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from typing import Any

from .host import reported, seconds_of, start_host
from .sampling import counters, environment, peak_mib, reset_peak, spread

_DIMS = {"wan2.1": 96, "tiny": 16}
_CHANNELS, _SIDE, _FRAMES = 16, 8, 4  # of the latent; pixels of a side and frames for each of its own


def main() -> int:
    """Run the benchmark; write JSON, print a table. Ends with 1 if no piece was served."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(_DIMS), default="wan2.1")
    parser.add_argument("--size", default="832x480", help="width x height in pixels")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--engine", default="inductor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    start_host()
    report = reported(lambda: _run(options), options.output)
    for name, row in report["ways"].items():
        print(f"{name:12} {row['s']:8.3f} s ({row['s_min']:.3f} to {row['s_max']:.3f}), peak {row['peak_mib']:.0f} MiB")
    print({key: report[key] for key in ("first_s", "relative_error", "eager_error", "counted")})
    return int(report["counted"]["served"] == 0)


def _run(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from onediff_comfy.host.adapters.vae import accelerate_vae
    from onediff_comfy.host.process.process import library

    from .measures import relative_error

    library().background = None  # no graph of one size is made while the general one is timed
    vae = random_video_vae(_DIMS[options.model])
    ways = {"eager": vae, "ours": accelerate_vae(vae, options.engine)}
    width, height = (int(side) // _SIDE for side in options.size.split("x"))
    shape = (1, _CHANNELS, 1 + (options.frames - 1) // _FRAMES, height, width)
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    outputs = {name: way.decode(latent) for name, way in (("first eager", vae), ("eager", vae))}
    first = seconds_of(functools.partial(ways["ours"].decode, latent))
    outputs["ours"] = ways["ours"].decode(latent)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = {}
    for _ in range(options.rounds):
        for name, way in ways.items():
            reset_peak()
            seconds[name].append(seconds_of(functools.partial(way.decode, latent)))
            peaks[name] = max(peaks.get(name, 0.0), peak_mib() or 0.0)
    rows = {name: {**spread("s", times), "peak_mib": peaks[name]} for name, times in seconds.items()}
    return {
        "what": {key: value for key, value in vars(options).items() if key != "output"},
        "dtype": str(vae.vae_dtype),
        "environment": environment(vae.device),
        "first_s": first,
        "relative_error": relative_error(outputs["ours"], outputs["eager"]),
        "eager_error": relative_error(outputs["first eager"], outputs["eager"]),
        "counted": counters(),
        "ways": rows,
    }


def random_video_vae(dim: int) -> Any:
    """Return a ComfyUI VAE as of Wan 2.1, with weights that keep activations near unit variance.

    Args:
        dim: channels of its first level: 96 in the real one.
    """
    import comfy.ldm.wan.vae
    import comfy.sd
    import torch

    with torch.device("meta"):
        module = comfy.ldm.wan.vae.WanVAE(dim=dim, z_dim=_CHANNELS, temperal_downsample=[False, True, True])
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, meta in module.state_dict().items():
        noise = torch.randn(meta.shape, generator=generator)
        if name.endswith("gamma"):
            weights[name] = 1 + 0.05 * noise
        else:
            weights[name] = noise / math.sqrt(math.prod(meta.shape[1:])) if meta.ndim >= 2 else 0.05 * noise
    return comfy.sd.VAE(sd=weights)


if __name__ == "__main__":
    sys.exit(main())

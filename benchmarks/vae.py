"""Time a VAE through ComfyUI's own calls: eager, our graph for all sizes, our graph for one size.

    COMFYUI_PATH=... ONEDIFF_CACHE_DIR=EMPTY_FOLDER python -m benchmarks.vae --output FILE
    ... python -m benchmarks.vae --model tiny --output FILE        on a CPU, to see that it runs

A VAE of SDXL's size with random weights, in the dtype that the host chooses for it. Everything is compiled
first, while somebody would wait. Then, size by size, memory is measured with nothing else held, each output is
compared with eager's and, at the bucket's size, all with float32; and all ways take turns at being timed: the
module alone, and the node's whole call, which ends with the picture in the host's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .host import kinds_of_graphs, reported, seconds_of, start_host
from .sampling import environment


@dataclass(frozen=True)
class Case:
    """Something that a VAE node does.

    Attributes:
        what: ``decode``, ``decode_tiled`` or ``encode``.
        side: of the square image, in pixels.
        tile: the side of tiles, in pixels; 0 without.
    """

    what: str
    side: int
    tile: int = 0

    @property
    def calls_to_settle(self) -> int:
        """A first one, three that are measured, one in which a CUDA graph may be recorded, one that replays it.

        Tiles are calls enough.
        """
        return 2 if self.tile else 6

    def __str__(self) -> str:
        return f"{self.what} {self.side}" + (f" by {self.tile}" if self.tile else "")


@dataclass(frozen=True)
class Plan:
    """What is measured: channels of the VAE's first level, the cases, and the bucket's side in pixels."""

    channels: int
    cases: tuple[Case, ...]
    bucket: int

    def only(self, cases: str | None) -> Plan:
        """The same for some cases alone, such as ``decode-1024,encode-1024``; for all if it is None."""
        if cases is None:
            return self
        wanted = cases.replace("-", " ").split(",")
        return replace(self, cases=tuple(case for case in self.cases if str(case) in wanted))


PLANS = {
    "sdxl": Plan(
        128,
        (
            *(Case("decode", side) for side in (512, 1024, 1536, 2048)),
            Case("decode_tiled", 2048, 512),
            Case("encode", 1024),
        ),
        1024,
    ),
    "tiny": Plan(
        32, (*(Case("decode", side) for side in (64, 128)), Case("decode_tiled", 128, 64), Case("encode", 128)), 128
    ),
}


def main() -> int:
    """Run the benchmark; write JSON, print a table."""
    options = _arguments()
    start_host()
    report = reported(lambda: _Bench(options).run(), options.output)
    _print_table(report)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(PLANS), default="sdxl")
    parser.add_argument("--engine", default="inductor")
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of each way and case")
    parser.add_argument(
        "--no-bucket", action="store_true", help="leave out the graph for one size: two compilations less"
    )
    parser.add_argument("--cases", help="some of them alone, such as decode-1024,encode-1024")
    parser.add_argument("--output", help="JSON file to write")
    return parser.parse_args()


class _Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.plan = PLANS[options.model].only(options.cases)
        self.vae = random_vae(self.plan.channels)
        self.ways: dict[str, Any] = {"eager": self.vae, "general": self.accelerated()}
        if not options.no_bucket:
            self.ways["bucket"] = self.accelerated(f"{self.plan.bucket}x{self.plan.bucket} b1")

    def run(self) -> dict[str, Any]:
        from onediff_comfy.host.process.process import library, metrics

        from .measures import relative_error

        compiling = {case: self.compile(case) for case in self.plan.cases}
        # What comes often gets a graph of its own, in the background: not while the general one is timed.
        library().background = None
        rows = []
        for case in self.plan.cases:
            ways = self.ways_of(case)
            outputs, memory, graphs = {}, {}, {}
            for name in ways:
                before = metrics().served_by()
                outputs[name], memory[name] = self.settled(case, name)
                calls = metrics().served_by()
                graphs[name] = kinds_of_graphs(key for key in calls if calls[key] > before.get(key, 0))
            errors = {name: relative_error(output, outputs["eager"]) for name, output in outputs.items()}
            exact = self.errors_against_float32(case, outputs) if self.has_bucket(case) else {}
            times = self.timed(case, ways)
            for name in ways:
                row = {"case": str(case), "way": name, "graphs": graphs[name], **times[name], **memory[name]}
                row["relative_error"] = errors[name]
                rows.append(row | ({"error_against_float32": exact[name]} if exact else {}))
                print(f"{case} {name}: {times[name]}", flush=True)
        return {
            "what": {key: value for key, value in vars(self.options).items() if key != "output"},
            "dtype": str(self.vae.vae_dtype),
            "environment": environment(self.vae.device),
            "first_calls_s": {str(case): seconds for case, seconds in compiling.items()},
            "rows": rows,
            "onediff": metrics().snapshot(),
        }

    def accelerated(self, buckets: str | None = None) -> Any:
        from onediff_comfy.buckets import BucketSet
        from onediff_comfy.host.adapters.vae import accelerate_vae

        return accelerate_vae(self.vae, self.options.engine, buckets=BucketSet.parse(buckets) if buckets else None)

    def ways_of(self, case: Case) -> list[str]:
        """The names of the ways that differ for ``case``."""
        return [name for name in self.ways if name != "bucket" or self.has_bucket(case)]

    def has_bucket(self, case: Case) -> bool:
        """Whether ``case`` is of the size that gets a graph of its own."""
        return case.side == self.plan.bucket and not case.tile

    def compile(self, case: Case) -> dict[str, float]:
        """Seconds of the first call of each way; with a bucket, its graph is made in it."""
        from onediff_comfy.host.adapters.vae import preparing

        seconds = {}
        for name in self.ways_of(case):
            vae = preparing(self.ways[name], exact=True) if name == "bucket" else self.ways[name]
            seconds[name] = seconds_of(functools.partial(self.called, vae, case))
            print(f"{case} {name}: first call {seconds[name]:.2f} s", flush=True)
        return seconds

    def settled(self, case: Case, name: str) -> tuple[Any, dict[str, float]]:
        """The output of a few calls, and the most memory that they took with nothing else held, in MiB.

        ``peak_mib`` is what tensors took, weights included; ``reserved_mib`` what PyTorch took from the device for it,
        and ``held_mib`` what is still taken by tensors and CUDA graphs afterwards.
        """
        with _peak_memory() as memory:
            for _ in range(case.calls_to_settle):
                output = self.node_call(case, name)
        return output, memory

    def timed(self, case: Case, ways: list[str]) -> dict[str, dict[str, float]]:
        """Median milliseconds of the module's call and of the node's; all ways take turns."""
        calls: dict[tuple[str, str], Callable[[], Any]] = {}
        for name in ways:
            calls[name, "node_ms"] = functools.partial(self.node_call, case, name)
            if not case.tile:
                calls[name, "module_ms"] = self.module_call(case, name)
        times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for number in range(self.options.rounds + case.calls_to_settle - 1):
            for key, call in calls.items():
                seconds = seconds_of(call)
                if number >= case.calls_to_settle - 1:
                    times[key].append(1000 * seconds)
        return {
            name: {what: statistics.median(values) for (way, what), values in times.items() if way == name}
            for name in ways
        }

    def node_call(self, case: Case, name: str) -> Any:
        return self.called(self.ways[name], case)

    def called(self, vae: Any, case: Case) -> Any:
        """What the host's node calls: [1, 4, side/8, side/8] → [1, side, side, 3] on the CPU, or back."""
        data = self.input(case)
        if case.what == "encode":
            return vae.encode(data)
        if case.tile:
            tile, overlap = case.tile // 8, case.tile // 64
            return vae.decode_tiled(data, tile_x=tile, tile_y=tile, overlap=overlap)
        return vae.decode(data)

    def module_call(self, case: Case, name: str) -> Callable[[], Any]:
        """The part of ``node_call`` that runs on the device."""
        vae, data = self.ways[name], self.input(case)
        if case.what == "encode":
            data = vae.process_input(data.movedim(-1, 1))
        data = data.to(vae.device, vae.vae_dtype).contiguous()
        return lambda: getattr(vae.first_stage_model, case.what)(data)

    def input(self, case: Case) -> Any:
        """A random latent, or a smooth random image with values from 0 to 1."""
        import torch

        generator = torch.Generator().manual_seed(case.side)
        if case.what != "encode":
            return torch.randn(1, 4, case.side // 8, case.side // 8, generator=generator)
        small = torch.rand(1, 3, 16, 16, generator=generator)
        image = torch.nn.functional.interpolate(small, (case.side, case.side), mode="bicubic").clamp(0, 1)
        return image.movedim(1, -1)

    def errors_against_float32(self, case: Case, outputs: dict[str, Any]) -> dict[str, float]:
        """The relative error of each output against the same VAE in float32."""
        import torch

        from .measures import relative_error

        reference = random_vae(self.plan.channels, torch.float32)
        exact = reference.decode(self.input(case)) if case.what == "decode" else reference.encode(self.input(case))
        return {name: relative_error(output, exact) for name, output in outputs.items()}


def random_vae(channels: int, dtype: Any = None, latent: int = 4) -> Any:
    """A ComfyUI VAE with random weights, as SDXL's where its first level has 128 ``channels``.

    Args:
        channels: of the first level.
        dtype: to compute in; the host's choice if it is None.
        latent: channels of its latents: 16 for one of Flux' size.
    """
    import comfy.sd
    import torch
    from comfy.ldm.models.autoencoder import AutoencoderKL

    levels: dict[str, Any] = {
        "double_z": True,
        "z_channels": latent,
        "resolution": 256,
        "in_channels": 3,
        "out_ch": 3,
        "ch": channels,
    }
    levels |= {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    config = {"ddconfig": levels, "embed_dim": latent}
    with torch.device("meta"):
        shapes = AutoencoderKL(**config).state_dict()
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape.shape, generator=generator)
        if noise.ndim >= 2:
            weights[name] = noise / math.sqrt(noise[0].numel())
        else:
            weights[name] = 0.02 * noise + (1 if name.endswith("weight") else 0)
    return comfy.sd.VAE(sd=weights, config={"params": config}, dtype=dtype)


@contextlib.contextmanager
def _peak_memory() -> Iterator[dict[str, float]]:
    import torch

    from onediff_comfy.host.process.process import library

    memory: dict[str, float] = {}
    library().recordings.release()
    gc.collect()
    if not torch.cuda.is_available():
        yield memory
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield memory
    gc.collect()
    torch.cuda.synchronize()
    memory["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    memory["reserved_mib"] = torch.cuda.max_memory_reserved() / 2**20
    torch.cuda.empty_cache()  # what is left belongs to somebody
    memory["held_mib"] = torch.cuda.memory_reserved() / 2**20


def _print_table(report: dict[str, Any]) -> None:
    print(f"\n{report['what']['model']} VAE in {report['dtype']}; {report['environment']}")
    print(f"{'':22} {'':8} {'module ms':>16} {'node ms':>16} {'peak MiB':>9} {'held':>7} {'error':>8} {'to fp32':>8}")
    eager: dict[str, Any] = {}
    for row in report["rows"]:
        eager = row if row["way"] == "eager" else eager
        cells = []
        for what in ("module_ms", "node_ms"):
            ratio = f"{eager[what] / row[what]:.2f}x" if what in row else ""
            cells.append(f"{row[what]:8.1f} {ratio:>7}" if what in row else "")
        memory = [f"{row[what]:.0f}" if what in row else "-" for what in ("peak_mib", "held_mib")]
        exact = f"{row['error_against_float32']:.1e}" if "error_against_float32" in row else ""
        exact += "  " + " ".join(row["graphs"])
        line = f"{row['case']:22} {row['way']:8} {cells[0]:>16} {cells[1]:>16} {memory[0]:>9} {memory[1]:>7} "
        print(line + f"{row['relative_error']:8.1e} {exact}")
    print("first calls, s:", report["first_calls_s"])
    print("onediff:", {k: v for k, v in report["onediff"].items() if k != "graphs"})
    for graph in report["onediff"]["graphs"]:
        print(f"  {graph['how']} {graph['what']} with {graph['engine']} in {graph['seconds']} s")


if __name__ == "__main__":
    sys.exit(main())

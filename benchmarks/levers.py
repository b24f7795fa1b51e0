"""Measure ways to be faster by themselves, before anything of them is built: what is, and what could be, in µs.

    python -m benchmarks.levers --output FILE        on a GPU; needs no ComfyUI
    python -m benchmarks.levers --shrink 16          on a CPU, to see that it runs

Tensors have the shapes of a step of SDXL or Flux at 1024 x 1024. Each time is the median of calls with a cold cache. On
a GPU a call is replayed as a CUDA graph: launched by itself, a kernel of ten microseconds takes as long as its launch.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .files import write

_FLUX_TOKENS, _FLUX_WIDTH, _FLUX_STEPS, _HEAD = 4608, 3072, 28, 128
_FLUX_WEIGHTS = {  # shapes, and how many a step has of each
    (21504, 3072): 38,
    (3072, 15360): 38,
    (9216, 3072): 38,
    (3072, 3072): 38,
    (12288, 3072): 38,
    (3072, 12288): 38,
}
_NORMS = ((2, 320, 128), (2, 640, 64), (2, 1280, 32), (1, 512, 256), (1, 128, 1024))
_GROUPS = 32
_LARGEST_FP8 = 448.0
_SDXL_TOKENS, _SDXL_HEADS, _SDXL_HEAD, _SDXL_BLOCKS = 1024, 20, 64, 10
_CALLS = 5  # timed on a CPU


@dataclass(frozen=True)
class Bench:
    """Where is measured, and by what sizes are divided."""

    device: str
    shrink: int

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return noise."""
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def us(self, work: Callable[[], object]) -> float:
        """Return the median microseconds of a call."""
        if self.device == "cuda":
            from triton.testing import do_bench

            work()  # compiles, and chooses algorithms
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            return round(1000 * float(do_bench(graph.replay, warmup=50, rep=200, return_mode="median")), 1)
        work()
        times = []
        for _ in range(_CALLS):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return round(1e6 * statistics.median(times), 1)


def main() -> int:
    """Measure; write JSON, print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="some of them alone, separated by commas")
    parser.add_argument("--shrink", type=int, default=1, help="divide sizes by this")
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    bench, found = Bench("cuda" if on_gpu else "cpu", options.shrink), dict[str, Any]()
    for name, measure in LEVERS.items():
        if options.only is None or name in options.only.split(","):
            with torch.no_grad():
                found[name] = measure(bench)
            print(f"{name}: {found[name]}", flush=True)
    gpu = torch.cuda.get_device_name() if on_gpu else None
    environment = {"gpu": gpu, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    write({"environment": environment, "us": found}, options.output)
    return 0


def group_norms(bench: Bench) -> dict[str, Any]:
    """Group norm and SiLU as Inductor has them from our capture, what of it is behind the sums, and bytes."""
    from onediff_comfy.capture.rewrites.op_substitutions import group_norm

    ours = torch.compile(lambda x, w, b: F.silu(group_norm(x, _GROUPS, w, b)), dynamic=False)
    behind = torch.compile(_normed, dynamic=False)
    found = {}
    for batch, channels, side in _NORMS:
        small = side // bench.shrink
        image = bench.random(batch, channels, small, small).contiguous(memory_format=torch.channels_last)
        weight, bias = bench.random(2, channels)
        statistics = bench.random(2, batch, _GROUPS, dtype=torch.float32)
        found[f"{batch}x{channels}x{small}x{small}"] = {
            "as it is": bench.us(functools.partial(ours, image, weight, bias)),
            "what is behind statistics": bench.us(functools.partial(behind, image, weight, bias, statistics)),
            "its bytes, read twice and written, at 4.1 TB/s": round(3 * 2 * image.numel() / 4.1e6, 1),
        }
    return found


def _normed(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
    mean, rstd = (each.repeat_interleave(image.shape[1] // _GROUPS, 1)[:, :, None, None] for each in statistics)
    normal = (image.float() - mean) * rstd * weight[:, None, None] + bias[:, None, None]
    return F.silu(normal.to(image.dtype))


def weights_to_fp8(bench: Bench) -> dict[str, Any]:
    """Rounding a Flux step's weights to 8 bits row by row, which a prelude would do once."""
    rounded = torch.compile(_rounded_rows, dynamic=False)
    found, whole = {}, 0.0
    for (rows, columns), count in _FLUX_WEIGHTS.items():
        weight = bench.random(rows // bench.shrink, columns // bench.shrink)
        found[f"{rows}x{columns}"] = bench.us(functools.partial(rounded, weight))
        whole += count * found[f"{rows}x{columns}"]
    return {**found, "a step": round(whole)}


def _rounded_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True).float() / _LARGEST_FP8
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale


def positions(bench: Bench) -> dict[str, Any]:
    """Flux' rotations, which depend on sizes alone."""
    places = torch.arange(_FLUX_TOKENS // bench.shrink, device=bench.device, dtype=torch.float32)

    def angles(places: torch.Tensor, width: int) -> torch.Tensor:
        scale = torch.linspace(0, (width - 2) / width, width // 2, dtype=torch.float64, device=places.device)
        out = places[:, None] * (1.0 / 10000.0**scale)
        return torch.stack([out.cos(), -out.sin(), out.sin(), out.cos()], -1).float()

    compiled = torch.compile(lambda p: torch.cat([angles(p, width) for width in (16, 56, 56)], -2), dynamic=False)
    return {"a step": bench.us(lambda: compiled(places))}


def gelu_epilogue(bench: Bench) -> dict[str, Any]:
    """A product, its bias and GELU: as two kernels, and as one of cuBLASLt's."""
    rows, width = 4096 // bench.shrink, _FLUX_WIDTH // bench.shrink
    x, weight, bias = bench.random(rows, width), bench.random(4 * width, width), bench.random(4 * width)
    two = torch.compile(lambda: F.gelu(F.linear(x, weight, bias), approximate="tanh"), dynamic=False)
    return {
        "product alone": bench.us(lambda: F.linear(x, weight, bias)),
        "two kernels": bench.us(two),
        "epilogue": bench.us(lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True)),
        "of them a step has": 19,
    }


def modulations(bench: Bench) -> dict[str, Any]:
    """Flux' modulations of one step, and of all steps of an image in one product."""
    width = _FLUX_WIDTH // bench.shrink
    double, single = bench.random(6 * width, width), bench.random(3 * width, width)

    def step(rows: int) -> float:
        x = bench.random(rows, width)
        return 38 * bench.us(lambda: F.linear(x, double)) + 38 * bench.us(lambda: F.linear(x, single))

    return {"a step": round(step(1)), "all 28 steps at once": round(step(_FLUX_STEPS))}


def attention(bench: Bench) -> dict[str, Any]:
    """Flux' attention by PyTorch, which on Hopper is cuDNN's, and by SageAttention in 8 bits if that is installed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key, value = (bench.random(1, 24, _FLUX_TOKENS // bench.shrink, _HEAD) for _ in range(3))
    kernel = SDPBackend.CUDNN_ATTENTION if bench.device == "cuda" else SDPBackend.MATH
    with sdpa_kernel(kernel):
        found = {kernel.name: bench.us(lambda: F.scaled_dot_product_attention(query, key, value))}
    try:
        from sageattention import sageattn
    except ImportError:
        return {**found, "SageAttention": "not installed"}
    return {**found, "SageAttention": bench.us(lambda: sageattn(query, key, value))}


def dependent_launch(bench: Bench) -> dict[str, Any]:
    """Blocks of SDXL's deepest level in a CUDA graph, without and with programmatic dependent launch."""
    import torch._inductor.config

    tokens, heads = _SDXL_TOKENS // bench.shrink, max(1, _SDXL_HEADS // bench.shrink)
    width, dtype = heads * _SDXL_HEAD, torch.float16 if bench.device == "cuda" else torch.bfloat16
    x = bench.random(2 * tokens, width, dtype=dtype)
    shapes = ((3 * width, width), (width, width), (8 * width, width), (width, 4 * width))
    weights = [[bench.random(*shape, dtype=dtype) / shape[1] ** 0.5 for shape in shapes] for _ in range(_SDXL_BLOCKS)]

    def blocks(x: torch.Tensor) -> torch.Tensor:
        for to_heads, out, up, down in weights:
            h = F.linear(F.layer_norm(x, (width,)), to_heads)
            q, k, v = h.view(2, tokens, 3, heads, _SDXL_HEAD).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2 * tokens, width)
            x = x + F.linear(attended, out)
            left, right = F.linear(F.layer_norm(x, (width,)), up).chunk(2, -1)
            x = x + F.linear(left * F.gelu(right), down)
        return x

    found = {}
    for name, chosen in (("as it is", False), ("dependent launch", True)):
        torch._dynamo.reset()
        with torch._inductor.config.patch({"triton.enable_pdl": chosen}):
            found[name] = bench.us(functools.partial(torch.compile(blocks, dynamic=False), x))
    return found


LEVERS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "group norms": group_norms,
    "weights to fp8": weights_to_fp8,
    "positions": positions,
    "GELU in the product": gelu_epilogue,
    "modulations": modulations,
    "attention": attention,
    "dependent launch": dependent_launch,
}

if __name__ == "__main__":
    sys.exit(main())

"""Measure ways to be faster by themselves, each before anything of it is built: microseconds of what is, and of what
could be.

    python -m benchmarks.levers --output FILE        on a GPU; needs no ComfyUI

Tensors have the shapes of a step of SDXL or Flux at 1024 x 1024. Each time is the median of calls with a cold cache.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .files import write

_FLUX_TOKENS, _FLUX_WIDTH, _FLUX_STEPS = 4608, 3072, 28
_FLUX_WEIGHTS = {  # shapes, and how many a step has of each
    (21504, 3072): 38,
    (3072, 15360): 38,
    (9216, 3072): 38,
    (3072, 3072): 38,
    (12288, 3072): 38,
    (3072, 12288): 38,
}
_NORMS = ((2, 320, 128, 128), (2, 640, 64, 64), (2, 1280, 32, 32), (1, 512, 256, 256), (1, 128, 1024, 1024))
_GROUPS = 32
_LARGEST_FP8 = 448.0


def main() -> int:
    """Measure; write JSON, print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="some of them alone, separated by commas")
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name, measure in LEVERS.items():
        if options.only is None or name in options.only.split(","):
            try:
                found[name] = measure()
            except Exception as error:  # a library that is not there, or a form that this PyTorch has not
                found[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
            print(f"{name}: {found[name]}", flush=True)
    environment = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    write({"environment": environment, "us": found}, options.output)
    return 0


def _us(work: Callable[[], object]) -> float:
    from triton.testing import do_bench  # type: ignore[import-not-found,unused-ignore]

    return round(1000 * float(do_bench(work, warmup=50, rep=200, return_mode="median")), 1)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def group_norms() -> dict[str, Any]:
    """Group norm and SiLU as Inductor has them from our capture, and their bytes; channels lie together."""
    from onediff_comfy.capture.rewrites.op_substitutions import group_norm

    found = {}
    for shape in _NORMS:
        image = torch.randn(shape, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)
        weight, bias = torch.randn(2, shape[1], device="cuda", dtype=torch.float16)
        ours = torch.compile(lambda x, w, b: F.silu(group_norm(x, _GROUPS, w, b)), dynamic=True)
        statistics = torch.compile(_row_statistics, dynamic=True)
        found[str(shape)] = {
            "as it is": _us(functools.partial(ours, image, weight, bias)),
            "of it the rows' statistics": _us(functools.partial(statistics, image)),
            "its bytes, read twice and written, at 4.1 TB/s": round(3 * 2 * image.numel() / 4.1e6, 1),
        }
    return found


def _row_statistics(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, channels, _, width = image.shape
    rows = image.reshape(batch, _GROUPS, channels // _GROUPS, -1, width).float()
    variance, mean = torch.var_mean(rows, dim=(2, 4), correction=0)
    return variance, mean


def weights_to_fp8() -> dict[str, Any]:
    """Rounding a Flux step's weights to 8 bits row by row, which a prelude would do once."""
    rounded = torch.compile(_rounded_rows, dynamic=False)
    found, whole = {}, 0.0
    for shape, count in _FLUX_WEIGHTS.items():
        weight = _bf16(*shape)
        found[str(shape)] = _us(functools.partial(rounded, weight))
        whole += count * found[str(shape)]
    return {**found, "a step": round(whole)}


def _rounded_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True).float() / _LARGEST_FP8
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale


def positions() -> dict[str, Any]:
    """Flux' rotations, which depend on sizes alone."""
    places = torch.arange(_FLUX_TOKENS, device="cuda", dtype=torch.float32)

    def angles(places: torch.Tensor, width: int) -> torch.Tensor:
        scale = torch.linspace(0, (width - 2) / width, width // 2, dtype=torch.float64, device=places.device)
        out = places[:, None] * (1.0 / 10000.0**scale)
        return torch.stack([out.cos(), -out.sin(), out.sin(), out.cos()], -1).float()

    compiled = torch.compile(lambda p: torch.cat([angles(p, width) for width in (16, 56, 56)], -2), dynamic=False)
    return {"a step": _us(lambda: compiled(places))}


def gelu_epilogue() -> dict[str, Any]:
    """A product, its bias and GELU: as two kernels, and as one of cuBLASLt's."""
    x, weight, bias = _bf16(4096, _FLUX_WIDTH), _bf16(12288, _FLUX_WIDTH), _bf16(12288)
    two = torch.compile(lambda: F.gelu(F.linear(x, weight, bias), approximate="tanh"), dynamic=False)
    return {
        "product alone": _us(lambda: F.linear(x, weight, bias)),
        "two kernels": _us(two),
        "epilogue": _us(lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True)),
        "of them a step has": 19,
    }


def modulations() -> dict[str, Any]:
    """Flux' modulations of one step, and of all steps of an image in one product."""
    double, single = _bf16(18432, _FLUX_WIDTH), _bf16(9216, _FLUX_WIDTH)

    def step(rows: int) -> float:
        x = _bf16(rows, _FLUX_WIDTH)
        return 38 * _us(lambda: F.linear(x, double)) + 38 * _us(lambda: F.linear(x, single))

    return {"a step": round(step(1)), "all 28 steps at once": round(step(_FLUX_STEPS))}


def attention() -> dict[str, Any]:
    """Flux' attention by cuDNN in 16 bits, and by SageAttention in 8, where that is installed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key, value = (_bf16(1, 24, _FLUX_TOKENS, 128) for _ in range(3))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        found = {"cuDNN": _us(lambda: F.scaled_dot_product_attention(query, key, value))}
    try:
        from sageattention import sageattn  # type: ignore[import-not-found,unused-ignore]

        return {**found, "SageAttention": _us(lambda: sageattn(query, key, value))}
    except ImportError:
        return {**found, "SageAttention": "not installed"}


def dependent_launch() -> dict[str, Any]:
    """Ten blocks of SDXL's deepest level in a CUDA graph, without and with programmatic dependent launch."""
    import torch._inductor.config

    x = torch.randn(2048, 1280, device="cuda", dtype=torch.float16) * 0.1
    weights = [torch.randn(a, b, device="cuda", dtype=torch.float16) / b**0.5 for a, b in _BLOCK for _ in range(10)]

    def block(x: torch.Tensor) -> torch.Tensor:
        for number in range(10):
            qkv, out, up, down = weights[number::10]
            h = F.linear(F.layer_norm(x, (1280,)), qkv)
            q, k, v = h.view(2, 1024, 3, 20, 64).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2048, 1280)
            x = x + F.linear(attended, out)
            left, right = F.linear(F.layer_norm(x, (1280,)), up).chunk(2, -1)
            x = x + F.linear(left * F.gelu(right), down)
        return x

    found = {}
    for name, chosen in (("as it is", False), ("dependent launch", True)):
        torch._dynamo.reset()
        with torch._inductor.config.patch({"triton.enable_pdl": chosen}):
            compiled = torch.compile(block, dynamic=False)
            compiled(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                compiled(x)
        found[name] = _us(graph.replay)
    return found


_BLOCK = ((3840, 1280), (1280, 1280), (10240, 1280), (1280, 5120))
LEVERS: dict[str, Callable[[], dict[str, Any]]] = {
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

"""What the libraries' kernels take for one SDXL step: the least that a step can take without kernels of one's own.

    python -m benchmarks.libraries --output FILE            on a GPU; needs no ComfyUI

Every matrix product, convolution and attention of a UNet call at 1024 x 1024 with cfg (batch 2, float16), each alone in
a CUDA graph over several sets of weights, so that none is in a cache. Norms, activations and residuals are not there.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .files import write

_SETS, _REPLAYS, _ROUNDS = 8, 3, 5

# Of the two levels with attention: name, rows, outputs, inputs, how many in a step.
PRODUCTS = (
    ("projection, 1280", 2048, 1280, 1280, 6 * 60 + 2 * 6),
    ("keys or values of the prompt, 1280", 154, 1280, 2048, 2 * 60),
    ("gate, 1280", 2048, 10240, 1280, 60),
    ("back, 1280", 2048, 1280, 5120, 60),
    ("projection, 640", 8192, 640, 640, 6 * 10 + 2 * 5),
    ("keys or values of the prompt, 640", 154, 640, 2048, 2 * 10),
    ("gate, 640", 8192, 5120, 640, 10),
    ("back, 640", 8192, 640, 2560, 10),
)
# Channels in and out, side of the latent, stride, how many; all 3 x 3.
CONVOLUTIONS = (
    (4, 320, 128, 1, 1),
    (320, 320, 128, 1, 7),
    (320, 320, 128, 2, 1),
    (320, 640, 64, 1, 1),
    (640, 640, 64, 1, 6),
    (640, 640, 64, 2, 1),
    (640, 1280, 32, 1, 1),
    (1280, 1280, 32, 1, 10),
    (2560, 1280, 32, 1, 2),
    (1920, 1280, 32, 1, 1),
    (1280, 1280, 64, 1, 1),
    (1920, 640, 64, 1, 1),
    (1280, 640, 64, 1, 1),
    (960, 640, 64, 1, 1),
    (640, 640, 128, 1, 1),
    (960, 320, 128, 1, 1),
    (640, 320, 128, 1, 2),
    (320, 4, 128, 1, 1),
)
# Tokens, heads of 64, tokens that they look at, how many.
ATTENTIONS = ((4096, 10, 4096, 10), (1024, 20, 1024, 60), (4096, 10, 77, 10), (1024, 20, 77, 60))


def main() -> int:
    """Run the benchmark; write JSON, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU")
    with torch.inference_mode():
        rows = [*_products(), *_convolutions(), *_attentions()]
    sums: dict[str, float] = {}
    for row in rows:
        for library, us in row["us"].items():
            sums[f"{row['what']}, {library}"] = sums.get(f"{row['what']}, {library}", 0.0) + us * row["count"] / 1000
    environment = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    write({"environment": environment, "ms_per_step": sums, "rows": rows}, options.output)
    for row in rows:
        print(f"{row['what']:14} {row['of']:36} {row['count']:4}x  {row['us']}")
    for what, ms in sums.items():
        print(f"{ms:8.2f} ms  {what}")
    return 0


def _products() -> list[dict[str, Any]]:
    rows = []
    for name, m, n, k, count in PRODUCTS:
        x, weights, bias = _random(m, k), [_random(n, k) for _ in range(_SETS)], _random(n)
        us = {"cuBLAS, float16": _us([partial(F.linear, x, w, bias) for w in weights])}
        product = partial(torch._scaled_mm, out_dtype=torch.float16)
        scales = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
        eighth = [w.to(torch.float8_e4m3fn) for w in (x, *weights)]
        if m % 16 == 0:
            us["scaled_mm, float8 by rows"] = _us([partial(product, eighth[0], w.t(), *scales) for w in eighth[1:]])
        rows.append({"what": "products", "of": f"{name}: {m} x {n} x {k}", "count": count, "us": us})
    return rows


def _convolutions() -> list[dict[str, Any]]:
    rows = []
    for channels, out, side, stride, count in CONVOLUTIONS:
        x = _random(2, channels, side, side).to(memory_format=torch.channels_last)
        weights = [_random(out, channels, 3, 3).to(memory_format=torch.channels_last) for _ in range(_SETS)]
        bias, us = _random(out), {}
        for name, search in (("cuDNN", False), ("cuDNN after its search", True)):
            with torch.backends.cudnn.flags(enabled=True, benchmark=search):
                us[name] = _us([partial(F.conv2d, x, w, bias, stride, 1) for w in weights])
        rows.append(
            {"what": "convolutions", "of": f"{channels} to {out}, {side}, by {stride}", "count": count, "us": us}
        )
    return rows


def _attentions() -> list[dict[str, Any]]:
    rows = []
    for tokens, heads, others, count in ATTENTIONS:
        query = [_random(2, tokens, heads, 64).transpose(1, 2) for _ in range(_SETS)]
        key = [_random(2, others, heads, 64).transpose(1, 2) for _ in range(_SETS)]
        us = {}
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(backend):
                pairs = zip(query, key, strict=True)
                us[backend.name] = _us([partial(F.scaled_dot_product_attention, q, k, k) for q, k in pairs])
        rows.append({"what": "attention", "of": f"{tokens} x {heads} to {others}", "count": count, "us": us})
    return rows


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16) / 20


def _us(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of one of the calls, the fastest of some rounds; all are in one CUDA graph."""
    for call in itertools.islice(calls, 3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(_ROUNDS):
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, 1000 * begin.elapsed_time(end) / _REPLAYS / len(calls))
    return best


if __name__ == "__main__":
    sys.exit(main())

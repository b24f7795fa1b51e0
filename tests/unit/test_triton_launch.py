"""triton_launch.py: Triton kernels get addresses, and can be recorded with the allocator that ComfyUI chooses."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_comfy.engines.inductor.triton_launch import by_address

heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What PyTorch's launcher is given from now on, with the server's allocator."""
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(
        heuristics.CachingAutotuner, "run", lambda _kernel, *arguments, stream: given.append((*arguments, stream))
    )
    return given


def _launch(*arguments: Any) -> None:
    heuristics.CachingAutotuner.run(object(), *arguments, stream=7)


def test_tensors_are_launched_with_by_their_addresses(launched: list[tuple[Any, ...]]) -> None:
    tensor, part = torch.ones(8), torch.ones(8)[2:]
    with by_address():
        _launch(tensor, part, 8, 1.5, None)
    assert launched == [(tensor.data_ptr(), part.data_ptr(), 8, 1.5, None, 7)]


def test_what_other_threads_launch_is_as_it_was(launched: list[tuple[Any, ...]]) -> None:
    tensor = torch.ones(8)
    with by_address():
        other = threading.Thread(target=_launch, args=(tensor,))
        other.start()
        other.join()
    assert launched[0][0] is tensor


def test_nothing_stays(launched: list[tuple[Any, ...]]) -> None:
    tensor, before = torch.ones(8), heuristics.CachingAutotuner.run
    with contextlib.suppress(KeyError), by_address():
        assert heuristics.CachingAutotuner.run is not before
        raise KeyError
    assert heuristics.CachingAutotuner.run is before
    _launch(tensor)
    assert launched[0][0] is tensor


def test_recordings_of_two_threads_come_one_after_another(launched: list[tuple[Any, ...]]) -> None:
    """Else the first to end takes the other's launcher away, and the last leaves the first's there for ever."""
    before, begun, inside = heuristics.CachingAutotuner.run, threading.Event(), threading.Event()

    def other() -> None:
        begun.set()
        with by_address():
            inside.set()

    thread = threading.Thread(target=other)
    with by_address():
        thread.start()
        begun.wait()
        assert not inside.wait(0.2)
    thread.join()
    assert inside.is_set() and heuristics.CachingAutotuner.run is before


def test_with_pytorchs_own_allocator_nothing_is_done(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    tensor = torch.ones(8)
    with by_address():
        _launch(tensor)
    assert launched[0][0] is tensor


_AS_IN_THE_SERVER = """
import logging, sys, torch
from torch import nn
import torch.nn.functional as F
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.metrics import Metrics
assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
logging.basicConfig(level=logging.WARNING)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        x = x + self.conv(F.silu(self.norm(x)))
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = (part.unflatten(2, (1, 64)).transpose(1, 2) for part in self.qkv(tokens).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(y).transpose(1, 2).unflatten(2, x.shape[2:])

host = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)
library = GraphLibrary(GraphCache(1 << 30), Metrics())
dispatcher, module = Dispatcher("inductor", library, host), Net().cuda().half()
worst = 0.0
with torch.inference_mode():
    for side in (32, 48, 32, 48, 32, 48, 32, 48):
        x = torch.randn(2, 64, side, 40, device="cuda", dtype=torch.half)
        actual, expected = dispatcher(module, module.forward, (x,), {}), module(x)
        worst = max(worst, float((actual - expected).norm() / expected.norm()))
counted = library.metrics.snapshot()
print(counted["recorded"], counted["served"], worst < 5e-3, counted["fallbacks"])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_inductors_code_is_recorded_with_the_servers_allocator(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "PYTHONFAULTHANDLER": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", _AS_IN_THE_SERVER]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert run.stdout.strip().endswith("2 8 True {}"), run.stdout + run.stderr[-4000:]
    assert "recorded" not in run.stderr  # "a graph cannot be recorded"

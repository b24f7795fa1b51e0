"""What several unit tests need: fresh processes, and a capture in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.call import Call, bind, split
from onediff_comfy.capture.export import Capture
from onediff_comfy.capture.rewrites.op_substitutions import Forms
from onediff_comfy.capture.target.target import Target
from onediff_comfy.capture.tracing.trace_forward import TraceSettings, capture
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.oneflow import install
from onediff_comfy.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = "transformer_options"
CPU = torch.device("cpu")

torch.set_num_threads(1)  # everything here is tiny, and the machine may be shared


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root folder."""
    return ROOT


@pytest.fixture
def library() -> GraphLibrary:
    """What a process knows of graphs, in memory alone."""
    return GraphLibrary(GraphCache(1 << 30), Metrics())


@pytest.fixture
def anew() -> Iterator[None]:
    """What is found out about OneFlow holds for the whole process; not beyond a test that pretends another."""
    for question in (install._held, install._not_importable):
        question.cache_clear()
    yield
    for question in (install._held, install._not_importable):
        question.cache_clear()


@pytest.fixture
def no_oneflow(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no OneFlow, whatever is installed or on the path."""
    monkeypatch.setitem(sys.modules, "oneflow", None)  # Python's own way to say that there is none


@pytest.fixture(scope="session")
def fresh_process() -> Callable[..., Any]:
    """Runs Python code in a process of its own; gives back what it printed, read as JSON."""

    def run(code: str, **environment: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def identities() -> list[dict[str, Any]]:
    """What ``identities.py`` prints in two fresh processes that differ in their hash seed."""
    script = Path(__file__).with_name("identities.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    printed = [process.communicate(timeout=120) for process in processes]
    for process, (_, errors) in zip(processes, printed, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(text.strip().splitlines()[-1]) for text, _ in printed]


@dataclass(frozen=True)
class Captured:
    """A capture with what it was made from."""

    target: Target
    call: Call
    capture: Capture

    def covers(self, module: torch.nn.Module, *args: Any) -> bool:
        """Whether the graph is for a call of these sizes."""
        return self.capture.shapes.values(split(bind(module.forward, args, {})).signature.tensors) is not None

    def run_on(self, module: torch.nn.Module, *args: Any) -> Any:
        """The graph's output for another call of the module that was captured."""
        return self.run(*split(bind(module.forward, args, {})).tensors)

    @property
    def digest(self) -> str:
        return self.capture.digest

    def run(self, *tensors: torch.Tensor, target: Target | None = None) -> Any:
        """The graph's output, put together again, for the weights that are in place in ``target`` now."""
        binding = self.capture.binding
        tensors = tensors or tuple(self.call.tensors)
        weights = (target or self.target).weights(binding.weight_names, tensors[0].device if tensors else CPU)
        with torch.no_grad():
            flat = self.capture.graph(*binding.feed(weights, tensors))
        return torch.utils._pytree.tree_unflatten(flat, binding.output)


@pytest.fixture(scope="session")
def capture_of() -> Callable[..., Captured]:
    """Captures ``module(*args, **kwargs)``, where its weights and tensors are."""

    def make(
        module: torch.nn.Module,
        *args: Any,
        read: tuple[str, ...] = (),
        overrides: Mapping[str, Any] | None = None,
        general: bool = False,
        forms: Forms | None = None,
        multiple: int = 1,
        check: Callable[[], None] = lambda: None,
        **kwargs: Any,
    ) -> Captured:
        arguments = bind(module.forward, args, kwargs)
        call = split(arguments, options_name=OPTIONS, options_read=read)
        target = Target(module)
        settings = TraceSettings(OPTIONS, overrides or {}, check, general, forms or {}, multiple)
        options = arguments.get(OPTIONS) or {}
        return Captured(target, call, capture(target, module.forward, call, options, settings))

    return make

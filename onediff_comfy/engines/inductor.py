"""PyTorch Inductor: fused Triton kernels on a GPU, fused C++ on the CPU."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..capture.trace import Binding, Capture
from .base import CompiledGraph, Engine, EngineError


class InductorGraph(CompiledGraph):
    def __init__(self, binding: Binding, artifact: Callable[..., Sequence[torch.Tensor]]) -> None:
        super().__init__(binding)
        self._artifact = artifact

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._artifact(*self.binding.feed(weights, tensors))


class InductorEngine(Engine):
    name = "inductor"

    def unavailable(self, device: torch.device) -> str | None:
        if device.type == "cuda" and _version_of("triton") is None and _version_of("triton-windows") is None:
            return "Triton is not installed; install the triton package that fits this torch"
        if device.type not in ("cpu", "cuda", "xpu"):
            return f"Inductor has no backend for {device.type} devices"
        return _unwritable_cache_folder()

    def versions(self, device: torch.device) -> Mapping[str, str]:
        return {"triton": _version_of("triton") or _version_of("triton-windows") or "none"}

    def compile(self, capture: Capture) -> CompiledGraph:
        import torch._functorch.config as functorch_config
        from torch._inductor import standalone_compile

        # standalone_compile looks for the graph's fake tensors under the name that Dynamo gives them.
        output = next(iter(reversed(capture.graph.graph.nodes)))
        for node in output.args[0]:
            if isinstance(node, torch.fx.Node):
                node.meta["example_value"] = node.meta["val"]
        try:
            # PyTorch 2.13's AOTAutograd cache can return the graph of another shape without an
            # error. It cannot be switched off (an artifact is serialised through it), but the tag
            # is part of its keys: with the capture's own digest in them, graphs cannot be mixed up.
            with (
                torch.no_grad(),
                torch.compiler.config.patch(cache_key_tag=capture.digest),  # type: ignore[attr-defined]
                functorch_config.patch(enable_autograd_cache=True),
            ):
                artifact: Any = standalone_compile(
                    capture.graph, capture.examples(), dynamic_shapes="from_graph", aot=True
                )
        except Exception as error:
            raise _explained(error) from error
        return InductorGraph(capture.binding, artifact)


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unwritable_cache_folder() -> str | None:
    """Why Inductor, which writes every kernel to its cache folder, cannot; known before minutes of work."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "(default)")
    try:
        folder = cache_dir()
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return (
            f"its cache folder {folder} cannot be written to ({error.strerror or error}); "
            "make it writable or set TORCHINDUCTOR_CACHE_DIR to a folder that is"
        )


def _explained(error: Exception) -> EngineError:
    text = str(error)
    first_line = (text.strip().splitlines() or [type(error).__name__])[0]
    if "InvalidCxxCompiler" in text or type(error).__name__ == "InvalidCxxCompiler":
        tried = os.environ.get("CXX") or "g++, clang++"
        return EngineError(
            f"no working C++ compiler was found (tried {tried}), and Inductor needs one; install g++ "
            "(Debian/Ubuntu: apt install g++; Windows: Visual Studio Build Tools) or set CXX to one"
        )
    if "Failed to find C compiler" in text or (not _c_compiler() and "gcc" in text):
        return EngineError(
            "no C compiler was found, and Triton needs one to launch its kernels; install gcc "
            "(Debian/Ubuntu: apt install gcc) or set CC to one"
        )
    if "Python.h" in text:
        return EngineError(
            "the headers of this Python are missing, and compiled code needs them; install them "
            "(Debian/Ubuntu: apt install python3-dev)"
        )
    return EngineError(f"Inductor failed: {type(error).__name__}: {first_line}")


def _c_compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")

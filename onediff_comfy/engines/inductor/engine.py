"""PyTorch Inductor: fused Triton kernels on a GPU, fused C++ on the CPU."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental._config as symbols
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.export import Binding, Capture
from ...capture.rewrites.op_substitutions import FOR_INDUCTOR, Forms
from ...capture.rewrites.scaled_fp8 import conversion_saturates, fuses_fp8
from ...capture.shape_range import ShapeRange
from ...messages import Message, first_line, message
from ..base import CompiledGraph, Engine, EngineError, Outputs
from .attention_kernels import attention, wide_attention
from .code_folder import empty_own_folder, headers_are_ours, in_code_folder, in_new_code_folder, put_code, unusable
from .compiler_errors import explained
from .passes.few_bits import (
    cast_fp8,
    leave_fp8_to_eager,
    quantize_where_computed,
    rows_of_fp8,
    saturate_by_conversion,
    share_ones,
)
from .passes.frames import conv3d_together, put_channels_together
from .passes.upsampling import fold_upsampling
from .triton_launch import by_address
from .while_compiling.compiler_settings import as_pytorch_sets_them
from .while_compiling.row_reductions import rows_in_one_pass
from .while_compiling.subgraph_schemas import schemas_found_once

# Eager rounds to 16 bits after every operator, a fused kernel only at its end. Mostly that is more
# exact, but it is not always the same picture: Flux computes cos(1000 * guidance) with the product
# rounded to bfloat16, and without that rounding the embedding is another one (off by 0.2). Rounding
# where eager rounds costs 3% of a step (measured, SDXL), so it is done where rounding is that coarse.
_ROUND_LIKE_EAGER = torch.bfloat16

# The oldest PyTorch that graphs with shared regions were compiled, saved and compared with eager in.
_REGIONS_SINCE = (2, 11)

_ARTIFACT = "artifact"
_KERNELS = "kernels/"
# As torch/_inductor/codecache.py names what it compiles (get_path): a folder of the name's second and third character,
# the name of 51 characters of base 32 after a c, and "main" where there is a second file of its own for the kernels.
_KERNEL = re.compile(r"([a-z2-7]{2})/c(?=\1)[a-z2-7]{51}(?:\.main)?\.so")

_FORMS: Forms = {**FOR_INDUCTOR, F.scaled_dot_product_attention: attention}

log = logging.getLogger(__name__)


class InductorGraph(CompiledGraph):
    """An Inductor artifact, with the machine code that the artifact itself leaves to a cache folder."""

    def __init__(self, binding: Binding, shapes: ShapeRange, artifact: Any, kernels: Mapping[str, bytes]) -> None:
        super().__init__(binding, shapes)
        self.artifact = artifact
        self.kernels = kernels
        self.code_bytes = sum(map(len, kernels.values()))

    def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Outputs:
        return self.artifact(*self.binding.feed(weights, tensors))

    def recordable(self) -> contextlib.AbstractContextManager[None]:
        return by_address()


class InductorEngine(Engine):
    name = "inductor"
    general = True
    recorded = True
    fuses = True

    def unavailable(self, device: torch.device) -> Message | None:
        if device.type == "cuda" and _version_of("triton") is None and _version_of("triton-windows") is None:
            return message("Triton is not installed; install the triton package that fits this torch")
        if device.type not in ("cpu", "cuda", "xpu"):
            return message("Inductor has no backend for {device} devices", device=device.type)
        return unusable()

    def prepare(self) -> None:
        import torch._inductor.compile_fx
        import torch._inductor.standalone_compile  # noqa: F401

        _define_operators()
        with contextlib.suppress(Exception):  # PyTorch does not promise it
            from torch._inductor.codecache import torch_key

            torch_key()  # reads all of PyTorch's sources, and keeps what it finds: the first load would wait for that

    def specialises(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def forms(self) -> Forms:
        return _FORMS

    def rewritten(self, capture: Capture) -> torch.fx.GraphModule:
        if all(device.type == "cuda" for device in _devices(capture)):
            from .passes.norm_rope import fuse_norm_and_rope

            return fuse_norm_and_rope(capture.graph)
        return capture.graph

    def options(self) -> Mapping[str, str]:
        return {
            "emulate_precision_casts": str(_ROUND_LIKE_EAGER),
            "layout": "channels_last, of frames as well",
            "double precision": "computed once",
            "few bits": "rounded where computed, by one without division, saturated by the conversion",
            "gelu": "by sigmoid",
            "group norm": "by channels' rows, one product and one sum",
            "numbers": "filled in",
            "operands": "written once, and their parts",
            "norm and RoPE": "one kernel, of all of the host's rotations",
            "regions": "shared" if _shares_regions() else "none",
            "rows": "one pass, heads as well",
            "upsampling": "folded",
            "wide heads": "softmax in one kernel",
        }

    def versions(self, device: torch.device) -> Mapping[str, str]:
        return {"triton": _version_of("triton") or _version_of("triton-windows") or "none"}

    def compile(self, capture: Capture) -> CompiledGraph:
        # On the CPU an Inductor artifact holds the source of its kernels and expects to find the shared objects in the
        # cache folder. To keep them with the artifact we must know which ones they are. (On a GPU they are in it.)
        on_cpu = _on_cpu(capture)
        with in_new_code_folder() if on_cpu else in_code_folder() as folder:
            try:
                with as_pytorch_sets_them():
                    artifact = _compiled(capture)
            except Exception as error:
                raise explained(error) from error
            kernels = _shared_objects(folder) if on_cpu else {}
            return InductorGraph(capture.binding, capture.shapes, artifact, kernels)

    def to_parts(self, graph: CompiledGraph) -> Mapping[str, bytes] | None:
        assert isinstance(graph, InductorGraph)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, _ARTIFACT)
            graph.artifact.save(path=path, format="binary")
            parts = {_ARTIFACT: Path(path).read_bytes()}
        parts.update((_KERNELS + name, content) for name, content in graph.kernels.items())
        graph.code_bytes = sum(map(len, parts.values()))
        return parts

    def from_parts(self, binding: Binding, shapes: ShapeRange, parts: Mapping[str, bytes]) -> CompiledGraph:
        kernels = {name.removeprefix(_KERNELS): code for name, code in parts.items() if name.startswith(_KERNELS)}
        expected = {_ARTIFACT, *(_KERNELS + name for name in kernels)}
        if not all(map(_KERNEL.fullmatch, kernels)) or set(parts) != expected:
            raise EngineError(message("its machine code has names that Inductor does not give"))
        _define_operators()
        try:
            with in_code_folder() as folder:
                artifact = _loaded(parts[_ARTIFACT], kernels, folder)
        except Exception as error:
            # What else lies in the folder (sources, a GPU's kernels) may be cut short, or it is one where no code runs.
            log.info("OneDiff: loading once more, in an empty folder (%s: %s)", type(error).__name__, first_line(error))
            log.debug("loading from the folder of machine code failed", exc_info=True)
            empty_own_folder()
            with in_new_code_folder() as folder:
                artifact = _loaded(parts[_ARTIFACT], kernels, folder)
        graph = InductorGraph(binding, shapes, artifact, kernels)
        graph.code_bytes = sum(map(len, parts.values()))
        return graph


def _define_operators() -> None:
    """Define our own operators, which must be there before code that calls them is."""
    for operator in (wide_attention, cast_fp8, rows_of_fp8, conv3d_together):
        operator()


def _loaded(artifact: bytes, kernels: Mapping[str, bytes], folder: Path) -> Any:
    import torch._inductor.config as inductor_config
    from torch._inductor.standalone_compile import CompiledArtifact

    for name, code in kernels.items():
        put_code(folder / name, code)
    with tempfile.TemporaryDirectory() as passing:
        path = Path(passing, _ARTIFACT)
        path.write_bytes(artifact)
        with as_pytorch_sets_them(), inductor_config.patch(_compiled_headers()):
            return CompiledArtifact.load(path=str(path), format="binary")


def _shares_regions() -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= _REGIONS_SINCE


def _compiled(capture: Capture) -> Any:
    """The artifact. What asks Inductor in a way that Inductor does not promise is left out where it fails."""
    graph = share_ones(quantize_where_computed(fold_upsampling(capture.graph)))
    devices = _devices(capture)
    if all(map(conversion_saturates, devices)):
        graph = saturate_by_conversion(graph)
    if not all(map(fuses_fp8, devices)):
        graph = leave_fp8_to_eager(graph)
    if all(device.type == "cuda" for device in devices) and (together := put_channels_together(graph)) is not graph:
        try:
            return _in_best_form(capture, together, devices)
        except Exception as error:
            _tell_left_out("channels of frames together", error)
    return _in_best_form(capture, graph, devices)


def _in_best_form(capture: Capture, graph: torch.fx.GraphModule, devices: set[torch.device]) -> Any:
    for left_out, form in _forms(graph, devices):
        try:
            rewritten = form()
            if rewritten is not graph:
                return _compile_in_regions(capture, rewritten) or _compile(capture, rewritten)
        except Exception as error:
            _tell_left_out(left_out, error)
    return _compile_in_regions(capture, graph) or _compile(capture, graph)


def _tell_left_out(left_out: str, error: Exception) -> None:
    log.info("OneDiff: compiled without %s (%s: %s)", left_out, type(error).__name__, first_line(error))
    log.debug("compiling with %s failed", left_out, exc_info=True)


def _forms(
    graph: torch.fx.GraphModule, devices: set[torch.device]
) -> Iterator[tuple[str, Callable[[], torch.fx.GraphModule]]]:
    """Yield forms of a graph by what is left out if one fails, the best first."""

    @functools.cache
    def written() -> torch.fx.GraphModule:
        from .passes.double_precision import compute_once
        from .passes.operands import write_operands_once

        return compute_once(write_operands_once(graph))

    def fused() -> torch.fx.GraphModule:
        from .passes.norm_rope import fuse_norm_and_rope

        before = written()
        after = fuse_norm_and_rope(before)
        return graph if after is before else after

    if all(device.type == "cuda" for device in devices):
        yield "norm and RoPE in one kernel", fused
    yield "operands and angles put into memory", written


def _compile_in_regions(capture: Capture, whole: torch.fx.GraphModule) -> Any | None:
    """With what repeats compiled once: in a half or a third of the time. None where nothing repeats, or it fails."""
    if not _shares_regions():
        return None
    from .passes.regions import share_regions

    try:
        graph = share_regions(whole)
        return None if graph is whole else _compile(capture, graph)
    except Exception as error:
        _tell_left_out("what repeats compiled once", error)
        return None


def _compile(capture: Capture, graph: torch.fx.GraphModule) -> Any:
    import torch._functorch.config as functorch_config
    from torch._guards import TracingContext, tracing
    from torch._inductor import standalone_compile

    # PyTorch 2.13's AOTAutograd cache can return the graph of another shape without an error. It
    # cannot be switched off (an artifact is serialised through it), but the tag is part of its
    # keys: with the capture's own digest in them, graphs cannot be mixed up. A general graph is
    # never taken from there at all: what it was found valid for is only known where it is compiled.
    options = sorted(InductorEngine().options().items())  # PyTorch does not see what operators of ours compute
    tag = f"{capture.digest} {options} {uuid.uuid4() if capture.shapes.general else ''}"
    with (
        torch.no_grad(),
        torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
        symbols.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        functorch_config.patch(enable_autograd_cache=True),
        rows_in_one_pass(),
        schemas_found_once(),
        # It looks for fake tensors among a graph's outputs too, but PyTorch before 2.13 fails where one is None.
        tracing(TracingContext(next(each.fake_mode for each in _values(capture) if isinstance(each, FakeTensor)))),
    ):
        return standalone_compile(
            graph,
            capture.examples(),
            dynamic_shapes="from_tracing_context",
            aot=True,
            options={"config_patches": _config(capture)},
        )


def _config(capture: Capture) -> dict[str, bool]:
    config = {"emulate_precision_casts": _computes_in(capture, _ROUND_LIKE_EAGER), **_compiled_headers()}
    if not _on_cpu(capture):
        # Inductor turns convolutions to channels-last by itself, except where sizes are symbols or channels
        # few. Measured on SDXL, H200, symbols: 36.4 ms a step with it, 37.8 without.
        config["force_layout_optimization"] = True
    return config


def _compiled_headers() -> dict[str, bool]:
    """Keep Inductor from compiled headers that others may have made. Its names of kernels tell whether it uses any."""
    return {} if headers_are_ours() else {"cpp_cache_precompile_headers": False}


def _computes_in(capture: Capture, dtype: torch.dtype) -> bool:
    return any(isinstance(value, torch.Tensor) and value.dtype == dtype for value in _values(capture))


def _values(capture: Capture) -> Iterator[Any]:
    return (node.meta.get("val") for node in capture.graph.graph.nodes)


def _on_cpu(capture: Capture) -> bool:
    return all(device.type == "cpu" for device in _devices(capture))


def _devices(capture: Capture) -> set[torch.device]:
    return {example.device for example in capture.examples() if isinstance(example, torch.Tensor)}


def _shared_objects(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.so"))}
    return {name: path.read_bytes() for name, path in found.items() if _KERNEL.fullmatch(name)}


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None

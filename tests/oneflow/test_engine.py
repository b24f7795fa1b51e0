"""The OneFlow engine's own promises: what it refuses and how it says so, whose memory it uses, what it keeps."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.utils._pytree as pytree

pytest.importorskip("oneflow", reason="OneFlow is not in this Python; make test-oneflow runs these in one that has it")

from graphs import capture_of, run
from torch import nn

from dev.environment import repository
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.export import Binding, Capture, GraphInput
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines import oneflow as engine_module
from onediff_comfy.engines.base import EngineError
from onediff_comfy.engines.oneflow import OneFlowEngine, OneFlowGraph, install, session
from onediff_comfy.engines.oneflow.architectures import OF_THE_RELEASE, RELEASE, kernels_in
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.dispatcher import Dispatcher

aten = torch.ops.aten
HOST = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)
ENGINE = OneFlowEngine()


def linear_graph(weight: torch.Tensor, x: torch.Tensor, layers: int = 1) -> OneFlowGraph:
    """``x @ weight.T`` so many times over, as a compiled graph with one weight."""
    graph = torch.fx.Graph()
    value, parameter = graph.placeholder("x"), graph.placeholder("w")
    value.meta["val"], parameter.meta["val"] = x, weight
    result = x
    for _ in range(layers):
        result = aten.linear.default(result, weight)
        value = graph.call_function(aten.linear.default, (value, parameter))
        value.meta["val"] = result
    graph.output((value,))
    binding = Binding((GraphInput("tensor", "x", 0), GraphInput("weight", "w")), {}, pytree.tree_structure((result,)))
    compiled = ENGINE.compile(Capture(torch.fx.GraphModule(nn.Module(), graph), binding, "by hand"))
    assert isinstance(compiled, OneFlowGraph)
    return compiled


# -- refusals --------------------------------------------------------------------------------------


def test_an_operator_without_a_form_is_named_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from onediff_comfy.engines.oneflow import program

    monkeypatch.setattr(program, "build", lambda _capture: pytest.fail("something was built"))
    capture, _ = capture_of(aten.linalg_det.default, (torch.eye(3),), {})
    with pytest.raises(EngineError, match=r"OneFlow has no form for .*linalg_det"):
        ENGINE.compile(capture)


@pytest.mark.parametrize(
    ("operator", "tensor", "named"),
    [
        (aten.add.Tensor, torch.zeros(2, dtype=torch.int16), "torch.int16 in aten.add.Tensor"),
        (aten.neg.default, torch.zeros(2, dtype=torch.complex64), "torch.complex64"),
        (aten.neg.default, torch.zeros(0, 2), "a tensor without elements"),
    ],
)
def test_what_would_end_the_process_is_refused(
    operator: Callable[..., object], tensor: torch.Tensor, named: str
) -> None:
    capture, _ = capture_of(operator, (tensor, 1) if operator is aten.add.Tensor else (tensor,), {})
    with pytest.raises(EngineError, match=named):
        ENGINE.compile(capture)


def test_a_missing_kernel_shows_in_the_dry_run_and_the_next_graph_compiles() -> None:
    """OneFlow has no half precision on the CPU; a job that found that out while made ready would end the process."""
    x, w = torch.randn(1, 4, 5, 5).half(), torch.randn(4, 4, 3, 3).half()
    capture, _ = capture_of(aten.conv2d.default, (x, w), {})
    with pytest.raises(EngineError, match=r"cannot compute aten.conv2d.default of torch.float16"):
        ENGINE.compile(capture)
    capture, tensors = capture_of(aten.conv2d.default, (x.float(), w.float()), {})
    torch.testing.assert_close(run(ENGINE.compile(capture), tensors)[0], aten.conv2d.default(*tensors))


def test_a_model_with_such_an_operator_runs_eager_and_says_why() -> None:
    class Det(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.det(x)

    library, module, x = GraphLibrary(GraphCache(1 << 30), Metrics()), Det(), torch.randn(2, 3, 3)
    with torch.no_grad():
        assert torch.equal(Dispatcher("oneflow", library, HOST)(module, module.forward, (x,), {}), module(x))
    (reason,) = library.metrics.snapshot()["fallbacks"]
    assert "linalg_det" in reason or "linalg" in reason


def test_a_call_of_another_shape_is_an_error_not_an_abort() -> None:
    w, x = torch.randn(4, 4), torch.randn(2, 4)
    graph = linear_graph(w, x)
    with pytest.raises(ValueError, match="another shape or dtype"):
        graph([w], [torch.randn(3, 4)])
    with pytest.raises(ValueError, match="another shape or dtype"):
        graph([w.double()], [x])
    with pytest.raises(ValueError, match="gaps"):
        graph([w.T], [x])


# -- which GPUs ------------------------------------------------------------------------------------


def test_the_wheels_architectures_are_read_off_its_library() -> None:
    found = kernels_in(Path(install.oneflow().__file__).parent)
    assert {str(kernels) for kernels in found} >= {"sm_70", "sm_80"}  # Volta and Ampere: every wheel so far
    if importlib.metadata.version("oneflow") == RELEASE:
        assert found == OF_THE_RELEASE, "what is known of it where it is not installed"


@pytest.mark.parametrize("capability", [(5, 2), (9, 0), (12, 0)])
def test_a_gpu_without_kernels_is_refused_with_the_architectures(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install.oneflow().cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    reason = ENGINE.unavailable(torch.device("cuda", 0))
    assert reason is not None
    for word in (
        f"sm_{capability[0]}{capability[1]}",
        "the installed OneFlow holds kernels for sm_60",
        "sm_70",
        "sm_86",
    ):
        assert word in reason
    assert reason.endswith("inductor is the engine for this card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 6))
    assert ENGINE.unavailable(torch.device("cuda", 0)) is None


# -- what is missing -------------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "version"), [("numpy", "2.1.0"), ("protobuf", "6.33.0")])
def test_a_package_that_is_too_new_is_named(package: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = install.importlib.metadata.version
    monkeypatch.setattr(install.importlib.metadata, "version", lambda name: version if name == package else real(name))
    reason = install._not_importable.__wrapped__()
    assert f"{package} below" in reason and version in reason and "pip install" in reason


def test_a_missing_cuda_library_is_named_with_the_packages_that_bring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("libcudnn_cnn_infer.so.8: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(install, "oneflow", fail)
    reason = install._not_importable.__wrapped__()
    assert "libcudnn_cnn_infer.so.8" in reason and "nvidia-cudnn-cu11==8.9.6.50" in reason


# -- memory ----------------------------------------------------------------------------------------


def test_weights_are_read_where_they_lie() -> None:
    w, x = torch.randn(4, 4), torch.randn(2, 4)
    graph = linear_graph(w, x)
    for _ in range(2):
        torch.testing.assert_close(graph([w], [x])[0], x @ w.T)
        w.mul_(3)  # in place: seen by the next call
    running = graph._running
    assert graph([w], [x]) and graph._running is running


def test_weights_that_lie_elsewhere_are_followed_and_the_old_ones_neither_written_nor_kept() -> None:
    x = torch.randn(2, 4)
    old, new = torch.randn(4, 4), torch.randn(4, 4)
    before = old.clone()
    graph = linear_graph(old, x)
    torch.testing.assert_close(graph([old], [x])[0], x @ old.T)
    torch.testing.assert_close(graph([new], [x])[0], x @ new.T)
    assert torch.equal(old, before)
    storage = new.untyped_storage()
    assert torch._C._storage_Use_Count(storage._cdata) == _owners_of_a_fresh_storage()


def _owners_of_a_fresh_storage() -> int:
    tensor = torch.randn(4, 4)
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


def test_gaps_in_inputs_and_weights_are_not_closed_in_torchs_memory() -> None:
    wide, weights = torch.randn(4, 6), torch.randn(8, 4)
    x, w = wide.T[:2], weights[::2]  # neither contiguous
    graph = linear_graph(w, x)
    before = wide.clone(), weights.clone()
    for _ in range(2):
        torch.testing.assert_close(graph([w], [x])[0], x @ w.T)
        assert torch.equal(wide, before[0]) and torch.equal(weights, before[1])
        weights.add_(1)  # a copy is made at each call, so this is seen
        before = wide.clone(), weights.clone()


def test_results_stay_when_the_graph_runs_again() -> None:
    w, x = torch.randn(4, 4), torch.randn(2, 4)
    graph = linear_graph(w, x)
    (first,) = graph([w], [x])
    kept = first.clone()
    graph([w], [x + 1])
    assert torch.equal(first, kept)


def test_moving_weights_and_dropped_graphs_give_their_memory_back() -> None:
    """Without resets of the session every change of weights would keep the activations of the one before."""
    x = torch.randn(1 << 14, 128)  # 8 MB a layer

    def grown(times: int) -> float:
        before = session.memory_in_use(torch.device("cpu"))
        for _ in range(times):
            w = torch.randn(128, 128) / 11
            graph([w], [x])
        return (session.memory_in_use(torch.device("cpu")) - before) / 2**20

    graph = linear_graph(torch.randn(128, 128), x, layers=6)
    grown(3)
    held = graph.nbytes / 2**20
    assert held > 8
    assert grown(6) < 3 * held
    others = [linear_graph(torch.randn(128, 128), x, layers=6) for _ in range(5)]
    w = torch.randn(128, 128)
    for other in others:
        other([w], [x])
    full = session.memory_in_use(torch.device("cpu"))
    del other
    others.clear()
    gc.collect()
    torch.testing.assert_close(graph([w], [x])[0], _chained(x, w, 6), rtol=1e-3, atol=1e-3 * 11**6)
    assert (full - session.memory_in_use(torch.device("cpu"))) / 2**20 > 2 * held


def _chained(x: torch.Tensor, w: torch.Tensor, layers: int) -> torch.Tensor:
    for _ in range(layers):
        x = x @ w.T
    return x


def test_its_threads_do_not_push_others_off_their_core() -> None:
    """A tiny job that is done before OneFlow has noted that it runs would never be closed, or end the process."""
    graph = linear_graph(torch.randn(4, 4), torch.randn(2, 4))
    before = set(os.listdir("/proc/self/task"))
    with session.exclusive():
        session.reset()
    graph([torch.randn(4, 4)], [torch.randn(2, 4)])
    started = set(os.listdir("/proc/self/task")) - before
    assert started and {os.sched_getscheduler(int(thread)) for thread in started} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert not session._never_closed, "of all graphs in the tests so far"


def test_a_graph_that_is_not_closed_is_not_reset_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would end the process."""
    w, x = torch.randn(4, 4), torch.randn(2, 4)
    graph = linear_graph(w, x)
    graph([w], [x])
    held = graph._running._graph
    monkeypatch.setattr(session, "_PATIENCE", 0.1)
    for _ in range(2):
        with session.exclusive():
            session.reset()
        torch.testing.assert_close(graph([w], [x])[0], x @ w.T)
    del held
    session._never_closed.clear()
    with session.exclusive():
        session.reset()
    torch.testing.assert_close(graph([w], [x])[0], x @ w.T)


# -- failures and ends -----------------------------------------------------------------------------


@pytest.fixture
def unbroken() -> Iterator[None]:
    yield
    engine_module._broken.clear()


@pytest.mark.usefixtures("unbroken")
def test_after_a_failure_to_make_ready_the_engine_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from onediff_comfy.engines.oneflow import running

    def fail(*_: object) -> None:
        raise RuntimeError("no kernel")

    w, x = torch.randn(4, 4), torch.randn(2, 4)
    graph = linear_graph(w, x)
    monkeypatch.setattr(running, "Running", fail)
    with pytest.raises(RuntimeError, match="no kernel"):
        graph([w], [x])
    monkeypatch.undo()
    with pytest.raises(EngineError, match="restart"):
        graph([w], [x])
    assert "no kernel" in (ENGINE.unavailable(torch.device("cpu")) or "")


def test_a_process_with_graphs_ends_and_another_runs_what_it_kept(tmp_path: Path) -> None:
    """A session that goes before its graphs would make the interpreter wait for ever."""
    code = """
        import pickle, sys, torch
        sys.path[:0] = [{root!r}, {here!r}]
        from test_engine import ENGINE, linear_graph
        from onediff_comfy.cache.memory import GraphCache
        torch.manual_seed(0)
        w, x = torch.randn(4, 4), torch.randn(2, 4)
        if sys.argv[1] == "save":
            graph = linear_graph(w, x)
            pickle.dump((ENGINE.to_parts(graph), graph.binding, graph.shapes), open(sys.argv[2], "wb"))
        else:
            from onediff_comfy.engines.oneflow import program
            program.build = None
            parts, binding, shapes = pickle.load(open(sys.argv[2], "rb"))
            graph = ENGINE.from_parts(binding, shapes, parts)
        print((graph([w], [x])[0] - x @ w.T).abs().max().item())
    """
    code = textwrap.dedent(code.format(root=str(repository()), here=str(Path(__file__).parent)))
    for what in ("save", "load"):
        command = [sys.executable, "-c", code, what, str(tmp_path / "graph")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        assert float(done.stdout.split()[-1]) < 1e-5

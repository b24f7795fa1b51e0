"""engines/inductor/engine.py: one real compilation, and errors that name the cause and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from releases import rounds_in_16_bits
from torch import nn

from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.engines.inductor.engine import InductorEngine
from onediff_comfy.engines.inductor.while_compiling.compiler_settings import set_otherwise
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.serving.options import Options

# What torch says of itself while its compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

HOST = HostServices("host", "transformer_options", {}, lambda: None, lambda _layers: None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"output": torch.tanh(self.linear(x)) * scale + torch.tensor([1.0, 2.0, 3.0, 4.0])}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Dispatcher, Net, GraphLibrary]]:
    """A dispatcher whose graph Inductor compiled, in a cache folder of its own."""
    library = GraphLibrary(GraphCache(1 << 30), Metrics())
    dispatcher, module = Dispatcher("auto", library, HOST), Net()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        dispatcher(module, module.forward, (torch.randn(2, 4), torch.rand(2, 1)), {})
        yield dispatcher, module, library


def test_pytorch_has_read_its_own_sources_once_the_engine_is_prepared(fresh_process: Callable[..., Any]) -> None:
    """A graph is loaded only where they are those that it was made with. Reading them takes a fifth of a second."""
    code = """
import torch._inductor.codecache as codecache
from onediff_comfy.engines.inductor.engine import InductorEngine

def read(*_):
    raise AssertionError("read once more")

InductorEngine().prepare()
codecache.build_code_hash = read
print(len(codecache.torch_key()))
"""
    assert fresh_process(code) > 0


def test_auto_is_inductor_and_the_graph_proves_itself(compiled: tuple[Dispatcher, Net, GraphLibrary]) -> None:
    snapshot = compiled[2].metrics.snapshot()
    assert snapshot["fallbacks"] == {}
    assert [graph["engine"] for graph in snapshot["graphs"]] == ["inductor"]
    assert (snapshot["proved"], snapshot["served"]) == (1, 1)


def test_other_weights_and_inputs_need_no_other_graph(compiled: tuple[Dispatcher, Net, GraphLibrary]) -> None:
    dispatcher, module, library = compiled
    served = library.metrics.snapshot()["served"]
    for number in range(3):
        x, scale = torch.randn(2, 4), torch.rand(2, 1)
        module.linear.weight = nn.Parameter(torch.randn(4, 4) * number)
        with torch.no_grad():
            actual = dispatcher(module, module.forward, (x, scale), {})
            torch.testing.assert_close(actual, module(x, scale))
    snapshot = library.metrics.snapshot()
    assert (snapshot["compiled"], snapshot["served"] - served, snapshot["fallbacks"]) == (1, 3, {})


def test_torchs_settings_are_as_they_were(compiled: tuple[Dispatcher, Net, GraphLibrary]) -> None:
    """Compiles twice more, for all sizes and for these alone, and compares the configuration before and after."""
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    def configuration() -> list[dict[str, Any]]:
        configs = (dynamo_config, functorch_config, inductor_config, torch.compiler.config)
        return [config.get_config_copy() for config in configs]

    _, module, library = compiled
    before, made = configuration(), library.metrics.snapshot()["compiled"]
    exact = Dispatcher(
        "inductor",
        library,
        HOST,
        options=Options(specialize=lambda _signature: True),
    )
    general = Dispatcher("inductor", library, HOST)
    for compilations, dispatcher, dtype in [(1, exact, torch.float32), (2, general, torch.float64)]:
        with torch.no_grad():
            dispatcher.preparing(exact=True)(
                module, module.to(dtype).forward, (torch.randn(5, 4).to(dtype), torch.rand(5, 1).to(dtype)), {}
            )
        assert library.metrics.snapshot()["compiled"] == made + compilations
        assert configuration() == before
    module.float()


def test_what_an_extension_sets_inductor_to_is_no_part_of_a_graph(
    capture_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key would not tell, and other processes and machines use it: here with a pass that leaves the scale out."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._inductor.standalone_compile import CompiledArtifact

    met, at_loading, load = [], [], CompiledArtifact.load

    def loads(**given: Any) -> Any:
        at_loading.append(inductor_config.post_grad_custom_post_pass)
        return load(**given)

    monkeypatch.setattr(CompiledArtifact, "load", staticmethod(loads))

    def pass_of_another(graph: torch.fx.Graph) -> None:
        met.append(graph)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            node.replace_all_uses_with(node.args[0])

    module, tensors = Net().eval(), (torch.randn(2, 4), torch.rand(2, 1))
    captured, engine = capture_of(module, *tensors), InductorEngine()
    settings = {"post_grad_custom_post_pass": pass_of_another, "compile_threads": 1}
    with inductor_config.patch(settings), functorch_config.patch(functionalize_rng_ops=True), torch.no_grad():
        graph = engine.compile(captured.capture)
        parts = engine.to_parts(graph)
        assert parts is not None and not met
        assert inductor_config.post_grad_custom_post_pass is pass_of_another
        weights = captured.target.weights(captured.capture.binding.weight_names, tensors[0].device)
        for each in (graph, engine.from_parts(captured.capture.binding, captured.capture.shapes, parts)):
            torch.testing.assert_close(each(weights, captured.call.tensors)[0], module(*tensors)["output"])
    assert at_loading == [None]


def test_settings_that_others_have_changed_are_found_and_nothing_else() -> None:
    import torch._inductor.config as inductor_config

    assert set_otherwise(inductor_config) == {}
    changed = {"max_autotune": True, "triton.cudagraphs": True, "cpp.cxx": (None, "clang++"), "compile_threads": 1}
    with inductor_config.patch(changed):
        assert set_otherwise(inductor_config) == {"max_autotune": False, "triton.cudagraphs": False}
    assert set_otherwise(object()) == {}  # of a PyTorch that keeps its settings otherwise


def test_one_compilation_serves_all_sizes(compiled: tuple[Dispatcher, Net, GraphLibrary]) -> None:
    """A batch of one too, which tracing would take for broadcasting."""
    dispatcher, module, library = compiled
    before = library.metrics.snapshot()
    with torch.no_grad():
        for batch in (1, 3, 64, 1):
            x, scale = torch.randn(batch, 4), torch.rand(batch, 1)
            torch.testing.assert_close(dispatcher(module, module.forward, (x, scale), {}), module(x, scale))
    after = library.metrics.snapshot()
    assert (after["compiled"], after["captured"]) == (before["compiled"], before["captured"])
    assert (after["proved"] - before["proved"], after["served"] - before["served"]) == (3, 4)
    assert after["fallbacks"] == {}


class Embedding(nn.Module):
    """A guidance as Flux embeds it, and a norm and an activation as a VAE has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, guidance: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cos(guidance * 1000), x + torch.nn.functional.silu(self.norm(x))


@rounds_in_16_bits
def test_in_bfloat16_it_rounds_where_eager_does(capture_of: Callable[..., Any]) -> None:
    """A cosine of a product that is not rounded before is another one, off by up to 2."""
    module = Embedding().eval().to(torch.bfloat16)
    captured = capture_of(module, torch.rand(3, 16).bfloat16() + 1, torch.randn(3, 8, 5, 7).bfloat16(), general=True)
    graph = InductorEngine().compile(captured.capture)
    for batch in (3, 2):
        tensors = torch.rand(batch, 16).bfloat16() + 1, torch.randn(batch, 8, 5, 7).bfloat16()
        weights = captured.target.weights(captured.capture.binding.weight_names, tensors[0].device)
        with torch.no_grad():
            for actual, expected in zip(graph(weights, tensors), module(*tensors), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_what_a_forward_does_not_give_is_none(capture_of: Callable[..., Any]) -> None:
    """A text encoder gives its last layer, and None for one in between that nobody asked for."""

    class Encoder(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[None, torch.Tensor, None]:  # type: ignore[override]
            return None, super().forward(x).sin(), None

    module, x = Encoder(4, 4).eval(), torch.randn(3, 4)
    captured = capture_of(module, x, general=True)
    graph = InductorEngine().compile(captured.capture)
    weights = captured.target.weights(captured.capture.binding.weight_names, x.device)
    with torch.no_grad():
        first, actual, last = graph(weights, (x,))
    assert first is None and last is None
    torch.testing.assert_close(actual, module(x)[1])


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_devices_without_a_backend_are_refused_by_name(device: str) -> None:
    assert f"Inductor has no backend for {device} devices" in (InductorEngine().unavailable(torch.device(device)) or "")


def test_the_version_of_triton_is_in_the_key_even_if_there_is_none() -> None:
    assert InductorEngine().versions(torch.device("cpu"))["triton"]


def test_a_cache_folder_that_cannot_be_written_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is captured or compiled in vain."""
    (tmp_path / "file").write_text("not a folder")
    folder = tmp_path / "file" / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    library, module, x = GraphLibrary(GraphCache(1 << 30), Metrics()), nn.Linear(4, 4), torch.randn(2, 4)
    dispatcher = Dispatcher("inductor", library, HOST)
    with torch.no_grad():
        assert torch.equal(dispatcher(module, module.forward, (x,), {}), module(x))
    snapshot = library.metrics.snapshot()
    (reason,) = snapshot["fallbacks"]
    assert str(folder) in reason
    assert "Not a directory" in reason
    assert "set TORCHINDUCTOR_CACHE_DIR to a folder that is" in reason
    assert (snapshot["captured"], snapshot["failed"]) == (0, 0)


NO_COMPILER = """
import json, torch
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.serving.options import Options
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.metrics import Metrics

host = HostServices("host", "transformer_options", {}, lambda: None, lambda layers: None)
library = GraphLibrary(GraphCache(1 << 30), Metrics())
module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Softmax(-1))
x = torch.randn(3, 4)
dispatcher = Dispatcher("inductor", library, host)
with torch.no_grad():
    right = all(torch.equal(dispatcher(module, module.forward, (x,), {}), module(x)) for _ in range(2))
print(json.dumps({"right": right, **library.metrics.snapshot()}))
"""


def test_a_missing_compiler_is_named_with_the_remedy(fresh_process: Callable[..., Any], tmp_path: Path) -> None:
    """And the image is made without it."""
    result = fresh_process(NO_COMPILER, CXX="/nonexistent/g++", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    ((reason, count),) = result["fallbacks"].items()
    assert "no working C++ compiler was found (tried /nonexistent/g++)" in reason
    assert "install g++" in reason
    assert "set CXX to one" in reason
    assert (result["right"], count, result["failed"], result["compiled"]) == (True, 2, 1, 0)

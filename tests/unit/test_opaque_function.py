"""Attention that no trace can look into: a graph calls what the call brings, with what eager hands it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from releases import since
from torch import nn

from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.tracing.opaque_function import call_option, options_given
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.dispatcher import Dispatcher

OPTION = "optimized_attention_override"


def by_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **_kwargs: Any) -> torch.Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


IMPORTED = by_pytorch
"""Models have imported the function; whoever puts another one into its module does not put it into them."""


def attention(*args: Any, transformer_options: dict[str, Any], **kwargs: Any) -> torch.Tensor:
    """As the host's models compute attention."""
    override = transformer_options.get(OPTION)
    kwargs["transformer_options"] = transformer_options
    output: torch.Tensor = override(IMPORTED, *args, **kwargs) if override else IMPORTED(*args, **kwargs)
    return output


def by_numpy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, scale: float = 1.0) -> torch.Tensor:
    """As a library's kernels do: no trace can look into it."""
    query, key, value = (t.numpy().reshape(*t.shape[:2], heads, -1).transpose(0, 2, 1, 3) for t in (q, k, v))
    scores = np.exp(scale * query.shape[-1] ** -0.5 * query @ key.transpose(0, 1, 3, 2))
    found = scores / scores.sum(-1, keepdims=True) @ value
    return torch.from_numpy(np.ascontiguousarray(found.transpose(0, 2, 1, 3).reshape(q.shape)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 24), nn.Linear(8, 24)])

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        options = transformer_options.copy()
        for number, block in enumerate(self.blocks):
            options["block"] = ("single", number)
            options["slice"] = [0, x.shape[1]]
            options["grid"] = x.shape[1:]
            q, k, v = block(x).chunk(3, -1)
            x = x + attention(q, k, v, 2, transformer_options=options)
        return x


class Served:
    def __init__(
        self, engine: str = "eager", library: GraphLibrary | None = None, opaque: frozenset[str] = frozenset()
    ) -> None:
        torch.manual_seed(0)
        self.net = Net().eval().requires_grad_(False)
        self.library = library or GraphLibrary(GraphCache(1 << 30), Metrics())
        self.dispatcher = Dispatcher(
            engine,
            self.library,
            HostServices(
                identity="host",
                options_name="transformer_options",
                capture_options={OPTION: lambda _chosen, *args, **kwargs: by_pytorch(*args, **kwargs)},
                check_interrupted=lambda: None,
                refuse=lambda _layers: None,
                opaque=opaque,
            ),
        )

    def __call__(self, override: Callable[..., Any] | None, tokens: int = 6, **options: Any) -> bool:
        """Return True if a call was served. It is always right."""
        given = {"sigmas": torch.ones(1), **options, **({OPTION: override} if override else {})}
        x, before = torch.randn(2, tokens, 8), self.figures()["served"]
        with torch.inference_mode():
            expected = self.net(x, given)
            torch.testing.assert_close(self.dispatcher(self.net, self.net.forward, (x, given), {}), expected)
        return bool(self.figures()["served"] > before)

    def figures(self) -> dict[str, Any]:
        return self.dispatcher.metrics.snapshot()

    def compiled(self) -> int:
        return int(self.library.metrics.snapshot()["compiled"])

    def captured(self) -> int:
        return int(self.library.metrics.snapshot()["captured"])


def of_scale(scale: float) -> Callable[..., torch.Tensor]:
    def override(_chosen: Any, *args: Any, transformer_options: Any, **kwargs: Any) -> torch.Tensor:
        return by_numpy(*args, scale=scale, **kwargs)

    return override


@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_an_attention_that_no_trace_can_look_into_is_called_by_the_graph(engine: str) -> None:
    served = Served(engine)
    for scale, tokens in ((1.0, 6), (2.0, 6), (3.0, 10), (1.0, 4)):
        served.dispatcher.begin_run()
        assert all(served(of_scale(scale), tokens) for _ in range(3)), served.figures()
    assert served.compiled() == 1


def test_without_it_the_graph_is_another(served: Served) -> None:
    for override in (of_scale(1.0), None, of_scale(2.0), None):
        served.dispatcher.begin_run()
        assert served(override)
    assert served.compiled() == 2


def test_it_is_handed_the_options_of_the_call_and_of_the_block(served: Served) -> None:
    def override(_chosen: Any, *args: Any, transformer_options: dict[str, Any], **kwargs: Any) -> torch.Tensor:
        _, block = transformer_options["block"]
        first, behind = transformer_options["slice"]
        tokens, _width = transformer_options["grid"]
        strength = float(transformer_options["sigmas"]) + transformer_options.get("level", 0.0)
        return by_numpy(*args, scale=strength * (block + behind - first) / tokens, **kwargs)

    for sigma, level, tokens in ((1.0, 0.5, 6), (0.5, 0.5, 6), (0.5, 2.0, 10)):
        served.dispatcher.begin_run()
        assert all(served(override, tokens, sigmas=torch.tensor([sigma]), level=level) for _ in range(2))


def test_it_may_ask_for_the_attention_that_it_stands_for(served: Served) -> None:
    def override(chosen: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        args[0].numpy()
        output: torch.Tensor = chosen(*args, **kwargs)
        return output

    assert all(served(override) for _ in range(3))


def test_one_that_torch_is_not_to_compile_is_the_same_each_time_that_it_is_made(served: Served) -> None:
    made = []
    for _ in range(3):
        made.append(torch.compiler.disable()(of_scale(1.0)))  # all are there: none has another's address
        served.dispatcher.begin_run()
        assert served(made[-1])
    assert served.captured() == 1


@since("2.11", "gives functions no such number")
def test_one_that_calculates_with_its_own_address_runs_eager() -> None:
    def made() -> Callable[..., torch.Tensor]:
        def override(_chosen: Any, *args: Any, transformer_options: Any, **kwargs: Any) -> torch.Tensor:
            output: torch.Tensor = by_pytorch(*args, **kwargs) * (wrapped._torchdynamo_wrapper_id % 97)
            return output

        wrapped: Any = torch.compiler.disable()(override)
        return wrapped  # type: ignore[no-any-return]

    served, kept = Served(), [made() for _ in range(4)]
    for override in kept:
        served.dispatcher.begin_run()
        assert not served(override)


def test_what_it_holds_may_change(served: Served) -> None:
    strengths = torch.tensor([1.0])

    def override(_chosen: Any, *args: Any, transformer_options: Any, **kwargs: Any) -> torch.Tensor:
        return by_numpy(*args, scale=float(strengths), **kwargs)

    for strength in (1.0, 2.0, 0.5):
        strengths.fill_(strength)
        served.dispatcher.begin_run()
        assert served(override)
    assert served.compiled() == 1


@pytest.mark.parametrize("opaque", [frozenset(), frozenset((OPTION,))])  # the latter as under --use-sage-attention
def test_one_that_counts_its_calls_runs_eager_and_counts_as_eager_does(opaque: frozenset[str]) -> None:
    def counting() -> tuple[Callable[..., Any], list[int]]:
        calls = [0]

        def override(_chosen: Any, *args: Any, transformer_options: Any, **kwargs: Any) -> torch.Tensor:
            calls[0] += 1
            return by_numpy(*args, scale=float(calls[0]), **kwargs)

        return override, calls

    served, (override, calls), (other, other_calls) = Served(opaque=opaque), counting(), counting()
    x = torch.randn(2, 6, 8)
    for _ in range(4):
        served.dispatcher.begin_run()
        with torch.inference_mode():
            actual = served.dispatcher(served.net, served.net.forward, (x, {OPTION: override}), {})
            torch.testing.assert_close(actual, served.net(x, {OPTION: other}))
        assert calls == other_calls
    assert not served.figures()["served"]


def test_a_host_with_such_an_attention_of_its_own_and_nodes_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host was started with is called by every graph; what a node chooses is looked at first."""

    def by_host(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **_kwargs: Any) -> torch.Tensor:
        return by_numpy(q, k, v, heads, scale=3.0)

    module = sys.modules[__name__]
    for name in ("IMPORTED", "by_host"):
        monkeypatch.setattr(module, name, by_host, raising=False)
    by_host.__qualname__, by_host.__module__ = "by_host", __name__
    served = Served(opaque=frozenset((OPTION,)))
    for override in (None, of_scale(1.0), lambda chosen, *args, **kwargs: chosen(*args, **kwargs) * 2, None):
        served.dispatcher.begin_run()
        assert all(served(override) for _ in range(2)), served.figures()


def test_where_the_function_that_it_stands_for_is_another_by_now_it_runs_eager(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def override(chosen: Any, *args: Any, **kwargs: Any) -> Any:
        args[0].numpy()
        return chosen(*args, **kwargs)

    assert served(override)
    monkeypatch.setattr(sys.modules[__name__], "by_pytorch", lambda q, *_args, **_kwargs: q)
    assert not served(override)


def test_one_that_refuses_other_values_of_what_it_holds_runs_eager(served: Served) -> None:
    mask = torch.tensor([0.0, 1.0])

    def override(_chosen: Any, *args: Any, transformer_options: Any, **kwargs: Any) -> torch.Tensor:
        if not set(mask.tolist()) <= {0.0, 1.0}:
            raise ValueError("a mask has zeros and ones")
        return by_numpy(*args, scale=float(mask.sum()), **kwargs)

    assert not any(served(override) for _ in range(2))


def test_what_it_gives_is_new_memory(served: Served) -> None:
    kept = torch.ones(2, 6, 8)
    text = json.dumps({"option": OPTION, "args": [], "kwargs": {"dict": []}})
    with options_given({OPTION: lambda: kept}):
        given = call_option()([torch.ones(1)], [], text, [2, 6, 8], torch.float32)
    assert torch.equal(given, kept) and given.data_ptr() != kept.data_ptr()


@pytest.mark.parametrize("change", [torch.Tensor.half, lambda t: t[:, :1], lambda t: [t]])
def test_what_gives_something_else_runs_eager(change: Callable[[torch.Tensor], Any]) -> None:
    served = Served()

    def override(_chosen: Any, *args: Any, transformer_options: Any, **kwargs: Any) -> Any:
        return change(by_numpy(*args, **kwargs))

    x = torch.randn(2, 6, 8)
    for _ in range(2):
        with torch.inference_mode():
            expected = _outcome(served.net, x, {OPTION: override})
            actual = _outcome(served.dispatcher, served.net, served.net.forward, (x, {OPTION: override}), {})
        assert str(actual) == str(expected)
    assert not served.figures()["served"]


def centred(_chosen: Any, q: torch.Tensor, k: torch.Tensor, *args: Any, transformer_options: Any) -> torch.Tensor:
    """Writes to the keys, as SageAttention 1 does."""
    k -= k.mean(1, keepdim=True)
    return by_numpy(q, k, *args)


def test_one_that_writes_to_what_it_is_handed_is_served(served: Served) -> None:
    assert all(served(centred) for _ in range(3))


def test_where_the_model_uses_what_is_written_to_it_runs_eager() -> None:
    class Using(Net):
        def forward(self, x: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
            q, k, v = self.blocks[0](x).chunk(3, -1)
            return attention(q, k, v, 2, transformer_options=transformer_options) + k

    served = Served()
    served.net = Using().eval().requires_grad_(False)
    assert not any(served(centred) for _ in range(3))
    assert served(of_scale(1.0))


def test_what_gives_back_what_it_was_given_is_not_written_to(served: Served) -> None:
    def override(_chosen: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_args: Any, **_kw: Any) -> Any:
        q.numpy()
        return v

    assert all(served(override) for _ in range(3))


def _outcome(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except (TypeError, RuntimeError) as error:
        return error


def test_a_process_that_has_traced_nothing_serves_what_another_has_kept(root: Path, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        command = [sys.executable, str(root / "tests" / "unit" / "opaque_restarted.py"), str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout))
    assert found == [{"compiled": 1, "loaded": 0, "served": 1}, {"compiled": 0, "loaded": 1, "served": 1}]


@pytest.fixture
def served() -> Served:
    return Served()

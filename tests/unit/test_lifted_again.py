"""Functions that were lifted are not walked through again while they and their code are what they were."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from test_functions_handed_over import HOST, Net
from torch import nn

from onediff_comfy.capture.fingerprint.code_ownership import HostCode
from onediff_comfy.capture.functions.lifted import LiftedFunctions, lift
from onediff_comfy.capture.handed_over import Unliftable
from onediff_comfy.capture.target.target import Target
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.serving import function_lifter
from onediff_comfy.serving.dispatcher import Dispatcher

Image = Callable[..., int]


@pytest.fixture
def dispatcher(library: GraphLibrary) -> Dispatcher:
    return Dispatcher("eager", library, HOST)


@pytest.fixture
def image(dispatcher: Dispatcher) -> Image:
    """Make an image, which has to be right; return how often functions were lifted for it."""

    def made(net: nn.Module, *patches: Any) -> int:
        options = {"patches": {"output": list(patches)}, "sigmas": torch.ones(1)}
        with torch.inference_mode(), mock.patch.object(function_lifter, "lift", side_effect=lift) as lifted:
            dispatcher.begin_run()
            for _ in range(2):
                x = torch.randn(2, 4)
                output = dispatcher(net, net.forward, (x,), {"transformer_options": options})
                torch.testing.assert_close(output, net(x, options))
            dispatcher.end_run(net)
        return int(lifted.call_count)

    return made


class Scaled:
    """A patch of a node."""

    def __init__(self, by: torch.Tensor) -> None:
        self.by = by

    def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return helped(out) * self.by


def helped(out: torch.Tensor) -> torch.Tensor:
    return out + 1


def _added(out: torch.Tensor, *, by: float) -> torch.Tensor:
    return out + by


def made() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


def settle(image: Image, net: nn.Module, *patches: Any) -> None:
    """Have functions lifted until they are no more."""
    for _ in range(4):
        if image(net, *patches) == 0:
            return
    raise AssertionError("lifted in every image")


def test_in_the_third_image_nothing_is_lifted(image: Image) -> None:
    net, patch = made(), Scaled(torch.rand(4))
    assert image(net, patch) >= 1
    assert [image(net, patch) for _ in range(4)] == [1, 0, 0, 0]


def test_other_code_that_a_function_calls_is_noticed(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    net, patch = made(), Scaled(torch.rand(4))
    settle(image, net, patch)
    monkeypatch.setitem(globals(), "helped", lambda out: out - 1)
    assert image(net, patch) >= 1


def test_code_that_was_changed_in_place_is_noticed(image: Image) -> None:
    net, patch = made(), Scaled(torch.rand(4))
    settle(image, net, patch)
    before, helped.__code__ = helped.__code__, (lambda out: out - 1).__code__
    try:
        assert image(net, patch) >= 1
    finally:
        helped.__code__ = before


def _by_its_module(host: Any) -> Callable[..., Any]:
    return lambda out, extra: host.outer(out)


def _by_name(host: Any) -> Callable[..., Any]:
    return types.FunctionType((lambda out, extra: a_host.outer(out)).__code__, {**globals(), "a_host": host})  # type: ignore # noqa: F821


def _by_an_import(host: Any) -> Callable[..., Any]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> Any:
        import a_host  # type: ignore[import-not-found]

        return a_host.outer(out)

    return patch


class _WithModule:
    def __init__(self, host: Any) -> None:
        self.host = host

    def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> Any:
        return self.host.outer(out)


def _by_a_default(host: Any) -> Callable[..., Any]:
    return lambda out, extra, of={"host": host}: of["host"].outer(out)


_INNER = "".join(("in", "side"))  # a name that is in no code and no string of this file, which patches might read by
_OF_HOST = f"def outer(x): return {_INNER}(x)\n\ndef {_INNER}(x): return x"


@pytest.mark.parametrize("where", ["outer", _INNER])
@pytest.mark.parametrize("called", [_by_its_module, _by_name, _by_an_import, _WithModule, _by_a_default])
def test_another_function_of_the_host_is_noticed(
    called: Callable[..., Any], where: str, library: GraphLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the host's functions call no call looks at: a run does."""
    (tmp_path / "a_host.py").write_text(_OF_HOST)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_host", raising=False)
    host: Any = importlib.import_module("a_host")
    lifter = function_lifter.FunctionLifter(library, dataclasses.replace(HOST, code=HostCode("a_host")))
    target, patch = Target(made()), called(host)

    def lifted() -> LiftedFunctions:
        lifter.begin_run()
        found = lifter.lift(target, [patch], {})
        lifter.end_run()
        return found

    before = [lifted() for _ in range(4)]
    assert before[0].digest == before[1].digest and before[2] is before[3]
    setattr(host, where, helped)
    assert where == _INNER or called in (_WithModule, _by_a_default) or not before[3].holds()
    assert lifted().digest != before[0].digest


def test_a_default_that_is_put_in_between_two_calls_is_noticed(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the table of defaults of a function that the patch calls, which stays the same table."""
    monkeypatch.setitem(globals(), "helped", types.FunctionType(_added.__code__, globals(), "helped"))
    helped.__kwdefaults__ = {"by": 1.0}
    net, patch = made(), Scaled(torch.rand(4))
    with torch.inference_mode():
        dispatcher.begin_run()
        for by in (1.0, 1.0, 2.0, 3.0):
            helped.__kwdefaults__["by"] = by
            x, options = torch.randn(2, 4), {"patches": {"output": [patch]}, "sigmas": torch.ones(1)}
            torch.testing.assert_close(
                dispatcher(net, net.forward, (x,), {"transformer_options": options}), net(x, options)
            )


def test_functions_that_were_given_up_are_lifted_no_more(library: GraphLibrary) -> None:
    lifter, target, patch = function_lifter.FunctionLifter(library, HOST), Target(made()), Scaled(torch.rand(4))
    for _ in range(4):
        lifter.begin_run()
        found = lifter.lift(target, [patch], {})
        lifter.end_run()
    lifter.give_up(found)
    lifter.begin_run()
    with pytest.raises(Unliftable, match="changes what it keeps"):
        lifter.lift(target, [patch], {})


def test_what_changes_while_functions_are_lifted_is_noticed(library: GraphLibrary) -> None:
    """By another thread: the text that counts was made of what was there before."""
    lifter, target, patch = function_lifter.FunctionLifter(library, HOST), Target(made()), Scaled(torch.rand(4))
    patch.factor = "before"  # type: ignore[attr-defined]

    def interrupted(*arguments: Any) -> Any:
        found = lift(*arguments)
        patch.factor = "after"  # type: ignore[attr-defined]
        return dataclasses.replace(lift(*arguments), digest=found.digest)  # as if it had been noted down a moment later

    with mock.patch.object(function_lifter, "lift", side_effect=interrupted):
        before = lifter.lift(target, [patch], {}).digest
    for _ in range(3):
        lifter.begin_run()
        assert lifter.lift(target, [patch], {}).digest != before


def test_another_shape_of_an_array_is_noticed(image: Image) -> None:
    net, patch = made(), Scaled(torch.rand(4))
    patch.table = np.ones((2, 2))  # type: ignore[attr-defined]
    settle(image, net, patch)
    patch.table.shape = (4,)  # type: ignore[attr-defined]
    assert image(net, patch) >= 1


def test_another_image_prompt_is_noticed(image: Image) -> None:
    net, patch = made(), Scaled(torch.rand(4))
    settle(image, net, patch)
    patch.by = torch.rand(4)
    assert image(net, patch) >= 1


def test_a_layer_that_a_function_holds_is_of_one_model_only(image: Image) -> None:
    """Of two checkpoints of one architecture it may be the first one's own, and then is no input of its own."""
    first, second = made(), made()
    for parameter in second.parameters():
        parameter.mul_(2)
    held = first.blocks[0]

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return held(out)  # type: ignore[no-any-return]

    settle(image, first, patch)
    assert image(second, patch) >= 1
    assert image(first, patch) >= 1


def test_what_a_run_did_not_have_is_not_kept(image: Image) -> None:
    net, patch = made(), Scaled(torch.rand(4))
    settle(image, net, patch)
    held = weakref.ref(patch.by)
    del patch
    gc.collect()
    assert held() is not None
    settle(image, net, Scaled(torch.rand(4)))
    gc.collect()
    assert held() is None


def test_nothing_is_kept_when_weights_leave_the_device(image: Image, library: GraphLibrary) -> None:
    net, patch = made(), Scaled(torch.rand(4))
    settle(image, net, patch)
    held = weakref.ref(patch.by)
    library.release()
    del patch
    gc.collect()
    assert held() is None


def test_the_host_is_asked_about_layers_in_each_run(library: GraphLibrary) -> None:
    """It may have come to think that one of them will not simply use its weights."""
    asked: list[Any] = []
    lifter = function_lifter.FunctionLifter(library, dataclasses.replace(HOST, refuse=asked.append))
    target, patch = Target(made()), Scaled(torch.rand(4))
    patch.layer = nn.Linear(4, 4)  # type: ignore[attr-defined]
    for _ in range(4):
        lifter.begin_run()
        lifter.lift(target, [patch], {})
        lifter.end_run()
    assert len(asked) == 4


def test_what_ran_when_a_function_was_refused_is_not_kept(library: GraphLibrary) -> None:
    """A run that is stopped does not end it, and its frames hold latents and prompts."""
    lifter, target, patch = function_lifter.FunctionLifter(library, HOST), Target(made()), Scaled(torch.rand(4))
    lifter.begin_run()
    lifter.give_up(lifter.lift(target, [patch], {}))

    def sampled() -> weakref.ref[torch.Tensor]:
        latent = torch.rand(4)
        with pytest.raises(Unliftable):
            lifter.lift(target, [patch], {})
        return weakref.ref(latent)

    latent = sampled()
    gc.collect()
    assert latent() is None

"""The ControlNet Speedup node in a real ComfyUI: strengths, ranges, chains and sizes without another compilation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from controls import LORA, NET, OTHER, install_controls
from pictures import FAMILIES, Counters, TinyFamily, assert_same_picture, assert_untouched, latent_of
from PIL import Image
from scripts import checkpoint_of, printed_by

from dev.environment import comfyui_path, repository
from dev.host import ComfyServer, PromptRejected
from tools.models.checkpoints import checkpoint_file
from tools.models.controls import ensure_controls
from tools.workflows import Workflow

SD15 = FAMILIES["sd15"]
FLUX = FAMILIES["flux"]
HINT = "hint.png"


@pytest.fixture(scope="module", autouse=True)
def controls(server: ComfyServer) -> None:
    """The tiny ControlNets, and an image for them to look at."""
    install_controls(server)
    pixels = np.random.default_rng(1).integers(0, 256, (96, 128, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((256, 192)).save(server.base_dir / "input" / HINT)


def _controlled(
    *nets: str,
    engine: str | None = "eager",
    model_engine: str | None = None,
    strength: float = 1.0,
    span: tuple[float, float] = (0.0, 1.0),
    seed: int = 1,
    family: TinyFamily = SD15,
    **more: Any,
) -> Workflow:
    """An image under the control of ``nets``, one behind the other, without being decoded.

    Args:
        engine: of the ControlNet Speedup nodes; None leaves them out.
        model_engine: of the Model Speedup node; None leaves it out.
        span: the percentages of the steps at which control starts and ends.
    """
    workflow = family.workflow(seed, model_engine, **{"size": 64, **more})
    for name in ("decode", "save"):
        del workflow[name]
    workflow["hint"] = {"class_type": "LoadImage", "inputs": {"image": HINT}}
    positive, negative = ["positive", 0], ["negative", 0]
    for number, net in enumerate(nets):
        loader, fast, apply = f"net{number}", f"fast{number}", f"apply{number}"
        loading = {"control_net_name": checkpoint_file(net)}
        workflow[loader] = {"class_type": "ControlNetLoader", "inputs": loading}
        if engine is not None:
            inputs = {"control_net": [loader, 0], "engine": engine, "compile": "wait"}
            workflow[fast] = {"class_type": "OneDiffControlNetSpeedup", "inputs": inputs}
        workflow[apply] = {
            "class_type": "ControlNetApplyAdvanced",
            "inputs": {
                "positive": positive,
                "negative": negative,
                "control_net": [loader if engine is None else fast, 0],
                "image": ["hint", 0],
                "strength": strength,
                "start_percent": span[0],
                "end_percent": span[1],
            },
        }
        positive, negative = [apply, 0], [apply, 1]
    workflow["sampler"]["inputs"] |= {"positive": positive, "negative": negative}
    return workflow


def _same_as_eager(server: ComfyServer, *nets: str, model_engine: str | None = None, **more: Any) -> Counters:
    """Make an image with and without our nodes; what the one with them counted."""
    expected = latent_of(server.run(_controlled(*nets, engine=None, **more)))
    counters = Counters(server)
    assert_same_picture(latent_of(server.run(_controlled(*nets, model_engine=model_engine, **more))), expected)
    return counters


CHANGES: dict[str, dict[str, Any]] = {
    "strength": {"strength": 0.4},
    "strength of nothing": {"strength": 0.0},
    "range": {"span": (0.3, 0.8)},
    "size": {"size": (96, 64)},
    "batch": {"batch": 3},
    "seed": {"seed": 2},
}


# Inductor is slow: a minute for what test_any_size.py has of a model and test_vae_speedup.py of a VAE, at other sizes
# and in a new process.
@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_once_whatever_changes(server: ComfyServer, restarted: ComfyServer, engine: str) -> None:
    plain = latent_of(server.run(_controlled(NET, engine=None)))
    without = latent_of(server.run(_controlled()))
    assert not torch.allclose(plain, without, rtol=1e-1), "the ControlNet must show"

    first = Counters(server)
    assert_same_picture(latent_of(server.run(_controlled(NET, engine=engine))), plain)
    assert (first.captured, first.compiled) == (1, 1)
    assert first.served == SD15.steps
    assert first.fallbacks == {}

    later = Counters(server)
    for change in CHANGES.values():
        expected = latent_of(server.run(_controlled(NET, engine=None, **change)))
        assert_same_picture(latent_of(server.run(_controlled(NET, engine=engine, **change))), expected)
    expected = latent_of(server.run(_controlled(OTHER, engine=None)))
    assert_same_picture(latent_of(server.run(_controlled(OTHER, engine=engine))), expected)
    assert (later.captured, later.compiled, later.fallbacks) == (0, 0, {})
    assert later.served > 0

    # Bypassed, nothing is left of it: not one bit. The loader's object is the one that was accelerated.
    assert_untouched(latent_of(server.run(_controlled(NET, engine=None, seed=1))), plain)

    if engine == "inductor":  # its graphs are kept
        counters = Counters(restarted)
        assert_same_picture(latent_of(restarted.run(_controlled(NET, engine=engine))), plain)
        assert (counters.captured, counters.compiled, counters.loaded) == (0, 0, 1)
        assert counters.served == SD15.steps


def test_the_model_takes_control_as_an_input(server: ComfyServer) -> None:
    """One graph of the diffusion model with control and one without, whatever the control says."""
    _same_as_eager(server, NET, model_engine="eager")
    _same_as_eager(server, model_engine="eager", seed=2)
    later = Counters(server)
    for change in ("strength", "strength of nothing", "range", "batch"):
        counters = _same_as_eager(server, NET, model_engine="eager", **CHANGES[change])
        assert counters.served >= SD15.steps
    _same_as_eager(server, NET, OTHER, model_engine="eager", strength=0.6)
    _same_as_eager(server, model_engine="eager", seed=3)
    assert (later.captured, later.compiled, later.fallbacks) == (0, 0, {})


@pytest.mark.slow
def test_several_in_a_chain(server: ComfyServer) -> None:
    counters = _same_as_eager(server, NET, OTHER, LORA, strength=0.5)
    assert counters.served == 3 * SD15.steps
    assert counters.fallbacks == {}
    assert _same_as_eager(server, NET, NET, strength=0.7).served == 2 * SD15.steps


@pytest.mark.slow
def test_a_control_lora_is_captured_once_though_the_host_builds_it_anew_for_each_image(server: ComfyServer) -> None:
    _same_as_eager(server, LORA)
    _same_as_eager(server, LORA, model_engine="eager")
    later = Counters(server)
    for change in ("strength", "size", "batch"):
        _same_as_eager(server, LORA, **CHANGES[change])
    _same_as_eager(server, LORA, LORA, strength=0.5)
    _same_as_eager(server, LORA, model_engine="eager", seed=5)
    assert (later.captured, later.fallbacks) == (0, {})
    assert later.served > 0


@pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_result_that_several_blocks_share_is_scaled_once(server: ComfyServer, engine: str) -> None:
    """The host multiplies a shared tensor by the strength in place: with 19 blocks a second time would show."""
    if engine == "inductor":
        expected = latent_of(server.run(_controlled("flux_min_control", engine=None, family=FLUX, strength=0.8)))
        fast = _controlled("flux_min_control", engine=engine, family=FLUX, strength=0.8)
        assert_same_picture(latent_of(server.run(fast)), expected)
        return
    counters = _same_as_eager(server, "flux_min_control", family=FLUX, strength=0.8)
    assert counters.served == FLUX.steps
    assert counters.fallbacks == {}


def test_what_runs_once_an_image_passes_through(server: ComfyServer) -> None:
    expected = latent_of(server.run(_controlled("t2i_adapter", engine=None)))
    counters = Counters(server)
    result = server.run(_controlled("t2i_adapter"))
    assert_untouched(latent_of(result), expected)
    reason = (
        "what the node before this one gave to the input control_net is not a ControlNet whose own network runs at "
        "every step (its type is T2IAdapter)"
    )
    assert counters.fallbacks == {reason: 1}
    assert ("fast0", f"not accelerated: {reason}") in result.texts


def test_an_engine_that_cannot_run_here_says_so_and_the_picture_is_made(server: ComfyServer) -> None:
    expected = latent_of(server.run(_controlled(NET, engine=None)))
    counters = Counters(server)
    result = server.run(_controlled(NET, engine="oneflow"))
    assert_same_picture(latent_of(result), expected)
    (reason,) = counters.fallbacks
    assert reason.startswith("the oneflow engine is not available: ")
    assert counters.fallbacks[reason] == SD15.steps
    assert ("fast0", f"not accelerated: {reason}") in result.texts


def test_the_node_explains_itself_and_refuses_what_it_does_not_know(server: ComfyServer) -> None:
    info = server.get_json("/object_info/OneDiffControlNetSpeedup")["OneDiffControlNetSpeedup"]
    assert (info["category"], info["display_name"]) == ("OneDiff", "OneDiff ControlNet Speedup")
    assert info["description"]
    inputs = {**info["input"]["required"], **info["input"]["optional"]}
    assert list(inputs) == ["control_net", "engine", "compile"]
    assert all(options["tooltip"] for _, options in inputs.values())
    assert all(info["output_tooltips"])
    with pytest.raises(PromptRejected) as refusal:
        server.run(_controlled(NET, engine="warp-drive"))
    (error,) = refusal.value.body["node_errors"]["fast0"]["errors"]
    assert "warp-drive" in error["details"] and "inductor" in error["details"]


def test_after_an_image_that_was_stopped_the_network_is_looked_at_again() -> None:
    """The host keeps the hint of such an image, so that of the next one is the same object."""
    made = repository() / ".cache" / "controls"
    ensure_controls(comfyui_path(), made, [NET])
    found = printed_by("stopped_control.py", comfyui_path(), checkpoint_of("sd15_min"), made / checkpoint_file(NET))
    assert found["changes"] > 0.05
    assert found["off"] < 1e-5


def test_what_another_extension_makes_of_a_controlnet_is_what_it_makes_of_the_hosts() -> None:
    """It asks for the class itself, and has methods of its own on the object."""
    made = repository() / ".cache" / "controls"
    ensure_controls(comfyui_path(), made, [NET, LORA])
    files = [checkpoint_of("sd15_min"), *(made / checkpoint_file(name) for name in (NET, LORA))]
    found = printed_by("converted_control.py", comfyui_path(), *files)
    assert found["kind"] and found["lora"]
    assert found["served"] > 0
    assert max(found["off"], found["again"]) < 1e-5
    assert found["changes"] > 0.05
    assert found["off_then"] < 1e-5
    assert found["runs"] == 3 * 2, "one for each prompt of each picture, as the host calls it"

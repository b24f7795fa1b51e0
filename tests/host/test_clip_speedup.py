"""The CLIP Speedup node in a real ComfyUI: prompts of any kind from one graph per encoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encoders import encoded
from pictures import Counters, assert_same_picture, assert_untouched, latent_of
from safetensors.torch import save_file
from scripts import path_of_host, printed_by

from dev.host import ComfyServer, PromptRejected

ENCODERS = {"sd15": 1, "sdxl": 2, "flux": 2, "z_image": 1}
"""The families, with how many text encoders each has."""

PROMPT = "a lighthouse on a cliff"
PROMPTS = {
    "another": "two dogs",
    "weighted": "a (lighthouse:1.4) on a (cliff:0.6), evening light",
    "long": "a long road, " * 60,
    "empty": "",
}
EMBEDDING, LORA = "tiny_embedding", "tiny_lora"


@pytest.fixture(scope="module", autouse=True)
def files(server: ComfyServer) -> None:
    """A textual inversion of two tokens and a LoRA for the first layers of CLIP-L."""
    generator = torch.Generator().manual_seed(1)
    models = server.base_dir / "models"
    for folder in ("embeddings", "loras"):
        (models / folder).mkdir(parents=True, exist_ok=True)
    vectors = {"emb_params": 0.02 * torch.randn(2, 768, generator=generator)}
    save_file(vectors, models / "embeddings" / f"{EMBEDDING}.safetensors")
    lora = {}
    for layer, (into, out) in {"mlp_fc1": (768, 256), "mlp_fc2": (256, 768), "self_attn_q_proj": (768, 768)}.items():
        name = f"lora_te_text_model_encoder_layers_0_{layer}"
        lora[f"{name}.lora_down.weight"] = torch.randn(4, into, generator=generator) * into**-0.5
        lora[f"{name}.lora_up.weight"] = torch.randn(out, 4, generator=generator)
        lora[f"{name}.alpha"] = torch.tensor(4.0)
    save_file(lora, models / "loras" / f"{LORA}.safetensors")


def _same_as_eager(server: ComfyServer, text: str, engine: str = "eager", **more: Any) -> Counters:
    """Encode with and without our node; what the one with it counted."""
    expected = latent_of(server.run(encoded(text, None, **more)))
    counters = Counters(server)
    assert_same_picture(latent_of(server.run(encoded(text, engine, **more))), expected)
    return counters


# SDXL's are slow: of its two one is SD 1.5's, and the other another of its kind.
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name == "sdxl" else name for name in ENCODERS]
)
def test_one_graph_for_every_prompt(server: ComfyServer, family: str) -> None:
    first = _same_as_eager(server, PROMPT, family=family)
    assert first.served == ENCODERS[family]
    assert first.captured <= ENCODERS[family]  # the encoders of two families may be alike
    assert first.fallbacks == {}
    later = Counters(server)
    for kind in ("weighted", "long"):
        assert _same_as_eager(server, PROMPTS[kind], family=family).served == ENCODERS[family]
    _same_as_eager(server, PROMPT, family=family, seed=1)  # other weights
    assert (later.captured, later.compiled, later.fallbacks) == (0, 0, {})


def test_compiled_once_and_nothing_is_left_behind(server: ComfyServer, restarted: ComfyServer) -> None:
    plain = latent_of(server.run(encoded(PROMPT, None, seed=2)))
    first = Counters(server)
    assert_same_picture(latent_of(server.run(encoded(PROMPT, "inductor", seed=2))), plain)
    assert (first.captured, first.compiled, first.served, first.fallbacks) == (1, 1, 1, {})
    later = Counters(server)
    for text in PROMPTS.values():
        _same_as_eager(server, text, "inductor", seed=2)
    assert (later.captured, later.compiled, later.served, later.fallbacks) == (0, 0, len(PROMPTS), {})

    # Bypassed, nothing is left of it: not one bit. The loader's object is the one that was accelerated.
    _same_as_eager(server, "something between", "inductor", seed=2)
    assert_untouched(latent_of(server.run(encoded(PROMPT, None, seed=2))), plain)

    counters = Counters(restarted)
    assert_same_picture(latent_of(restarted.run(encoded(PROMPT, "inductor", seed=2))), plain)
    assert (counters.captured, counters.compiled, counters.loaded, counters.served) == (0, 0, 1, 1)


def test_an_embedding_in_the_prompt(server: ComfyServer) -> None:
    _same_as_eager(server, PROMPT)
    without = latent_of(server.run(encoded("a, b", None)))
    inverted = f"a embedding:{EMBEDDING}, b"
    assert not torch.allclose(latent_of(server.run(encoded(inverted, None))), without, rtol=1e-2)
    later = Counters(server)
    for text in (inverted, f"embedding:{EMBEDDING}", f"some (words:1.2) and then embedding:{EMBEDDING} again"):
        assert _same_as_eager(server, text).served == 1
    assert (later.captured, later.fallbacks) == (0, {})


@pytest.mark.parametrize("place", ["before", "behind"])
def test_another_last_layer(server: ComfyServer, place: str) -> None:
    last = latent_of(server.run(encoded(PROMPT, None)))
    skip = {place: [("CLIPSetLastLayer", {"stop_at_clip_layer": -2}, 0)]}
    assert not torch.allclose(latent_of(server.run(encoded(PROMPT, None, **skip))), last, rtol=1e-2)
    counters = _same_as_eager(server, PROMPT, **skip)
    assert (counters.served, counters.fallbacks) == (1, {})
    later = Counters(server)
    _same_as_eager(server, PROMPTS["long"], **skip)
    assert later.captured == 0


@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_lora_acts(server: ComfyServer, place: str) -> None:
    _same_as_eager(server, PROMPT)
    plain = latent_of(server.run(encoded(PROMPT, None)))
    later = Counters(server)
    for strength in (1.0, 0.3):
        inputs = {"model": ["model", 0], "lora_name": f"{LORA}.safetensors", "strength_model": 0.0}
        lora = {place: [("LoraLoader", {**inputs, "strength_clip": strength}, 1)]}
        patched = latent_of(server.run(encoded(PROMPT, None, **lora)))
        assert not torch.allclose(patched, plain, rtol=1e-2)
        assert _same_as_eager(server, PROMPT, **lora).served == 1
    assert_same_picture(latent_of(server.run(encoded(PROMPT, "eager", seed=0))), plain)
    assert (later.captured, later.fallbacks) == (0, {})


def test_an_engine_that_cannot_run_here_says_so(server: ComfyServer) -> None:
    expected = latent_of(server.run(encoded(PROMPT, None, family="flux")))
    counters = Counters(server)
    result = server.run(encoded(PROMPT, "oneflow", family="flux"))
    assert_untouched(latent_of(result), expected)
    (reason,) = counters.fallbacks
    assert reason.startswith("the oneflow engine is not available: ")
    assert counters.fallbacks[reason] == 2
    assert ("speedup", f"not accelerated: {reason}") in result.texts


def test_something_that_is_no_clip_passes_through_with_a_reason(server: ComfyServer) -> None:
    workflow = {
        "broken": {"class_type": "NotAClip", "inputs": {}},
        "speedup": {"class_type": "OneDiffCLIPSpeedup", "inputs": {"clip": ["broken", 0], "engine": "auto"}},
        "kind": {"class_type": "ClipKind", "inputs": {"clip": ["speedup", 0]}},
    }
    counters = Counters(server)
    result = server.run(workflow)
    assert result.outputs["kind"]["kind"] == ["SimpleNamespace"]
    reason = "what the node before this one gave to the input clip is not a CLIP with layers of a text encoder"
    assert counters.fallbacks == {f"{reason} (its type is SimpleNamespace)": 1}
    assert any(node == "speedup" and text.startswith("not accelerated: ") for node, text in result.texts)


def test_the_node_explains_itself_and_refuses_what_it_does_not_know(server: ComfyServer) -> None:
    info = server.get_json("/object_info/OneDiffCLIPSpeedup")["OneDiffCLIPSpeedup"]
    assert (info["category"], info["display_name"]) == ("OneDiff", "OneDiff CLIP Speedup")
    assert info["description"]
    inputs = {**info["input"]["required"], **info["input"]["optional"]}
    assert list(inputs) == ["clip", "engine", "compile"]
    assert all(options["tooltip"] for _, options in inputs.values())
    assert all(info["output_tooltips"])
    with pytest.raises(PromptRejected) as refusal:
        server.run(encoded(PROMPT, "warp-drive"))
    (error,) = refusal.value.body["node_errors"]["speedup"]["errors"]
    assert "warp-drive" in error["details"] and "inductor" in error["details"]


def test_text_is_written_by_comfyui_and_not_traced_for_each_token() -> None:
    found = printed_by("written_text.py", path_of_host("this one"))
    assert found["ours"] == found["expected"] and len(found["ours"]) == 6
    assert found["captured"] == 0
    assert list(found["fallbacks"].values()) == [6]


def test_object_patches_of_an_encoder_come_and_go_as_with_comfyui_alone() -> None:
    found = printed_by("patched_encoder.py", path_of_host("this one"))
    assert found.pop("changes") > 0.1
    assert found == {"behind": 0, "before": 0, "elsewhere": 0}

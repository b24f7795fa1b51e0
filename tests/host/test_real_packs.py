"""Packs that put functions into a model, as they are published, beside ours in a real server.

Their source is no package of any registry: a variable of the environment names a folder that has it, else it is cloned.
IP-Adapter_plus' own nodes run. InstantID's and PuLID's need models of faces that are not to be had for tests, so their
patches are put into the model as their nodes do (``tiny_nodes/image_prompts.py``). Of KJNodes one node is loaded.
SageAttention's kernels need a GPU: on a CPU its functions are numpy's (``attention_library``).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pictures import Counters, TinyFamily, assert_same_picture, latent_of

from dev.environment import comfyui_path, repository
from dev.host import ComfyServer
from tools.models.checkpoints import checkpoint_file, ensure_checkpoints
from tools.models.image_prompts import FILES, ensure_image_prompts
from tools.workflows import Workflow

pytestmark = pytest.mark.slow  # minutes, and clones from the network where no folder is named

PACKS = {
    "COMFYUI_IPADAPTER_PLUS": "https://github.com/cubiq/ComfyUI_IPAdapter_plus",
    "COMFYUI_INSTANTID": "https://github.com/cubiq/ComfyUI_InstantID",
    "PULID_COMFYUI": "https://github.com/cubiq/PuLID_ComfyUI",
    "COMFYUI_KJNODES": "https://github.com/kijai/ComfyUI-KJNodes",
}
SD15 = TinyFamily("sd15_deep", {"tokens": 77, "dim": 768, "pooled_dim": 0}, 7.0, steps=2)
CONTROL = "sd15_control"
KJNODES, LIBRARY = (Path(__file__).with_name(name) for name in ("kjnodes_attention", "attention_library"))

Patch = Mapping[str, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The packs that can be had, by the names of their variables."""
    found = {}
    for variable, source in PACKS.items():
        folder = Path(os.environ.get(variable) or tmp_path_factory.mktemp("pack") / source.rpartition("/")[2])
        if variable in os.environ or _cloned(source, folder):
            found[variable] = folder
    return found


def _cloned(source: str, folder: Path) -> bool:
    command = ["git", "clone", "--quiet", "--depth", "1", source, str(folder)]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        return subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.fixture(scope="module")
def own_server(
    folders: dict[str, Path], start_server: Callable[..., ComfyServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ComfyServer]:
    base, files = tmp_path_factory.mktemp("packs_host"), repository() / ".cache" / "checkpoints"
    ensure_checkpoints(comfyui_path(), files, [SD15.checkpoint, CONTROL])
    ensure_image_prompts(comfyui_path(), files)
    adapter, lora = FILES
    for folder, name in (("ipadapter", adapter), ("loras", lora), ("controlnet", CONTROL)):
        (base / "models" / folder).mkdir(parents=True)
        (base / "models" / folder / checkpoint_file(name)).symlink_to(files / checkpoint_file(name))
    (base / "custom_nodes").mkdir()
    if "COMFYUI_IPADAPTER_PLUS" in folders:
        nodes = base / "custom_nodes" / "ComfyUI_IPAdapter_plus"
        nodes.symlink_to(folders["COMFYUI_IPADAPTER_PLUS"], target_is_directory=True)
    if "COMFYUI_KJNODES" in folders:
        (base / "custom_nodes" / KJNODES.name).symlink_to(KJNODES, target_is_directory=True)
    environment = {variable: str(folder) for variable, folder in folders.items()}
    with start_server(base, PYTHONPATH=str(LIBRARY), **environment) as running:
        yield running


def _node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def _image_prompt(color: int = 0x3366CC, weight: float = 0.8, start_at: float = 0.0, **more: Any) -> Patch:
    """IP-Adapter_plus' node IPAdapterAdvanced, and what it is given."""
    values = {"weight": weight, "weight_type": "linear", "combine_embeds": "concat", "embeds_scaling": "V only"}
    return {
        "encoder": _node("TinyClipVision"),
        "adapter": _node("IPAdapterModelLoader", ipadapter_file=checkpoint_file("tiny_image_prompt")),
        "picture": _node("EmptyImage", width=224, height=224, batch_size=1, color=color),
        "patch": _node(
            "IPAdapterAdvanced",
            ipadapter=["adapter", 0],
            image=["picture", 0],
            clip_vision=["encoder", 0],
            **{**values, "start_at": start_at, "end_at": 1.0, **more},
        ),
    }


def _face(pack: str, color: int = 1, weight: float = 0.8, start_at: float = 0.0) -> Patch:
    return {"patch": _node("FacePrompt", pack=pack, face=color, weight=weight, start_at=start_at, end_at=1.0)}


def _freeu(color: int = 0, weight: float = 1.3, start_at: float = 0.0) -> Patch:
    return {"patch": _node("FreeU_V2", b1=weight, b2=1.4 + color / 10, s1=0.9, s2=0.2 + start_at)}


def _perturbed(color: int = 0, weight: float = 3.0, start_at: float = 0.0) -> Patch:
    return {"patch": _node("PerturbedAttentionGuidance", scale=weight + color + start_at)}


def _normalized(color: int = 0, weight: float = 5.0, start_at: float = 0.0) -> Patch:
    return {"patch": _node("NAGuidance", nag_scale=weight, nag_alpha=0.5 + color / 10, nag_tau=1.5 + start_at)}


def _sage(color: int = 0, weight: float = 0.8, start_at: float = 0.0) -> Patch:
    mode = {0.3: "sageattn_qk_int8_pv_fp16_cuda", 1.7: "sageattn_qk_int8_pv_fp8_cuda"}.get(weight, "auto")
    return {"patch": _node("PathchSageAttentionKJ", sage_attention=mode, allow_compile=bool(color or start_at))}


KINDS: Mapping[str, tuple[str | None, Callable[..., Patch]]] = {
    "IPAdapter_plus": ("COMFYUI_IPADAPTER_PLUS", _image_prompt),
    "InstantID": ("COMFYUI_INSTANTID", lambda **values: _face("instantid", **values)),
    "PuLID": ("PULID_COMFYUI", lambda **values: _face("pulid", **values)),
    "KJNodes": ("COMFYUI_KJNODES", _sage),
    "FreeU_V2": (None, _freeu),
    "PerturbedAttentionGuidance": (None, _perturbed),
    "NAGuidance": (None, _normalized),
}
"""By name: the variable of the pack, and what it puts into a MODEL."""


def _image(patches: list[Patch], engine: str | None, lora: bool, control: bool) -> Workflow:
    workflow = SD15.workflow(1, engine, size=64)
    for name in ("decode", "save"):
        del workflow[name]
    model: list[Any] = ["loader", 0]
    if lora:
        file = checkpoint_file("tiny_sd15_lora")
        workflow["lora"] = _node("LoraLoaderModelOnly", model=model, lora_name=file, strength_model=0.7)
        model = ["lora", 0]
    for number, patch in enumerate(patches):
        names = {name: f"{name}{number}" for name in patch}
        for name, node in patch.items():
            links = {key: [names[v[0]], v[1]] if isinstance(v, list) else v for key, v in node["inputs"].items()}
            workflow[names[name]] = {**node, "inputs": links}
        workflow[names["patch"]]["inputs"]["model"] = model
        model = [names["patch"], 0]
    workflow["sampler" if engine is None else "speedup"]["inputs"]["model"] = model
    if control:
        inputs = {"positive": ["positive", 0], "negative": ["negative", 0], "control_net": ["control", 0]}
        workflow["control"] = _node("ControlNetLoader", control_net_name=checkpoint_file(CONTROL))
        workflow["hint"] = _node("EmptyImage", width=64, height=64, batch_size=1, color=0x884422)
        values = {"image": ["hint", 0], "strength": 0.8, "start_percent": 0.0, "end_percent": 1.0}
        workflow["controlled"] = _node("ControlNetApplyAdvanced", **inputs, **values)
        for number, which in enumerate(("positive", "negative")):
            workflow["sampler"]["inputs"][which] = ["controlled", number]
    return workflow


def _captured(server: ComfyServer, *patches: Patch, lora: bool = False, control: bool = False) -> int:
    """Return how often something was captured for an image that graphs made, and that is eager's."""
    return _made(server, *patches, lora=lora, control=control)["captured"]


def _made(server: ComfyServer, *patches: Patch, lora: bool = False, control: bool = False) -> dict[str, int]:
    """Return what was made for such an image."""
    expected = latent_of(server.run(_image(list(patches), None, lora, control)))
    counters = Counters(server)
    actual = latent_of(server.run(_image(list(patches), "eager", lora, control)))
    assert_same_picture(actual, expected)
    assert counters.fallbacks == {}
    assert counters.compiled <= counters.captured  # two packs may come to one graph
    return {"captured": counters.captured, "compiled": counters.compiled}


@pytest.fixture(params=KINDS)
def patch(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Callable[..., Patch]:
    """What a pack puts into a MODEL."""
    variable, made = KINDS[request.param]
    if variable is not None and variable not in folders:
        pytest.skip(f"{request.param} cannot be cloned; {variable} may name a folder that has it")
    return made


def _traced(patch: Callable[..., Patch]) -> int:
    """Return how often a change is traced: KJNodes has another function for each, which the same graph calls."""
    return 1 if patch is _sage else 0


@pytest.mark.timeout(1200)
def test_a_pack_is_captured_once(own_server: ComfyServer, patch: Callable[..., Patch]) -> None:
    first = _captured(own_server, patch())
    assert 1 <= first <= 3  # by the noise level: before a side is known, and a graph for each
    changed = [patch(color=2), patch(weight=0.3), patch(weight=1.7), patch(weight=2.5, color=3)]
    traced = _traced(patch)
    for one in changed:
        made = _made(own_server, one)
        assert made["captured"] <= traced and not made["compiled"], made
    assert _captured(own_server, patch(start_at=0.6)) <= 2  # one for a side
    _captured(own_server)  # off
    assert [_captured(own_server, patch()), _captured(own_server)] == [0, 0]
    assert _captured(own_server, patch(), lora=True) == 0
    _captured(own_server, patch(), control=True)
    assert _captured(own_server, patch(weight=0.4, color=2), control=True, lora=True) <= traced


@pytest.mark.timeout(1200)
def test_two_at_once_are_captured_once(own_server: ComfyServer, patch: Callable[..., Patch]) -> None:
    _captured(own_server, patch(), _freeu())
    made = _made(own_server, patch(weight=0.5, color=2), _freeu(weight=1.1))
    assert made["captured"] <= _traced(patch) and not made["compiled"], made

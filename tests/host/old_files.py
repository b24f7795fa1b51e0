"""The workflow files of the earlier OneDiff's repository: which of its nodes each has, and the same written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onediff_comfy.host.legacy.replacements import NOT_REPLACED
from tools.workflows import Workflow

API, EDITOR, PNG = "API", "editor", "PNG"
"""Forms: a JSON file as it is handed in, a JSON file as the editor saves it, a picture with the latter in it."""

_NODES, _IMAGES, _DOCS = (f"onediff_comfy_nodes/{name}" for name in ("workflows", "comfyui_workflow_images", "docs"))
_BENCHMARKS, _TESTS = "onediff_comfy_nodes/benchmarks/resources/workflows", "tests/comfyui/workflows"
_CHECKPOINT, _CONTROL = "OneDiffCheckpointLoaderSimple", "OneDiffControlNetLoader"
_QUANTIZED = (_CHECKPOINT, "OneDiffModelBooster", "OneDiffOnlineQuantizationBooster")
_SD3 = ("ModelSpeedup", "OneDiffModelBooster", "OneDiffNexfortBooster", "VaeSpeedup")

FILES: Mapping[str, tuple[str, Sequence[str]]] = {
    f"{_BENCHMARKS}/nexfort/sd3_basic.json": (API, _SD3),
    f"{_BENCHMARKS}/oneflow/ComfyUI_IPAdapter_plus/ipadapter_advanced.json": (API, (_CHECKPOINT,)),
    f"{_BENCHMARKS}/oneflow/ComfyUI_InstantID/instantid_posed_speedup.json": (API, (_CHECKPOINT,)),
    f"{_BENCHMARKS}/oneflow/PuLID_ComfyUI/PuLID_4-Step_lightning.json": (API, (_CHECKPOINT,)),
    f"{_BENCHMARKS}/oneflow/PuLID_ComfyUI/PuLID_IPAdapter_style_transfer.json": (API, (_CHECKPOINT,)),
    f"{_BENCHMARKS}/oneflow/lora_multiple_speedup.json": (API, (_CHECKPOINT,)),
    f"{_BENCHMARKS}/oneflow/lora_speedup.json": (API, (_CHECKPOINT,)),
    f"{_BENCHMARKS}/oneflow/sdxl-control-lora-speedup.json": (API, (_CONTROL,)),
    f"{_BENCHMARKS}/oneflow/txt2img.json": (API, (_CHECKPOINT,)),
    f"{_NODES}/sd15-onediff.json": (API, (_CHECKPOINT,)),
    f"{_NODES}/sd15-quant.json": (API, _QUANTIZED),
    f"{_NODES}/sdxl-onediff.json": (API, (_CHECKPOINT,)),
    f"{_NODES}/sdxl-quant.json": (API, _QUANTIZED),
    f"{_TESTS}/sdxl-control-lora-speedup.json": (EDITOR, (_CONTROL,)),
    f"{_TESTS}/sdxl-unet-speedup-graph-saver.json": (EDITOR, ("ModelGraphSaver", "ModelSpeedup")),
    f"{_TESTS}/text-to-video-speedup.json": (EDITOR, ("SVDSpeedup",)),
    f"{_BENCHMARKS}/nexfort/sd3_basic.png": (PNG, _SD3),
    f"{_IMAGES}/sd15-onediff.png": (PNG, (_CHECKPOINT,)),
    f"{_IMAGES}/sd15-quant.png": (PNG, _QUANTIZED),
    f"{_IMAGES}/sdxl-onediff.png": (PNG, (_CHECKPOINT,)),
    f"{_IMAGES}/sdxl-quant.png": (PNG, _QUANTIZED),
    f"{_DOCS}/ControlNet/controlnet_onediff.png": (PNG, (_CHECKPOINT, _CONTROL)),
    f"{_DOCS}/ControlNet/controlnet_onediff_quant.png": (PNG, (_CONTROL, "OneDiffQuantCheckpointLoaderSimple")),
    f"{_DOCS}/ControlNet/mixing_controlnets.png": (PNG, (_CONTROL, "OneDiffQuantCheckpointLoaderSimple")),
    f"{_DOCS}/SVD/text-to-video-speedup.png": (PNG, ("SVDSpeedup",)),
    f"{_DOCS}/lora_deepcache/lora-deepcache.png": (PNG, ("ModuleDeepCacheSpeedup",)),
    f"{_DOCS}/model-speedup.png": (PNG, (_CHECKPOINT,)),
    f"{_DOCS}/model_speedup_basic.png": (PNG, ("ModelSpeedup", "CLIPTextEncodePromptStyle")),
    f"{_NODES}/deep-cache-with-lora.png": (PNG, ("ModuleDeepCacheSpeedup",)),
    f"{_NODES}/deep-cache.png": (PNG, ("ModelSpeedup", "ModuleDeepCacheSpeedup")),
    f"{_NODES}/image-distinction-scanner.png": (PNG, ("ShowImageDiff",)),
    f"{_NODES}/model-speedup-lora.png": (PNG, ("ModelSpeedup",)),
    f"{_NODES}/onediff_quant_base.png": (PNG, ("OneDiffQuantCheckpointLoaderSimple",)),
    f"{_NODES}/svd-deepcache.png": (PNG, ("ModuleDeepCacheSpeedup",)),
    f"{_TESTS}/input/control/sdxl-unet-control-lora-speedup.png": (PNG, ("ControlNetSpeedup", "ModelSpeedup")),
}
"""Form and old nodes of each file that has any."""

_MADE = {"model": ("1", 0, "MODEL"), "vae": ("1", 2, "VAE"), "control_net": ("2", 0, "CONTROL_NET")}
_MADE["samples"] = ("3", 0, "LATENT")
_VALUES = {"vae_speedup": "enable"}  # of other fields, the name of a file that nobody has

# Of each old node: what is wired to it, its fields in their order, what it hands on.
_NODES_OF_THAT_TIME: Mapping[str, tuple[Sequence[str], Sequence[str], Sequence[str]]] = {
    "ModelSpeedup": (["model"], [], ["MODEL"]),
    "SVDSpeedup": (["model"], [], ["MODEL"]),
    "ModuleDeepCacheSpeedup": (["model"], [], ["MODEL"]),
    "VaeSpeedup": (["vae"], [], ["VAE"]),
    "ControlNetSpeedup": (["control_net"], [], ["CONTROL_NET"]),
    "ModelGraphSaver": (["samples", "model"], ["filename_prefix"], []),
    "OneDiffCheckpointLoaderSimple": ([], ["ckpt_name", "vae_speedup"], ["MODEL", "CLIP", "VAE"]),
    "OneDiffQuantCheckpointLoaderSimple": ([], ["ckpt_name", "vae_speedup"], ["MODEL", "CLIP", "VAE"]),
    "OneDiffControlNetLoader": ([], ["control_net_name"], ["CONTROL_NET"]),
    "OneDiffModelBooster": ([], [], []),
    "OneDiffNexfortBooster": ([], [], []),
    "OneDiffOnlineQuantizationBooster": ([], [], []),
    "ShowImageDiff": ([], [], []),
}


def with_nodes(old: Sequence[str]) -> Workflow:
    """A workflow, in the API's form, with old nodes: each wired to what it takes, and to something that takes from it.

    Nodes that are not replaced are left out: the editor shows them as missing.
    """
    workflow: Workflow = {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "any.safetensors"}, "_meta": {}},
        "2": {"class_type": "ControlNetLoader", "inputs": {"control_net_name": "any.safetensors"}, "_meta": {}},
        "3": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}, "_meta": {}},
    }
    for name in (name for name in old if name not in NOT_REPLACED):
        wires, fields, outputs = _NODES_OF_THAT_TIME[name]
        inputs: dict[str, Any] = {given: list(_MADE[given][:2]) for given in wires}
        inputs |= {given: _VALUES.get(given, "any.safetensors") for given in fields}
        node = str(len(workflow) + 1)
        workflow[node] = {"class_type": name, "inputs": inputs, "_meta": {}}
        for number in range(len(outputs)):
            shown = str(len(workflow) + 1)
            workflow[shown] = {"class_type": "PreviewAny", "inputs": {"source": [node, number]}, "_meta": {}}
    return workflow


def node_types(old: Sequence[str]) -> dict[str, Any]:
    """What the host of that time said of old nodes, as far as ``with_nodes`` uses them."""
    types: dict[str, Any] = {}
    for name in (name for name in old if name not in NOT_REPLACED):
        wires, fields, outputs = _NODES_OF_THAT_TIME[name]
        declared = {given: [_MADE[given][2], {}] for given in wires} | {given: ["STRING", {}] for given in fields}
        types[name] = {"input": {"required": declared}, "output": outputs, "output_name": outputs}
    return types


def wires_of(workflow: Workflow) -> dict[str, list[list[Any]]]:
    """What is wired to each node, whatever the inputs are called."""
    wired = {
        name: [value for value in node["inputs"].values() if isinstance(value, list)] for name, node in workflow.items()
    }
    return {name: sorted(values) for name, values in wired.items()}

"""The workflow files of the earlier OneDiff's repository: which of its nodes each has, and the same written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onediff_comfy.host.legacy.replacements import REPLACEMENTS
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
_KINDS = ("MODEL", "CLIP", "VAE")


def with_nodes(old: Sequence[str]) -> Workflow:
    """A workflow, in the API's form, with old nodes: each wired to what it takes, and to something that takes from it.

    Of the outputs that are to be carried over each is shown.
    """
    workflow: Workflow = {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "any.safetensors"}, "_meta": {}},
        "2": {"class_type": "ControlNetLoader", "inputs": {"control_net_name": "any.safetensors"}, "_meta": {}},
        "3": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}, "_meta": {}},
    }
    for name in old:
        known = _known(name)
        if known is None:
            continue
        inputs: dict[str, Any] = {
            given: list(_MADE[given][:2]) if given in _MADE else _VALUES.get(given, "any.safetensors")
            for given in (*known.inputs.values(), *(field for field in known.widgets if field not in _MADE))
        }
        node = str(len(workflow) + 1)
        workflow[node] = {"class_type": name, "inputs": inputs, "_meta": {}}
        for output in known.outputs:
            shown = str(len(workflow) + 1)
            workflow[shown] = {"class_type": "PreviewAny", "inputs": {"source": [node, output]}, "_meta": {}}
    return workflow


def node_types(old: Sequence[str]) -> dict[str, Any]:
    """What the host of that time said of old nodes, as far as ``with_nodes`` uses them."""
    types: dict[str, Any] = {}
    for name in filter(_known, old):
        known = _known(name)
        assert known is not None
        wires = {given: [_MADE[given][2], {}] for given in known.inputs.values() if given in _MADE}
        outputs = [_KINDS[number] if len(known.outputs) > 1 else _kind(known) for number in known.outputs]
        fields = {given: ["STRING", {}] for given in known.widgets}
        types[name] = {"input": {"required": {**wires, **fields}}, "output": outputs, "output_name": outputs}
    return types


def _kind(known: Any) -> str:
    return next((_MADE[given][2] for given in known.inputs.values() if given in _MADE), "CONTROL_NET")


def _known(name: str) -> Any:
    return next((known for known in REPLACEMENTS if known.old == name), None)

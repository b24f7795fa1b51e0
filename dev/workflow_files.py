"""The workflows in ``workflows/``: written here, in the editor's form and in the API's.

    python -m dev.workflow_files     # writes them, with a ComfyUI to ask about node types

The API form is what the tests run; the editor's form is made from it with what the host says of
each node, so that the two cannot drift apart.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .environment import comfyui_path, repository
from .host import ComfyServer
from .workflows import Workflow, text_to_image

_CHECKPOINT = "sd_xl_base_1.0.safetensors"
_CONTROL = "diffusers_xl_canny_full.safetensors"
# Columns from left to right, so that wires run one way.
_COLUMNS = (
    ("CheckpointLoaderSimple", "ControlNetLoader", "LoadImage", "OneDiffShapeBucket"),
    (
        "OneDiffModelSpeedup",
        "OneDiffVAESpeedup",
        "OneDiffLoadCompiledGraph",
        "OneDiffControlNetSpeedup",
        "CLIPTextEncode",
        "EmptyLatentImage",
    ),
    ("OneDiffWarmUp", "ControlNetApplyAdvanced", "VAEEncode", "VAEEncodeForInpaint"),
    ("KSampler", "LatentUpscaleBy"),
    ("VAEDecode", "VAEDecodeTiled", "OneDiffSaveCompiledGraph"),
    ("SaveImage",),
)
_COLUMN_WIDTH, _ROW_HEIGHT = 380, 240
_SEEDS = ("seed", "noise_seed")  # the editor puts "control after generate" behind every field of such a name
# The types whose inputs are fields on the node. Such a field keeps a value while a wire replaces it.
_FIELDS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


def workflows() -> dict[str, Workflow]:
    """Every workflow of the pack by file name, in API form."""
    plain = {"width": 1024, "height": 1024, "steps": 20, "cfg": 7.0, "seed": 1}
    speedup = text_to_image(_CHECKPOINT, engine="auto", **plain)  # type: ignore[arg-type]
    save = text_to_image(_CHECKPOINT, engine="auto", **plain)  # type: ignore[arg-type]
    save["keep"] = {
        "class_type": "OneDiffSaveCompiledGraph",
        # The sampler's output and not the empty latent: saving waits for the first image.
        "inputs": {"model": ["speedup", 0], "filename": "sdxl 1024x1024", "latent": ["sampler", 0]},
    }
    load = text_to_image(_CHECKPOINT, engine=None, **plain)  # type: ignore[arg-type]
    load["load"] = {
        "class_type": "OneDiffLoadCompiledGraph",
        "inputs": {"model": ["loader", 0], "file": "sdxl 1024x1024.graph", "mismatch": "compile"},
    }
    load["sampler"]["inputs"]["model"] = ["load", 0]
    shaped = text_to_image(_CHECKPOINT, engine="auto", **plain)  # type: ignore[arg-type]
    shaped["shape"] = {
        "class_type": "OneDiffShapeBucket",
        "inputs": {
            # Few, because each is prepared; a preset's whole list is a choice away.
            "preset": "custom",
            "buckets": "1024x1024 b1\n832x1216 b1\n1216x832 b1",
            "width": 1000,
            "height": 1400,
            "batch_size": 1,
            "snap": True,
        },
    }
    shaped["warm_up"] = {
        "class_type": "OneDiffWarmUp",
        "inputs": {
            "model": ["speedup", 0],
            "buckets": ["shape", 0],
            "positive": ["positive", 0],
            "negative": ["negative", 0],
        },
    }
    shaped["speedup"]["inputs"]["buckets"] = ["shape", 0]
    shaped["latent"]["inputs"] = {"width": ["shape", 1], "height": ["shape", 2], "batch_size": ["shape", 3]}
    shaped["sampler"]["inputs"]["model"] = ["warm_up", 0]
    controlled = text_to_image(_CHECKPOINT, engine="auto", **plain)  # type: ignore[arg-type]
    controlled |= {
        "net": {"class_type": "ControlNetLoader", "inputs": {"control_net_name": _CONTROL}},
        "hint": {"class_type": "LoadImage", "inputs": {"image": "example.png"}},
        "net_speedup": {
            "class_type": "OneDiffControlNetSpeedup",
            "inputs": {"control_net": ["net", 0], "engine": "auto", "compile": "wait"},
        },
        "apply": {
            "class_type": "ControlNetApplyAdvanced",
            "inputs": {
                "positive": ["positive", 0],
                "negative": ["negative", 0],
                "control_net": ["net_speedup", 0],
                "image": ["hint", 0],
                "strength": 0.7,
                "start_percent": 0.0,
                "end_percent": 0.8,
            },
        },
    }
    controlled["sampler"]["inputs"] |= {"positive": ["apply", 0], "negative": ["apply", 1]}
    return {
        "text_to_image": speedup,
        "save_compiled_graph": save,
        "load_compiled_graph": load,
        "shape_bucket": shaped,
        "controlnet": controlled,
        "image_to_image": _from_image(0.6, "VAEEncode", {}),
        "inpaint": _from_image(1.0, "VAEEncodeForInpaint", {"mask": ["image", 1], "grow_mask_by": 6}),
        "upscale": _upscaled(),
    }


def _with_fast_vae() -> Workflow:
    """Text to image with everything accelerated."""
    workflow = text_to_image(_CHECKPOINT, width=1024, height=1024, steps=20, cfg=7.0, seed=1, engine="auto")
    speedup = {"vae": ["loader", 2], "engine": "auto", "compile": "wait", "decode": True, "encode": True}
    workflow["vae_speedup"] = {"class_type": "OneDiffVAESpeedup", "inputs": speedup}
    workflow["decode"]["inputs"]["vae"] = ["vae_speedup", 0]
    return workflow


def _from_image(denoise: float, encoder: str, values: Mapping[str, Any]) -> Workflow:
    """An image, encoded by ``encoder`` and sampled again from a part of its noise."""
    workflow = _with_fast_vae()
    workflow["image"] = {"class_type": "LoadImage", "inputs": {"image": "example.png"}}
    pixels = {"pixels": ["image", 0], "vae": ["vae_speedup", 0]}
    workflow["latent"] = {"class_type": encoder, "inputs": {**pixels, **values}}
    workflow["sampler"]["inputs"]["denoise"] = denoise
    return workflow


def _upscaled() -> Workflow:
    """An image sampled once more at twice its size, and decoded in tiles."""
    workflow = _with_fast_vae()
    larger = {"samples": ["sampler", 0], "upscale_method": "bislerp", "scale_by": 2.0}
    workflow["larger"] = {"class_type": "LatentUpscaleBy", "inputs": larger}
    again = {**workflow["sampler"]["inputs"], "latent_image": ["larger", 0], "denoise": 0.5}
    workflow["second_sampler"] = {"class_type": "KSampler", "inputs": again}
    tiles = {"tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}
    decode = {"samples": ["second_sampler", 0], "vae": ["vae_speedup", 0], **tiles}
    workflow["decode"] = {"class_type": "VAEDecodeTiled", "inputs": decode}
    return workflow


def editor_form(workflow: Workflow, node_types: Mapping[str, Any]) -> dict[str, Any]:
    """A workflow as the editor saves it.

    Args:
        workflow: in API form.
        node_types: what the host's ``/object_info`` says.
    """
    numbers = {name: number for number, name in enumerate(workflow, start=1)}
    links: list[list[Any]] = []
    nodes = {name: _node(name, workflow[name], numbers, node_types, links) for name in workflow}
    for link, source, slot, *_ in links:
        node = next(node for node in nodes.values() if node["id"] == source)
        node["outputs"][slot]["links"].append(link)
    _place(nodes)
    return {
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": list(nodes.values()),
        "links": links,
        "groups": [],
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def _node(
    name: str,
    node: Mapping[str, Any],
    numbers: Mapping[str, int],
    node_types: Mapping[str, Any],
    links: list[list[Any]],
) -> dict[str, Any]:
    info = node_types[node["class_type"]]
    declared = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    inputs: list[dict[str, Any]] = []
    values: list[Any] = []
    for input_name, (kind, *options) in declared.items():
        value = node["inputs"].get(input_name)
        if isinstance(value, list):  # a wire: [node, output]
            links.append([len(links) + 1, numbers[value[0]], value[1], numbers[name], len(inputs), kind])
            inputs.append({"name": input_name, "type": kind, "link": len(links)})
            if kind in _FIELDS:
                inputs[-1]["widget"] = {"name": input_name}
                values.append(options[0]["default"])
        elif input_name in node["inputs"]:
            values.append(value)
            if input_name in _SEEDS or (options and options[0].get("control_after_generate")):
                values.append("fixed")  # what the editor does with a seed after each run
        else:
            inputs.append({"name": input_name, "type": kind, "link": None})
    outputs = [
        {"name": label, "type": kind, "links": []}
        for label, kind in zip(info["output_name"], info["output"], strict=True)
    ]
    return {
        "id": numbers[name],
        "type": node["class_type"],
        "pos": [0, 0],
        "size": [320, 60 + 26 * (len(inputs) + len(values))],
        "flags": {},
        "order": numbers[name] - 1,
        "mode": 0,
        "inputs": inputs,
        "outputs": outputs,
        "properties": {"Node name for S&R": node["class_type"]},
        "widgets_values": values,
    }


def _place(nodes: Mapping[str, dict[str, Any]]) -> None:
    columns = [[node for node in nodes.values() if node["type"] in kinds] for kinds in _COLUMNS]
    for column, members in enumerate(filter(None, columns)):
        for row, node in enumerate(members):
            node["pos"] = [40 + column * _COLUMN_WIDTH, 60 + row * _ROW_HEIGHT]


def write(folder: Path, node_types: Mapping[str, Any]) -> None:
    """Write every workflow into ``folder``: ``NAME.json`` for the editor, ``api/NAME.json`` for the API."""
    (folder / "api").mkdir(parents=True, exist_ok=True)
    for name, workflow in workflows().items():
        (folder / f"{name}.json").write_text(_json(editor_form(workflow, node_types)))
        (folder / "api" / f"{name}.json").write_text(_json(workflow))


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def main() -> None:
    """Start a ComfyUI, ask it about its nodes, and write the files."""
    with tempfile.TemporaryDirectory() as base, ComfyServer(comfyui_path(), Path(base), cpu=True) as server:
        write(repository() / "workflows", server.get_json("/object_info"))


if __name__ == "__main__":
    main()

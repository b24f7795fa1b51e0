"""The workflows in ``workflows/``: written here, in the editor's form and in the API's.

    python -m tools.workflow_files     # writes them, with a ComfyUI to ask about node types

The API form is what the tests run; the editor's form is made from it with what the host says of
each node, so that the two cannot drift apart.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dev.environment import comfyui_path, repository
from dev.host import PACK_NAME, ComfyServer

from .templates import TITLES, model_file
from .workflow_layout import place
from .workflows import Workflow, text_to_image

_CHECKPOINT = "sd_xl_base_1.0.safetensors"
_SD15_CHECKPOINT = "v1-5-pruned-emaonly-fp16.safetensors"
_CONTROL = "diffusers_xl_canny_full.safetensors"
_SEEDS = ("seed", "noise_seed")  # the editor puts "control after generate" behind every field of such a name
# The types whose inputs are fields on the node. Such a field keeps a value while a wire replaces it.
_FIELDS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
# The editor's sizes, in its pixels: of every node, and what pictures and texts add that are shown on a node.
_WIDTH = 340
_PICTURE_HEIGHTS = {"LoadImage": 280, "SaveImage": 280, "SaveVideo": 280, "OneDiffReport": 320}
_TITLES = {"positive": "Prompt", "negative": "Negative prompt", "second_sampler": "KSampler at twice the size"}
_OURS = {"color": "#2a4a1d", "bgcolor": "#1e3315"}

NOTES: Mapping[str, str] = {
    "optimize": """## One node, everything faster
1. Choose a checkpoint. 2. Choose a **goal**. 3. Queue.

Another process compiles model, VAE and text encoders, a few minutes, once ever; pictures come meanwhile. \
*exact* makes the same picture; \
*faster* and *fastest* leave out work and change it: queue the same seed with *exact* and compare.""",
    "text_to_image": """## SDXL, faster
1. Choose a checkpoint. 2. Queue.

Another process compiles, two to four minutes, once ever. From then on every size, prompt and LoRA uses the same graph.

Set **compile** to *wait* if the first picture is to be fast already.""",
    "text_to_image_sd15": """## SD 1.5, faster
1. Choose a checkpoint. 2. Queue.

Model and VAE are both accelerated, compiled once ever; other sizes and checkpoints use the same graphs.""",
    "text_to_image_flux": """## Flux, faster
1. Choose the four files: diffusion model, two text encoders, VAE. 2. Queue.

**OneDiff Model Speedup** stands between the loader and everything that takes the MODEL: guider and scheduler.""",
    "lora": """## LoRA, faster
1. Choose checkpoint and LoRA. 2. Queue.

**OneDiff Model Speedup** comes behind the last LoRA. Weights are inputs of a compiled graph, so another LoRA or \
another strength compiles nothing.""",
    "video": """## Wan, text to video, faster
1. Choose the three files. 2. Queue.

It is compiled once ever. The VAE of a video is left to ComfyUI.""",
    "report": """## What served my picture?
1. Choose a checkpoint. 2. Queue. 3. Read the report.

It shows the graphs, how often each was called and how fast it is, and what ran without acceleration and why. Connect \
whatever you want to hear about.""",
    "step_cache": """## Steps without the deep layers
1. Choose a checkpoint. 2. Queue. 3. Bypass **OneDiff Step Cache** (Ctrl+B), queue again and compare.

The picture is not the same as without it. A higher **threshold** is faster and further from it; 0 computes every \
step. The node shows how many calls were reused.""",
    "controlnet": """## ControlNet, faster
1. Choose checkpoint, ControlNet and an image of edges. 2. Queue.

**OneDiff ControlNet Speedup** works for the ControlNet as OneDiff Model Speedup does for the model. Strength and \
range may change freely.""",
    "image_to_image": """## Image to image, faster
1. Choose a checkpoint and an image. 2. Queue.

**OneDiff VAE Speedup** accelerates encoding and decoding. **denoise** of the sampler says how much is painted anew.""",
    "inpaint": """## Inpainting, faster
1. Choose a checkpoint and an image. 2. Right-click the image, *Open in MaskEditor*, paint what is to be replaced. \
3. Queue.""",
    "upscale": """## Twice the size, faster
1. Choose a checkpoint. 2. Queue.

The same graph samples both sizes. The large picture is decoded in tiles, which are accelerated too.""",
    "shape_bucket": """## Sizes with graphs of their own
1. Choose a checkpoint. 2. Write the sizes that you use into **buckets**. 3. Queue.

The sizes get graphs of their own in the background, a few percent faster. **OneDiff Warm Up** prepares them all \
before the first picture.""",
    "save_compiled_graph": """## Keep a compiled graph in a file
1. Choose a checkpoint. 2. Queue.

The file, under *models/onediff_graphs*, has code and no weights. Take it to other machines with the same GPU and \
versions.""",
    "load_compiled_graph": """## Use a compiled graph of another machine
1. Choose a checkpoint and the file. 2. Queue.

A compiled graph is code that runs here: trust the file first, see *docs/trust.md* of the pack.""",
}
"""What the note in each workflow says, in Markdown; by file name."""


def workflows() -> dict[str, Workflow]:
    """Every workflow of the pack by file name, in API form."""
    plain = {"width": 1024, "height": 1024, "steps": 20, "cfg": 7.0, "seed": 1, "compile": "auto"}
    speedup = text_to_image(_CHECKPOINT, engine="auto", **plain)  # type: ignore[arg-type]
    # Saving needs a graph, so the first image waits for it.
    save = text_to_image(_CHECKPOINT, engine="auto", **plain | {"compile": "wait"})  # type: ignore[arg-type]
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
            "inputs": {"control_net": ["net", 0], "engine": "auto", "compile": "auto"},
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
        "optimize": _optimized(),
        "text_to_image": speedup,
        "save_compiled_graph": save,
        "load_compiled_graph": load,
        "shape_bucket": shaped,
        "controlnet": controlled,
        "image_to_image": _from_image(0.6, "VAEEncode", {}),
        "inpaint": _from_image(1.0, "VAEEncodeForInpaint", {"mask": ["image", 1], "grow_mask_by": 6}),
        "upscale": _upscaled(),
        "text_to_image_sd15": _with_fast_vae(_SD15_CHECKPOINT, 512),
        "text_to_image_flux": _flux(),
        "lora": _with_lora(),
        "video": _video(),
        "report": _reported(),
        "step_cache": _with_step_cache(),
    }


def _with_fast_vae(checkpoint: str = _CHECKPOINT, side: int = 1024) -> Workflow:
    """Text to image with model and VAE accelerated."""
    workflow = text_to_image(
        checkpoint, width=side, height=side, steps=20, cfg=7.0, seed=1, engine="auto", compile="auto"
    )
    speedup = {"vae": ["loader", 2], "engine": "auto", "compile": "auto", "decode": True, "encode": True}
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


def _flux() -> Workflow:
    """Text to image with Flux's own files and the nodes that its guidance needs."""
    size = {"width": 1024, "height": 1024, "batch_size": 1}
    return {
        "loader": _of("UNETLoader", unet_name="flux1-dev.safetensors", weight_dtype="default"),
        "clip": _of(
            "DualCLIPLoader",
            clip_name1="clip_l.safetensors",
            clip_name2="t5xxl_fp16.safetensors",
            type="flux",
            device="default",
        ),
        "vae": _of("VAELoader", vae_name="ae.safetensors"),
        "speedup": _of("OneDiffModelSpeedup", model=["loader", 0], engine="auto", compile="auto", cache_budget_mb=0),
        "positive": _of("CLIPTextEncode", clip=["clip", 0], text="a lighthouse on a cliff, evening light"),
        "latent": _of("EmptySD3LatentImage", **size),
        "guidance": _of("FluxGuidance", conditioning=["positive", 0], guidance=3.5),
        "guider": _of("BasicGuider", model=["speedup", 0], conditioning=["guidance", 0]),
        "noise": _of("RandomNoise", noise_seed=1),
        "solver": _of("KSamplerSelect", sampler_name="euler"),
        "steps": _of("BasicScheduler", model=["speedup", 0], scheduler="simple", steps=20, denoise=1.0),
        "sampler": _of(
            "SamplerCustomAdvanced",
            noise=["noise", 0],
            guider=["guider", 0],
            sampler=["solver", 0],
            sigmas=["steps", 0],
            latent_image=["latent", 0],
        ),
        "decode": _of("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "save": _of("SaveImage", images=["decode", 0], filename_prefix="image"),
    }


def _with_lora() -> Workflow:
    """Text to image with a LoRA on model and text encoder, in front of the speedup node."""
    workflow = text_to_image(
        _CHECKPOINT, width=1024, height=1024, steps=20, cfg=7.0, seed=1, engine="auto", compile="auto"
    )
    workflow["lora"] = _of(
        "LoraLoader",
        model=["loader", 0],
        clip=["loader", 1],
        lora_name="sd_xl_offset_example-lora_1.0.safetensors",
        strength_model=0.8,
        strength_clip=0.8,
    )
    workflow["speedup"]["inputs"]["model"] = ["lora", 0]
    for prompt in ("positive", "negative"):
        workflow[prompt]["inputs"]["clip"] = ["lora", 1]
    return workflow


def _video() -> Workflow:
    """Text to video with Wan 2.1."""
    size = {"width": 832, "height": 480, "length": 33, "batch_size": 1}
    sampling = {"steps": 30, "cfg": 6.0, "sampler_name": "uni_pc", "scheduler": "simple", "denoise": 1.0}
    return {
        "loader": _of("UNETLoader", unet_name="wan2.1_t2v_1.3B_fp16.safetensors", weight_dtype="default"),
        "clip": _of("CLIPLoader", clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan", device="default"),
        "vae": _of("VAELoader", vae_name="wan_2.1_vae.safetensors"),
        "shift": _of("ModelSamplingSD3", model=["loader", 0], shift=8.0),
        "speedup": _of("OneDiffModelSpeedup", model=["shift", 0], engine="auto", compile="auto", cache_budget_mb=0),
        "positive": _of("CLIPTextEncode", clip=["clip", 0], text="waves against a lighthouse, evening light"),
        "negative": _of("CLIPTextEncode", clip=["clip", 0], text="static, blurred"),
        "latent": _of("EmptyHunyuanLatentVideo", **size),
        "sampler": _of(
            "KSampler",
            model=["speedup", 0],
            seed=1,
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            **sampling,
        ),
        "decode": _of("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "video": _of("CreateVideo", images=["decode", 0], fps=16.0, bit_depth=8),
        "save": _of("SaveVideo", video=["video", 0], filename_prefix="video/wan", format="auto", codec="auto"),
    }


def _reported() -> Workflow:
    """Text to image with all of it accelerated, and a report of what served it."""
    workflow = _with_fast_vae()
    workflow["clip_speedup"] = _of("OneDiffCLIPSpeedup", clip=["loader", 1], engine="auto", compile="auto")
    for prompt in ("positive", "negative"):
        workflow[prompt]["inputs"]["clip"] = ["clip_speedup", 0]
    workflow["report"] = _of(
        "OneDiffReport",
        model=["speedup", 0],
        vae=["vae_speedup", 0],
        clip=["clip_speedup", 0],
        after=["decode", 0],
    )
    return workflow


def _optimized() -> Workflow:
    """Text to image with model, VAE and text encoders accelerated by one node."""
    workflow = text_to_image(_CHECKPOINT, width=1024, height=1024, steps=30, cfg=7.0, seed=1, engine=None)
    loaded = {"model": ["loader", 0], "clip": ["loader", 1], "vae": ["loader", 2]}
    workflow["optimize"] = _of("OneDiffOptimize", goal="exact", **loaded)
    workflow["sampler"]["inputs"]["model"] = ["optimize", 0]
    workflow["decode"]["inputs"]["vae"] = ["optimize", 1]
    for prompt in ("positive", "negative"):
        workflow[prompt]["inputs"]["clip"] = ["optimize", 2]
    return workflow


def _with_step_cache() -> Workflow:
    """Text to image with enough steps that some take the deep layers' work from earlier ones."""
    workflow = text_to_image(
        _CHECKPOINT, width=1024, height=1024, steps=30, cfg=7.0, seed=1, engine="auto", compile="auto"
    )
    workflow["step_cache"] = _of("OneDiffStepCache", model=["speedup", 0], threshold=0.1)
    workflow["sampler"]["inputs"]["model"] = ["step_cache", 0]
    return workflow


def _of(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def editor_form(workflow: Workflow, node_types: Mapping[str, Any], note: str) -> dict[str, Any]:
    """A workflow as the editor saves it.

    Args:
        workflow: in API form.
        node_types: what the host's ``/object_info`` says.
        note: Markdown that stands beside it, in a node of its own that the API form does not have.
    """
    numbers = {name: number for number, name in enumerate(workflow, start=1)}
    links: list[list[Any]] = []
    nodes = {name: _node(name, workflow[name], numbers, node_types, links) for name in workflow}
    for link, source, slot, *_ in links:
        node = next(node for node in nodes.values() if node["id"] == source)
        node["outputs"][slot]["links"].append(link)
    note_node = _note(len(nodes) + 1, note)
    groups = place(list(nodes.values()), links, note_node)
    return {
        "last_node_id": note_node["id"],
        "last_link_id": len(links),
        "nodes": [*nodes.values(), note_node],
        "links": links,
        "groups": groups,
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def _note(number: int, text: str) -> dict[str, Any]:
    return {
        "id": number,
        "type": "MarkdownNote",
        "title": "What to do",
        "pos": [0, 0],
        "size": [_WIDTH, 180],
        "flags": {},
        "order": number - 1,
        "mode": 0,
        "inputs": [],
        "outputs": [],
        "properties": {},
        "widgets_values": [text],
        "color": "#432",
        "bgcolor": "#000",
    }


def _node(
    name: str,
    node: Mapping[str, Any],
    numbers: Mapping[str, int],
    node_types: Mapping[str, Any],
    links: list[list[Any]],
) -> dict[str, Any]:
    info = node_types[node["class_type"]]
    ours = node["class_type"].startswith("OneDiff")
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
    models = [found for value in node["inputs"].values() if isinstance(value, str) and (found := model_file(value))]
    return {
        "id": numbers[name],
        "type": node["class_type"],
        "pos": [0, 0],
        "size": _size(node["class_type"], declared, inputs, outputs, len(values)),
        "flags": {},
        "order": numbers[name] - 1,
        "mode": 0,
        "inputs": inputs,
        "outputs": outputs,
        "properties": {
            "Node name for S&R": node["class_type"],
            # Where the node is not installed the editor names the pack that has it.
            **({"cnr_id": PACK_NAME} if ours else {}),
            **({"models": models} if models else {}),  # the editor offers to download what is missing
        },
        "widgets_values": values,
        **({"title": _TITLES[name]} if name in _TITLES else {}),
        **(_OURS if ours else {}),
    }


def _size(
    class_type: str,
    declared: Mapping[str, Any],
    inputs: Sequence[Mapping[str, Any]],
    outputs: Sequence[Any],
    fields: int,
) -> list[int]:
    """Width and height of a node's body: at least what the editor needs for its slots and fields."""
    slots = max(sum("widget" not in item for item in inputs), len(outputs))
    texts = sum(bool(options) and options[0].get("multiline", False) for _, *options in declared.values())
    height = 16 + 20 * slots + 26 * fields + 80 * texts + _PICTURE_HEIGHTS.get(class_type, 0)
    return [_WIDTH, height]


def write(folder: Path, node_types: Mapping[str, Any]) -> None:
    """Write every workflow into ``folder``: ``TITLE.json`` for the editor, ``api/NAME.json`` for the API."""
    (folder / "api").mkdir(parents=True, exist_ok=True)
    for name, workflow in workflows().items():
        (folder / f"{TITLES[name]}.json").write_text(_json(editor_form(workflow, node_types, NOTES[name])))
        (folder / "api" / f"{name}.json").write_text(_json(workflow))


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def main() -> None:
    """Start a ComfyUI, ask it about its nodes, and write the files."""
    with tempfile.TemporaryDirectory() as base, ComfyServer(comfyui_path(), Path(base), cpu=True) as server:
        write(repository() / "workflows", server.get_json("/object_info"))


if __name__ == "__main__":
    main()

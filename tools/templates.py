"""What the template browser says of each workflow: a title, the gain that was measured, and where its files are.

ComfyUI's template browser calls a pack's workflow what its file is called, so the title is the file's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.files import read, results_folder

TITLES: Mapping[str, str] = {
    "optimize": "SDXL, everything faster by one node",
    "text_to_image": "SDXL, text to image",
    "text_to_image_sd15": "SD 1.5, text to image",
    "text_to_image_flux": "Flux, text to image",
    "video": "Wan 2.1, text to video",
    "lora": "SDXL, LoRA",
    "controlnet": "SDXL, ControlNet",
    "image_to_image": "SDXL, image to image",
    "inpaint": "SDXL, inpainting",
    "upscale": "SDXL, twice the size",
    "step_cache": "SDXL, steps without deep layers",
    "shape_bucket": "SDXL, sizes prepared ahead",
    "report": "SDXL, what served my picture",
    "save_compiled_graph": "SDXL, a compiled graph into a file",
    "load_compiled_graph": "SDXL, a compiled graph from a file",
}
"""By the name of a workflow. Names of files on every system: letters, digits, spaces, commas, dots."""

_HUGGING_FACE = "https://huggingface.co/"
_SDXL = "stabilityai/stable-diffusion-xl-base-1.0/resolve/main"
_WAN = "Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files"
_ENCODERS = "comfyanonymous/flux_text_encoders/resolve/main"
_SOURCES = {  # the folder under models, and where the file is
    "sd_xl_base_1.0.safetensors": ("checkpoints", _SDXL),
    "sd_xl_offset_example-lora_1.0.safetensors": ("loras", _SDXL),
    "v1-5-pruned-emaonly-fp16.safetensors": (
        "checkpoints",
        "Comfy-Org/stable-diffusion-v1-5-archive/resolve/main",
    ),
    "diffusers_xl_canny_full.safetensors": ("controlnet", "lllyasviel/sd_control_collection/resolve/main"),
    "flux1-dev.safetensors": ("diffusion_models", "black-forest-labs/FLUX.1-dev/resolve/main"),
    "clip_l.safetensors": ("text_encoders", _ENCODERS),
    "t5xxl_fp16.safetensors": ("text_encoders", _ENCODERS),
    "ae.safetensors": ("vae", "Comfy-Org/Lumina_Image_2.0_Repackaged/resolve/main/split_files/vae"),
    "wan2.1_t2v_1.3B_fp16.safetensors": ("diffusion_models", f"{_WAN}/diffusion_models"),
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors": ("text_encoders", f"{_WAN}/text_encoders"),
    "wan_2.1_vae.safetensors": ("vae", f"{_WAN}/vae"),
}


def model_file(name: str) -> dict[str, str] | None:
    """Return where a model's file is and where it belongs, as the editor reads it to offer a download; or None."""
    if name not in _SOURCES:
        return None
    directory, page = _SOURCES[name]
    return {"name": name, "url": f"{_HUGGING_FACE}{page}/{name}", "directory": directory}


@dataclass(frozen=True)
class Gain:
    """What was measured of a workflow's sampler: milliseconds per step without and with the pack, and how."""

    eager_ms: float
    ours_ms: float
    how: str

    def __str__(self) -> str:
        return f"{self.eager_ms / self.ours_ms:.2f}x"


_MEASURED = {  # by how a workflow's title begins: the file of results, and what was sampled
    "SDXL": ("2026-11-22-h200-sdxl-1024.json", "SDXL"),
    "SD 1.5": ("2026-11-23-h200-sd15-512.json", "SD 1.5"),
    "Flux": ("2026-11-23-h200-flux-1024-prompts-on-the-gpu.json", "Flux.1-dev's size"),
}
_OTHER_WORK = ("controlnet", "step_cache", "upscale")  # beside, or instead of, the steps that were measured


def gain_of(workflow: str) -> Gain | None:
    """Return what was measured of the model in a workflow, from its file of results; None where nothing was."""
    found = _MEASURED.get(TITLES[workflow].partition(",")[0])
    if found is None or workflow in _OTHER_WORK:
        return None
    file, model = found
    results = read(results_folder() / file)
    what, environment = results["what"], results["environment"]
    how = f"{model}, {what['size']}, {what['steps']} steps, {environment['gpu']}, random weights"
    eager, ours = (results["variants"][variant]["step_ms"] for variant in ("eager", "onediff-inductor"))
    return Gain(eager, ours, how)

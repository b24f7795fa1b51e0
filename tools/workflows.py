"""Workflows in ComfyUI's API format, built for the tests, the demo and the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Workflow = dict[str, dict[str, Any]]
"""Node id → ``class_type`` and ``inputs``. The ids here are words: loader, speedup, sampler, …"""


def text_to_image(
    checkpoint: str,
    *,
    width: int,
    height: int,
    steps: int,
    cfg: float,
    seed: int,
    batch: int = 1,
    engine: str | None,
    prompt: str = "a lighthouse on a cliff, evening light",
    conditioning: Mapping[str, int] | None = None,
    save_latent: bool = False,
    compile: str = "wait",
    cache_budget_mb: int = 0,
    buckets: str | None = None,
) -> Workflow:
    """Checkpoint → (OneDiff Model Speedup) → KSampler → VAE Decode → Save Image.

    Args:
        checkpoint: a file name in the checkpoints folder.
        width: of the image, in pixels; a multiple of 8.
        height: likewise.
        steps: sampling steps (sampler euler, scheduler normal).
        cfg: classifier-free guidance; at 1.0 the host leaves out the negative prompt.
        seed: of the noise.
        batch: images made at once.
        engine: of the speedup node; None leaves the node out.
        prompt: encoded by the checkpoint's own text encoder; the negative prompt is empty.
        conditioning: in place of a text encoder, the inputs ``tokens``, ``dim`` and ``pooled_dim``
            of the test node TinyConditioning (tests/host/tiny_nodes must be installed). Its seed is
            0 for the positive and 1 for the negative.
        save_latent: also save the sampler's output, unrounded, with the host's SaveLatent.
        compile: of the speedup node: one of ``settings.COMPILE_CHOICES``.
        cache_budget_mb: of the speedup node; 0 is its default share of the memory.
        buckets: lines of sizes for a Shape Bucket node, ``shape``, connected to the speedup node; the
            image's own size stays as given.
    """
    workflow: Workflow = {
        "loader": _node("CheckpointLoaderSimple", ckpt_name=checkpoint),
        "latent": _node("EmptyLatentImage", width=width, height=height, batch_size=batch),
        "sampler": _node(
            "KSampler",
            model=["loader" if engine is None else "speedup", 0],
            seed=seed,
            steps=steps,
            cfg=cfg,
            sampler_name="euler",
            scheduler="normal",
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            denoise=1.0,
        ),
        "decode": _node("VAEDecode", samples=["sampler", 0], vae=["loader", 2]),
        "save": _node("SaveImage", images=["decode", 0], filename_prefix="image"),
    }
    if engine is not None:
        speedup = {"engine": engine, "compile": compile, "cache_budget_mb": cache_budget_mb}
        workflow["speedup"] = _node("OneDiffModelSpeedup", model=["loader", 0], **speedup)
        if buckets is not None:
            size = {"width": width, "height": height, "batch_size": batch, "snap": False}
            workflow["shape"] = _node("OneDiffShapeBucket", preset="custom", buckets=buckets, **size)
            workflow["speedup"]["inputs"]["buckets"] = ["shape", 0]
    for number, (name, text) in enumerate((("positive", prompt), ("negative", ""))):
        if conditioning is None:
            workflow[name] = _node("CLIPTextEncode", clip=["loader", 1], text=text)
        else:
            workflow[name] = _node("TinyConditioning", **{"seed": number, **conditioning})
    if save_latent:
        workflow["save_latent"] = _node("SaveLatent", samples=["sampler", 0], filename_prefix="latent")
    return workflow


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}

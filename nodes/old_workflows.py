"""Nodes that only old workflows have: in place of nodes of the earlier OneDiff that did more than one of ours does."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.legacy.old_nodes import (
    checkpoint_loader,
    control_net_loader,
    diffusion_model_loader,
    handed_on,
    model_files,
    speed_up_only,
)
from ..onediff_comfy.host.legacy.replacements import NOTE
from ..onediff_comfy.host.node_api import io


def _note_input() -> io.String.Input:
    return io.String.Input(
        NOTE,
        default="",
        # On one line, though it is long: fields of several lines stay invisible on a node that was just put in place
        # of another, until the workflow is opened again.
        optional=True,
        tooltip="What the old node did and this one does not, and what to do about it. Double-click to read it all.",
    )


class OneDiffOldCheckpointLoader(io.ComfyNode):
    """Load Checkpoint, OneDiff Model Speedup and OneDiff VAE Speedup in one node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffOldCheckpointLoader",
            display_name="OneDiff Load Checkpoint (old workflow)",
            category="OneDiff/old workflows",
            description=(
                "Loads a checkpoint and makes its model faster, as Load Checkpoint - OneDiff did. In new workflows use "
                "Load Checkpoint and OneDiff Model Speedup, which can be given more."
            ),
            is_deprecated=True,
            enable_expand=True,
            inputs=[
                io.Combo.Input("ckpt_name", options=model_files("checkpoints"), tooltip="The checkpoint to load."),
                io.Combo.Input(
                    "vae_speedup",
                    options=["disable", "enable"],
                    default="disable",
                    tooltip="enable: the VAE is made faster too. disable: it stays as it is.",
                ),
                _note_input(),
            ],
            outputs=[
                io.Model.Output(tooltip="The accelerated model."),
                io.Clip.Output(tooltip="The checkpoint's text encoder, as it is."),
                io.Vae.Output(tooltip="The checkpoint's VAE, accelerated if vae_speedup is enable."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, ckpt_name: str, vae_speedup: str, note: str = "") -> io.NodeOutput:
        outputs, graph = checkpoint_loader(cls.hidden.unique_id, ckpt_name, vae_speedup == "enable", note)
        return io.NodeOutput(*outputs, expand=graph)


class OneDiffOldDiffusionModelLoader(io.ComfyNode):
    """Load Diffusion Model and OneDiff Model Speedup in one node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffOldDiffusionModelLoader",
            display_name="OneDiff Load Diffusion Model (old workflow)",
            category="OneDiff/old workflows",
            description=(
                "Loads a diffusion model and makes it faster. In new workflows use Load Diffusion Model and OneDiff "
                "Model Speedup, which can be given more."
            ),
            is_deprecated=True,
            enable_expand=True,
            inputs=[
                io.Combo.Input("unet_name", options=model_files("diffusion_models"), tooltip="The model to load."),
                _note_input(),
            ],
            outputs=[io.Model.Output(tooltip="The accelerated model.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, unet_name: str, note: str = "") -> io.NodeOutput:
        outputs, graph = diffusion_model_loader(cls.hidden.unique_id, unet_name, note)
        return io.NodeOutput(*outputs, expand=graph)


class OneDiffOldControlNetLoader(io.ComfyNode):
    """Load ControlNet Model and OneDiff ControlNet Speedup in one node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffOldControlNetLoader",
            display_name="OneDiff Load ControlNet (old workflow)",
            category="OneDiff/old workflows",
            description=(
                "Loads a ControlNet and makes it faster. In new workflows use Load ControlNet Model and OneDiff "
                "ControlNet Speedup, which can be given more."
            ),
            is_deprecated=True,
            enable_expand=True,
            inputs=[
                io.Combo.Input(
                    "control_net_name", options=model_files("controlnet"), tooltip="The ControlNet to load."
                ),
            ],
            outputs=[io.ControlNet.Output(tooltip="The accelerated ControlNet.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, control_net_name: str) -> io.NodeOutput:
        outputs, graph = control_net_loader(cls.hidden.unique_id, control_net_name)
        return io.NodeOutput(*outputs, expand=graph)


class OneDiffOldModelSpeedup(io.ComfyNode):
    """OneDiff Model Speedup, and what the old node did besides is said on it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffOldModelSpeedup",
            display_name="OneDiff Model Speedup (old workflow)",
            category="OneDiff/old workflows",
            description=(
                "Makes a model faster, without what the old node did besides, which the note names. In new workflows "
                "use OneDiff Model Speedup."
            ),
            is_deprecated=True,
            inputs=[io.Model.Input("model", tooltip="The model to make faster. A copy comes out."), _note_input()],
            outputs=[io.Model.Output(tooltip="The accelerated model.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: Any, note: str = "") -> io.NodeOutput:
        return io.NodeOutput(speed_up_only(model, note, cls.hidden.unique_id))


class OneDiffOldNode(io.ComfyNode):
    """A node of the earlier OneDiff that has no counterpart: says so, and hands on what it gets."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffOldNode",
            display_name="OneDiff: not done any more (old workflow)",
            category="OneDiff/old workflows",
            description="Stands where a node of the earlier OneDiff was that has no counterpart. The note says more.",
            is_deprecated=True,
            inputs=[
                _note_input(),
                io.AnyType.Input("passed", optional=True, tooltip="Handed on as it is."),
            ],
            outputs=[io.AnyType.Output(display_name="passed", tooltip="What came in, as it is.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, note: str = "", passed: Any = None) -> io.NodeOutput:
        return io.NodeOutput(handed_on(note, passed, cls.hidden.unique_id))

"""OneDiff Save Compiled Graph and OneDiff Load Compiled Graph."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.actions import load_compiled, save_compiled, saved_files
from ..onediff_comfy.host.node_api import io, ui


class OneDiffSaveCompiledGraph(io.ComfyNode):
    """The compiled graphs of accelerated objects as one file to share."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffSaveCompiledGraph",
            display_name="OneDiff Save Compiled Graph",
            category="OneDiff",
            description=(
                "Writes the compiled graphs of an accelerated model, VAE, CLIP or ControlNet, or of several of them, "
                "into one file under models/onediff_graphs, for other machines or as a backup. On this machine nothing "
                "needs saving: compiled graphs are kept and found again by themselves. The file holds code, no weights."
            ),
            search_aliases=["save compiled", "export graph", "tensorrt engine", "保存"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", optional=True, tooltip="A model that went through OneDiff Model Speedup."),
                io.String.Input(
                    "filename",
                    default="compiled_graph",
                    tooltip="Name of the file under models/onediff_graphs. A file of that name is replaced.",
                ),
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip=(
                        "Connect the sampler's output to save after its image. Or connect an empty latent, and the "
                        "conditioning if there is a model, to compile for that size now."
                    ),
                ),
                io.Conditioning.Input(
                    "positive", optional=True, tooltip="Needed only to compile a model for a latent here."
                ),
                io.Conditioning.Input(
                    "negative",
                    optional=True,
                    tooltip="Needed only to compile here; leave it out for models that are sampled at cfg 1.",
                ),
                io.Vae.Input("vae", optional=True, tooltip="A VAE that went through OneDiff VAE Speedup."),
                io.Clip.Input("clip", optional=True, tooltip="A CLIP that went through OneDiff CLIP Speedup."),
                io.ControlNet.Input(
                    "control_net", optional=True, tooltip="A ControlNet that went through OneDiff ControlNet Speedup."
                ),
                io.AnyType.Input(
                    "after",
                    optional=True,
                    tooltip=(
                        "What saving waits for: connect the finished image, so that everything it needed is compiled "
                        "by then. It is not looked at."
                    ),
                ),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="Where the file is.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        filename: str,
        model: Any = None,
        latent: Any = None,
        positive: Any = None,
        negative: Any = None,
        vae: Any = None,
        clip: Any = None,
        control_net: Any = None,
        after: Any = None,
    ) -> io.NodeOutput:
        things = {"model": model, "vae": vae, "clip": clip, "control_net": control_net}
        path, inside = save_compiled(things, filename, latent, positive, negative, cls.hidden.unique_id)
        return io.NodeOutput(path, ui=ui.PreviewText(inside))


class OneDiffLoadCompiledGraph(io.ComfyNode):
    """Objects accelerated by graphs that were compiled elsewhere or earlier."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffLoadCompiledGraph",
            display_name="OneDiff Load Compiled Graph",
            category="OneDiff",
            description=(
                "Accelerates a model, VAE, CLIP or ControlNet, or several of them, with compiled graphs from a file, "
                "so that the first image needs no compiling. Everything in the file is checked before it is used."
            ),
            search_aliases=["load compiled", "import graph", "tensorrt engine", "加载"],
            is_output_node=False,
            inputs=[
                io.Model.Input(
                    "model", optional=True, tooltip="The model to accelerate; of the architecture that was compiled."
                ),
                io.Combo.Input(
                    "file",
                    options=saved_files(),
                    tooltip="A file under models/onediff_graphs. Press R to see files that were added just now.",
                ),
                io.Combo.Input(
                    "mismatch",
                    options=["compile", "strict"],
                    default="compile",
                    tooltip=(
                        "What to do with a graph that was compiled for another GPU, dtype, architecture or other "
                        "versions. compile: say so and compile again on first use. strict: stop with an error."
                    ),
                ),
                io.Vae.Input(
                    "vae",
                    optional=True,
                    tooltip="The VAE to accelerate; of the architecture, and in the dtype, that was compiled.",
                ),
                io.Clip.Input("clip", optional=True, tooltip="The CLIP to accelerate."),
                io.ControlNet.Input("control_net", optional=True, tooltip="The ControlNet to accelerate."),
            ],
            outputs=[
                io.Model.Output(tooltip="The accelerated model. Connect it to the sampler."),
                io.Vae.Output(tooltip="The accelerated VAE. Connect it to whatever decodes or encodes."),
                io.Clip.Output(tooltip="The accelerated CLIP. Connect it to CLIP Text Encode."),
                io.ControlNet.Output(tooltip="The accelerated ControlNet. Connect it to Apply ControlNet."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, file: str, mismatch: str, model: Any = None, vae: Any = None, clip: Any = None, control_net: Any = None
    ) -> io.NodeOutput:
        things = {"model": model, "vae": vae, "clip": clip, "control_net": control_net}
        loaded, inside = load_compiled(things, file, mismatch == "strict", cls.hidden.unique_id)
        return io.NodeOutput(*(loaded[kind] for kind in things), ui=ui.PreviewText(inside))

"""OneDiff Save Compiled Graph and OneDiff Load Compiled Graph."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.actions import load_compiled, save_compiled, saved_files
from ..onediff_comfy.host.node_api import io, ui


class OneDiffSaveCompiledGraph(io.ComfyNode):
    """The compiled graphs of an accelerated MODEL as one file to share."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffSaveCompiledGraph",
            display_name="OneDiff Save Compiled Graph",
            category="OneDiff",
            description=(
                "Writes the compiled graphs of an accelerated model into one file under models/onediff_graphs, for "
                "other machines or as a backup. On this machine nothing needs saving: compiled graphs are kept and "
                "found again by themselves. The file holds code, no weights."
            ),
            search_aliases=["save compiled", "export graph", "tensorrt engine", "保存"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="A model that went through OneDiff Model Speedup."),
                io.String.Input(
                    "filename",
                    default="compiled_graph",
                    tooltip="Name of the file under models/onediff_graphs. A file of that name is replaced.",
                ),
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip=(
                        "Connect the sampler's output to save after its image. Or connect an empty latent and the "
                        "conditioning, to compile for that size now."
                    ),
                ),
                io.Conditioning.Input("positive", optional=True, tooltip="Needed only to compile for a latent here."),
                io.Conditioning.Input(
                    "negative",
                    optional=True,
                    tooltip="Needed only to compile here; leave it out for models that are sampled at cfg 1.",
                ),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="Where the file is.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, model: Any, filename: str, latent: Any = None, positive: Any = None, negative: Any = None
    ) -> io.NodeOutput:
        path, inside = save_compiled(model, filename, latent, positive, negative, cls.hidden.unique_id)
        return io.NodeOutput(path, ui=ui.PreviewText(inside))


class OneDiffLoadCompiledGraph(io.ComfyNode):
    """A MODEL accelerated by graphs that were compiled elsewhere or earlier."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffLoadCompiledGraph",
            display_name="OneDiff Load Compiled Graph",
            category="OneDiff",
            description=(
                "Accelerates a model with compiled graphs from a file, so that its first image needs no compiling. "
                "Everything in the file is checked before it is used."
            ),
            search_aliases=["load compiled", "import graph", "tensorrt engine", "加载"],
            is_output_node=False,
            inputs=[
                io.Model.Input("model", tooltip="The model to accelerate; of the architecture that was compiled."),
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
                        "What to do with a graph that was compiled for another GPU or other versions. compile: say so "
                        "and compile again on first use. strict: stop with an error."
                    ),
                ),
            ],
            outputs=[io.Model.Output(tooltip="The accelerated model. Connect it to the sampler.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: Any, file: str, mismatch: str) -> io.NodeOutput:
        loaded, inside = load_compiled(model, file, mismatch == "strict", cls.hidden.unique_id)
        return io.NodeOutput(loaded, ui=ui.PreviewText(inside))

"""OneDiff Report."""

from __future__ import annotations

import json
from typing import Any

from ..onediff_comfy.host.actions import report
from ..onediff_comfy.host.node_api import io, ui


class OneDiffReport(io.ComfyNode):
    """What served the calls of accelerated objects, and what ran without acceleration and why."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffReport",
            display_name="OneDiff Report",
            category="OneDiff",
            description=(
                "Shows what served the calls of whatever you connect: which compiled graphs, how many calls, how long "
                "they ran and took to compile or load, and which calls ran without acceleration and why. Connect what "
                "comes out of a OneDiff speedup node, and the finished image to after. With nothing connected it "
                "tells about everything in this process."
            ),
            search_aliases=["statistics", "profile", "benchmark", "why slow", "debug", "报告"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", optional=True, tooltip="From OneDiff Model Speedup, or behind it."),
                io.Vae.Input("vae", optional=True, tooltip="From OneDiff VAE Speedup."),
                io.Clip.Input("clip", optional=True, tooltip="From OneDiff CLIP Speedup."),
                io.ControlNet.Input("control_net", optional=True, tooltip="From OneDiff ControlNet Speedup."),
                io.AnyType.Input(
                    "after",
                    optional=True,
                    tooltip=(
                        "What the report waits for: connect the image or the latent whose making it is to tell about. "
                        "It is not looked at. Without it the report may run before the sampler."
                    ),
                ),
            ],
            outputs=[
                io.String.Output(display_name="text", tooltip="The report for people, as the node shows it."),
                io.String.Output(display_name="json", tooltip="The report for programs: all figures, as JSON."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **_inputs: Any) -> float:
        # Its figures grow though its inputs stay the same. A number that equals nothing has the host run it each time.
        return float("nan")

    @classmethod
    def execute(
        cls, model: Any = None, vae: Any = None, clip: Any = None, control_net: Any = None, after: Any = None
    ) -> io.NodeOutput:
        things = {"model": model, "vae": vae, "clip": clip, "control_net": control_net}
        text, found, picture = report(things, cls.hidden.unique_id)
        shown = {} if picture is None else ui.PreviewImage(picture, cls=cls).as_dict()
        return io.NodeOutput(text, json.dumps(found), ui={**shown, "text": (text,), "report": (found,)})

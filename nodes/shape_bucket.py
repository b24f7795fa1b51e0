"""OneDiff Shape Bucket."""

from __future__ import annotations

from typing import Any

from ..onediff_comfy.host.actions import bucket_names, bucket_problem, shape_bucket
from ..onediff_comfy.host.node_api import io, ui

Buckets = io.Custom("ONEDIFF_BUCKETS")
"""The wire type of a list of buckets."""


class OneDiffShapeBucket(io.ComfyNode):
    """Sizes to prepare graphs for, and the one of them that is nearest to what is wished for."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OneDiffShapeBucket",
            display_name="OneDiff Shape Bucket",
            category="OneDiff",
            description=(
                "A list of sizes that graphs are made for, and the nearest of them to the size you ask for. Connect "
                "width, height and batch_size to the empty latent. The node shows which bucket was chosen."
            ),
            search_aliases=["resolution", "aspect ratio", "size preset", "bucket", "分辨率"],
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=bucket_names(),
                    default="SDXL",
                    tooltip="The usual sizes of a model family. custom: the list below.",
                ),
                io.String.Input(
                    "buckets",
                    default="1024x1024 b1\n832x1216 b1-4  # batches of 1 to 4",
                    multiline=True,
                    tooltip=(
                        "Your own list, used only while preset is custom; with a preset chosen it is ignored. One per "
                        "line: width x height, then b and the batch sizes (b1 if left out), then for video f and the "
                        "frames, such as 832x480 b1 f81. # starts a comment."
                    ),
                ),
                io.Int.Input("width", default=1024, min=16, max=16384, tooltip="The width you wish for, in pixels."),
                io.Int.Input("height", default=1024, min=16, max=16384, tooltip="The height you wish for, in pixels."),
                io.Int.Input("batch_size", default=1, min=1, max=4096, tooltip="How many images at once."),
                io.Boolean.Input(
                    "snap",
                    default=True,
                    tooltip=(
                        "On: the nearest bucket comes out, first by aspect ratio, then by area, with its nearest batch "
                        "size. Off: what you typed comes out; outside all buckets it runs on the general graph."
                    ),
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="Only to check that the model takes these sizes. It is not changed and not loaded.",
                ),
            ],
            outputs=[
                Buckets.Output(display_name="buckets", tooltip="For OneDiff Model Speedup and OneDiff Warm Up."),
                io.Int.Output(display_name="width", tooltip="For the empty latent, in pixels."),
                io.Int.Output(display_name="height", tooltip="For the empty latent, in pixels."),
                io.Int.Output(display_name="batch_size", tooltip="For the empty latent."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, preset: str | None, buckets: str | None, model: Any = False) -> bool | str:
        # The host gives None for what comes over a wire and is not known yet.
        if preset is None or buckets is None:
            return True
        return bucket_problem(preset, buckets, with_model=model is None) or True

    @classmethod
    def execute(
        cls, preset: str, buckets: str, width: int, height: int, batch_size: int, snap: bool, model: Any = None
    ) -> io.NodeOutput:
        *outputs, chosen = shape_bucket(preset, buckets, width, height, batch_size, snap, model, cls.hidden.unique_id)
        return io.NodeOutput(*outputs, ui=ui.PreviewText(chosen))

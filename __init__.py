"""onediff-comfy: drag "OneDiff Model Speedup" in front of the sampler; every image from then on is faster."""

from __future__ import annotations

from .nodes.clip_speedup import OneDiffCLIPSpeedup
from .nodes.compiled_graph import OneDiffLoadCompiledGraph, OneDiffSaveCompiledGraph
from .nodes.controlnet_speedup import OneDiffControlNetSpeedup
from .nodes.model_speedup import OneDiffModelSpeedup
from .nodes.old_workflows import (
    OneDiffOldCheckpointLoader,
    OneDiffOldControlNetLoader,
    OneDiffOldDiffusionModelLoader,
    OneDiffOldModelSpeedup,
    OneDiffOldNode,
)
from .nodes.optimize import OneDiffOptimize
from .nodes.report import OneDiffReport
from .nodes.shape_bucket import OneDiffShapeBucket
from .nodes.step_cache import OneDiffStepCache
from .nodes.vae_speedup import OneDiffVAESpeedup
from .nodes.warm_up import OneDiffWarmUp
from .onediff_comfy.host.compatibility import host_changes
from .onediff_comfy.host.legacy.replacements import register_replacements
from .onediff_comfy.host.node_api import ComfyExtension, io
from .onediff_comfy.host.preparation.first_prompt import prepare_when_idle
from .onediff_comfy.host.process.host_code import take_early
from .onediff_comfy.host.routes import add_routes
from .onediff_comfy.host.settings_file import use_cache_settings

WEB_DIRECTORY = "./web"  # help pages of the nodes, and what they show in the editor


class OneDiffExtension(ComfyExtension):
    async def on_load(self) -> None:
        use_cache_settings()  # before anything looks for a graph
        take_early()
        host_changes()  # what has changed is said when the host starts
        add_routes()
        await register_replacements()
        prepare_when_idle()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            OneDiffOptimize,  # first in the menu: what most people need
            OneDiffModelSpeedup,
            OneDiffVAESpeedup,
            OneDiffControlNetSpeedup,
            OneDiffCLIPSpeedup,
            OneDiffStepCache,
            OneDiffSaveCompiledGraph,
            OneDiffLoadCompiledGraph,
            OneDiffShapeBucket,
            OneDiffWarmUp,
            OneDiffReport,
            OneDiffOldCheckpointLoader,
            OneDiffOldDiffusionModelLoader,
            OneDiffOldControlNetLoader,
            OneDiffOldModelSpeedup,
            OneDiffOldNode,
        ]


async def comfy_entrypoint() -> OneDiffExtension:
    return OneDiffExtension()

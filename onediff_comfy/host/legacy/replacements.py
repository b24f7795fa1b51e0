"""What the nodes of the earlier OneDiff (its ``onediff_comfy_nodes``) become, so that its workflows open and run.

ComfyUI replaces nodes that are not installed: in a workflow that is handed in by itself, in the editor when the
person agrees. Whoever still has the earlier OneDiff installed keeps its nodes.

What the host's replacement cannot do shapes this table:

* It puts one node in place of one. A loader that also compiled becomes a loader of ours that does both, rather than
  ComfyUI's own: pictures would come out right, slower than before, and nobody would say so.
* It stops with an error at an old input that is not there. So only inputs are carried over that each generation of
  the old node required. (``control_net`` was optional for a while, beside stacks of ControlNets. It is carried over all
  the same: without it there is nothing to make faster.)
* The editor takes the values of fields by their position. It carries a wire's far end over only for outputs that are
  named; in workflows that are handed in, naming them can fail (see ``register_replacements``).
* A workflow with one unknown node does not run at all, even where nothing is connected to that node. So what has no
  counterpart becomes ``OneDiffOldNode``, on which is written what is no longer done and what to do instead; it hands
  on what it gets, and stops with these words where it would have to make something. A missing node would name
  itself and no remedy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

NOTE = "note"
"""The input of our nodes for old workflows that holds the text for the person."""


@dataclass(frozen=True)
class Replacement:
    """One old node and what is put in its place.

    Attributes:
        old: id of the old node.
        new: id of the new node.
        changes: what is done in another way, or not at all, for people.
        inputs: old input by new input; wires and values are carried over.
        widgets: the old node's fields in the order in which the editor saved them, as far as they are needed.
        values: values for inputs of the new node that the old one did not have.
        outputs: numbers of the outputs whose wires are carried over; they are the same in both nodes.
        noted: whether the new node shows ``changes`` on itself.
    """

    old: str
    new: str
    changes: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    widgets: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[int, ...] = (0,)
    noted: bool = False

    @property
    def set_values(self) -> Mapping[str, Any]:
        """Return all values that the new node is given."""
        return {**self.values, NOTE: f"{self.changes} (In place of {self.old}.)"} if self.noted else self.values


# The old nodes waited for compiling, and a workflow that saves a graph has one after its first image.
_AUTO = {"engine": "auto", "compile": "wait"}
# A note is seen on one line of a node, as much of it as fits: what matters stands first.
_ITSELF = "Which compiler and which options is decided by itself; boosters are not needed."
_NO_BOOSTER = "Not needed: speedup nodes choose compilers and options by themselves. Delete this node."
_NO_QUANTIZATION = "Not quantized: that was part of OneDiff Enterprise. Images are made in the model's own precision"
_NO_DEEPCACHE = (
    "DeepCache is not done: it left out parts of the model at some steps and changed the image. OneDiff Step Cache "
    "is a node of that kind"
)
_GRAPHS_KEPT = "Not needed: compiled graphs are kept by themselves. OneFlow's graph files cannot be read."


def _no_counterpart(old: str, changes: str, passed: str | None = None, outputs: tuple[int, ...] = (0,)) -> Replacement:
    """Replace ``old`` by ``OneDiffOldNode``, which hands on what came into ``passed``, if anything did."""
    inputs = {} if passed is None else {"passed": passed}
    return Replacement(old, "OneDiffOldNode", changes, inputs, outputs=outputs, noted=True)


def _checkpoint(old: str, changes: str, *more_widgets: str) -> Replacement:
    carried = {"ckpt_name": "ckpt_name", "vae_speedup": "vae_speedup"}
    widgets = ("ckpt_name", *more_widgets, "vae_speedup")
    noted = changes != _ITSELF
    return Replacement(old, "OneDiffOldCheckpointLoader", changes, carried, widgets, outputs=(0, 1, 2), noted=noted)


_MODEL, _VAE, _CONTROL = {"model": "model"}, {"vae": "vae"}, {"control_net": "control_net"}

REPLACEMENTS = (
    # What compiles what is wired to it.
    Replacement("ModelSpeedup", "OneDiffModelSpeedup", _ITSELF, _MODEL, values=_AUTO),
    Replacement("SVDSpeedup", "OneDiffModelSpeedup", _ITSELF, _MODEL, values=_AUTO),
    Replacement("VaeSpeedup", "OneDiffVAESpeedup", _ITSELF, _VAE, values=_AUTO),
    Replacement(
        "ControlnetSpeedup",
        "OneDiffControlNetSpeedup",
        f"{_ITSELF} Stacks of ControlNets are not taken; make each of them faster by itself.",
        _CONTROL,
        values=_AUTO,
    ),
    Replacement("ControlNetSpeedup", "OneDiffControlNetSpeedup", _ITSELF, _CONTROL, values=_AUTO),
    Replacement("ModuleDeepCacheSpeedup", "OneDiffOldModelSpeedup", f"{_NO_DEEPCACHE}.", _MODEL, noted=True),
    Replacement("OneDiffFluxSpeedup", "OneDiffOldModelSpeedup", f"{_NO_QUANTIZATION}.", _MODEL, noted=True),
    # What loads and compiles.
    _checkpoint("OneDiffCheckpointLoaderSimple", _ITSELF),
    _checkpoint("OneDiffDeepCacheCheckpointLoaderSimple", f"{_NO_DEEPCACHE}."),
    _checkpoint("OneDiffQuantCheckpointLoaderSimple", f"{_NO_QUANTIZATION}."),
    _checkpoint("OneDiffQuantCheckpointLoaderSimpleAdvanced", f"{_NO_QUANTIZATION}.", "model_path", "compile"),
    Replacement(
        "OneDiffControlNetLoader",
        "OneDiffOldControlNetLoader",
        _ITSELF,
        {"control_net_name": "control_net_name"},
        ("control_net_name",),
    ),
    Replacement(
        "OneDiffFluxLoader",
        "OneDiffOldDiffusionModelLoader",
        f"{_NO_QUANTIZATION}; ComfyUI's Load Diffusion Model can load them as fp8.",
        {"unet_name": "unet_name"},
        ("unet_name",),
        noted=True,
    ),
    # Graphs in files.
    Replacement(
        "ModelGraphSaver",
        "OneDiffSaveCompiledGraph",
        "The file is saved under models/onediff_graphs, in a format of its own.",
        {"model": "model", "filename": "filename_prefix", "latent": "samples"},
        ("filename_prefix",),
        outputs=(),
    ),
    _no_counterpart("ModelGraphLoader", f"{_GRAPHS_KEPT} The model is handed on.", "model"),
    _no_counterpart("VaeGraphLoader", f"{_GRAPHS_KEPT} The VAE is handed on.", "vae"),
    _no_counterpart("ControlNetGraphLoader", f"{_GRAPHS_KEPT} The ControlNet is handed on.", "control_net"),
    _no_counterpart("VaeGraphSaver", f"{_GRAPHS_KEPT} Delete this node.", outputs=()),
    _no_counterpart("ControlNetGraphSaver", f"{_GRAPHS_KEPT} Delete this node.", outputs=()),
    _no_counterpart(
        "BatchSizePatcher", "Not needed: one graph serves every batch size. The model is handed on.", "model"
    ),
    # How to compile. Nothing reads these settings, and an unknown node would stop the workflow.
    _no_counterpart("OneDiffModelBooster", _NO_BOOSTER, outputs=()),
    _no_counterpart("OneDiffModelOptimizer", _NO_BOOSTER, outputs=()),
    _no_counterpart("OneDiffTorchCompileBooster", _NO_BOOSTER, outputs=()),
    _no_counterpart("OneDiffTorchCompileOptimizer", _NO_BOOSTER, outputs=()),
    _no_counterpart("OneDiffNexfortBooster", _NO_BOOSTER, outputs=()),
    _no_counterpart("OneFlowDeepcacheBooster", f"{_NO_DEEPCACHE}. Delete this node.", outputs=()),
    _no_counterpart("OneFlowDeepcacheOptimizer", f"{_NO_DEEPCACHE}. Delete this node.", outputs=()),
    _no_counterpart("OneDiffOnlineQuantizationBooster", f"{_NO_QUANTIZATION}. Delete this node.", outputs=()),
    _no_counterpart("OneDiffOnlineQuantizationOptimizer", f"{_NO_QUANTIZATION}. Delete this node.", outputs=()),
    # What cannot be had any more.
    _no_counterpart(
        "UNETLoaderInt8",
        "Use Load Diffusion Model with the original model and OneDiff Model Speedup behind it: int8 weights of OneDiff "
        "Enterprise cannot be loaded.",
    ),
    _no_counterpart(
        "QuantKSampler",
        "Use KSampler and VAE Decode in place of this node: quantization is not calibrated here.",
    ),
    _no_counterpart("Quant8Model", "Models are not quantized. Delete this node.", outputs=()),
    _no_counterpart(
        "CompareModel",
        "Not needed: every compiled graph is compared with ComfyUI's own result before it serves. Delete this node; "
        "OneDiff Report tells what served.",
        outputs=(),
    ),
    _no_counterpart("ShowImageDiff", "Use ComfyUI's Compare Images in place of this node.", outputs=()),
)

NOT_REPLACED: Mapping[str, str] = {
    "CLIPTextEncodePromptStyle": "Use two CLIP Text Encode nodes, with the style written into the prompts.",
    "ImageOnlyOneDiffQuantCheckpointLoaderAdvanced": (
        "Use ComfyUI's Image Only Checkpoint Loader with OneDiff Model Speedup behind it. Weights are not quantized."
    ),
}
"""Old nodes with several outputs that nothing of ours makes; ComfyUI shows them as missing. What to do about each."""


async def register_replacements() -> None:
    """Tell the host what to put in place of old nodes; on a host that cannot replace nodes, do nothing."""
    try:
        from comfy_api.latest import ComfyAPI, io

        known = ComfyAPI().node_replacement
    except (ImportError, AttributeError) as error:
        log.debug("this host replaces no nodes: %s", error)
        return

    class OutputsForTheEditor(io.NodeReplace):
        """A replacement that names its outputs to the editor only.

        In a workflow that is handed in they keep their numbers by themselves. Were they named there, the host would
        look for each wire at the node behind it, under a name that is gone if that node was replaced first.
        """

        def as_dict(self) -> dict[str, Any]:
            return {**super().as_dict(), "output_mapping": outputs_of(self.old_node_id)}

    try:
        for replacement in REPLACEMENTS:
            await known.register(OutputsForTheEditor(**as_the_host_wants_it(replacement)))
    except Exception as error:  # old workflows are not worth a pack that does not load
        log.warning("OneDiff: this host does not take our replacements for the earlier OneDiff's nodes: %r", error)


def as_the_host_wants_it(replacement: Replacement) -> dict[str, Any]:
    """Return the arguments of ``comfy_api``'s ``NodeReplace``."""
    carried = [{"new_id": new, "old_id": old} for new, old in replacement.inputs.items()]
    given = [{"new_id": new, "set_value": value} for new, value in replacement.set_values.items()]
    return {
        "new_node_id": replacement.new,
        "old_node_id": replacement.old,
        "old_widget_ids": list(replacement.widgets) or None,
        "input_mapping": [*carried, *given],
    }


def outputs_of(old: str) -> list[dict[str, int]]:
    """Return the outputs whose wires are carried over from the node ``old``, in the editor's form."""
    (replacement,) = (known for known in REPLACEMENTS if known.old == old)
    return [{"new_idx": number, "old_idx": number} for number in replacement.outputs]

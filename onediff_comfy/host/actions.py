"""What the nodes call. The core is imported only after a check that this installation can run it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths

from ..buckets import PRESETS, BucketError  # needs no torch
from ..messages import joined, message
from ..settings import GRAPH_SUFFIX as SUFFIX
from ..settings import GRAPHS_FOLDER
from .compatibility import KINDS, host_changed
from .language import errors_in_their_language, in_their_language
from .preparation.shape_bucket import CUSTOM, FACTOR, choose_size, read_buckets
from .presets import preset_for
from .report.status import forget_parts, status_of
from .versions import why_not

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def speed_up(kind: str, thing: Any, engine: str, node_id: str | None, **chosen: Any) -> Any:
    """Return an accelerated copy of ``thing``; or ``thing`` itself, after a warning, where that cannot be.

    Args:
        kind: a key of ``compatibility.KINDS``.
        thing: the host's object.
        engine: one of ``settings.ENGINE_NAMES``.
        node_id: the node that shows what is going on.
        chosen: what else a person chose on the node, by the names that the kind's ``accelerate`` has for it.
    """
    if _passes_through(KINDS[kind], node_id):
        return thing
    from .adapters.adapter import adapter_of

    return adapter_of(kind).accelerate(thing, engine, node_id, **chosen)


def cache_steps(model: Any, threshold: float, node_id: str | None) -> Any:
    """Return ``model`` with a step cache; or ``model`` itself, after a warning, where it is not accelerated.

    Args:
        model: a ComfyUI MODEL.
        threshold: how much a first block's result may change before all layers are computed again; 0 for never.
        node_id: the node that shows how many calls were reused.
    """
    if _passes_through("MODEL", node_id) or _passes_through("step cache", node_id):
        return model
    from .adapters.model import with_step_cache

    return with_step_cache(model, threshold, node_id)


def optimize(things: Mapping[str, Any], goal: str, node_id: str | None) -> dict[str, Any]:
    """Return accelerated copies of a MODEL, and of a VAE and a CLIP where there are, by one choice for all.

    Args:
        things: by keys of ``compatibility.KINDS``; None for what is not connected, whose output then is empty.
        goal: one of ``settings.GOALS``.
        node_id: the node that shows what is going on, in a line for each of them.
    """
    forget_parts(node_id)
    chosen = preset_for(goal, things["model"])
    made, options = dict(things), {"model": {"precision": chosen.precision}}
    for kind, thing in _connected(things).items():
        made[kind] = speed_up(
            kind, thing, "auto", _part_of(node_id, KINDS[kind]), compile="auto", **options.get(kind, {})
        )
    if chosen.threshold and made["model"] is not things["model"]:
        made["model"] = cache_steps(made["model"], chosen.threshold, _part_of(node_id, "Step Cache"))
    return made | _empty(things)


def _part_of(node_id: str | None, name: str) -> str | None:
    return None if node_id is None else f"{node_id}.{name}"


def _empty(things: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the outputs of all that is not connected give: whoever uses one is told that there is nothing."""
    from comfy_execution.graph_utils import ExecutionBlocker

    texts = {
        kind: message(
            "the output {kind} is empty because nothing is connected to the input {kind}; connect it", kind=kind
        )
        for kind, thing in things.items()
        if thing is None
    }
    return {kind: ExecutionBlocker(in_their_language(text)) for kind, text in texts.items()}


@errors_in_their_language()
def save_compiled(
    things: Mapping[str, Any], name: str, latent: Any, positive: Any, negative: Any, node_id: str | None
) -> tuple[str, str]:
    """Save the compiled graphs of accelerated objects. Return the file's path, and what is inside, for people.

    The node ``node_id`` shows the same.

    Args:
        things: by keys of ``compatibility.KINDS``; None for what is not connected.
        name: of the file.
        latent: a LATENT of the size to compile for, or None.
        positive: CONDITIONING to compile a MODEL with, or None.
        negative: likewise.
        node_id: the node that shows what was saved.

    Raises:
        ValueError: with the words that say what to connect or change.
        RuntimeError: this installation cannot compile at all.
    """
    connected = _connected(things)
    _require("warm-up", "files", *_kinds(connected))
    from .artifacts import save_graphs

    path, inside = save_graphs(connected, name, latent, positive, negative)
    status_of(node_id)(joined("\n", (path, inside)))
    return path, in_their_language(inside)


@errors_in_their_language()
def load_compiled(
    things: Mapping[str, Any], name: str, strict: bool, node_id: str | None
) -> tuple[dict[str, Any], str]:
    """Return accelerated copies of objects with the graphs of a saved file, and what was inside, for people.

    Where this installation cannot compile at all, say so and return all as they are; but not if ``strict``.

    Args:
        things: by keys of ``compatibility.KINDS``; None for what is not connected. The host tells whatever uses the
            output of such a kind that there is none.
        name: of the file.
        strict: make it an error that a graph does not fit.
        node_id: the node that shows what is going on.

    Raises:
        ValueError: the file is missing, damaged, not trusted or, when ``strict``, does not fit.
        RuntimeError: this installation cannot compile at all, and ``strict``.
    """
    connected = _connected(things)
    needed = [*_kinds(connected), "files"]
    if strict:
        _require(*needed)
    elif any(_passes_through(kind, node_id) for kind in needed):
        reason = message("not loaded: {reason}", reason=why_not(*needed))
        return dict(things), in_their_language(reason)
    from .artifacts import load_graphs

    loaded, inside = load_graphs(connected, name, strict, node_id)
    return {**loaded, **_empty(things)}, in_their_language(inside)


def _connected(things: Mapping[str, Any]) -> dict[str, Any]:
    return {kind: thing for kind, thing in things.items() if thing is not None}


def _kinds(things: Mapping[str, Any]) -> list[str]:
    """Return the host's names of the kinds of ``things``; of nothing, what concerns all kinds."""
    return [KINDS[kind] for kind in things] or ["everything"]


def saved_files() -> list[str]:
    """Return the names of the files that can be loaded now; where there is none, what to do, in their place."""
    if host_changed("files") is not None:  # the list is part of a node's schema, and the node is to load
        return []
    add_model_folder()
    found: list[str] = folder_paths.get_filename_list(GRAPHS_FOLDER)
    return found or [in_their_language(message("none yet: use OneDiff Save Compiled Graph"))]


def add_model_folder() -> None:
    """Tell the host about ``models/onediff_graphs``, so that its lists and path settings include it."""
    default = Path(folder_paths.models_dir) / GRAPHS_FOLDER
    folder_paths.add_model_folder_path(GRAPHS_FOLDER, str(default), is_default=True)
    folder_paths.folder_names_and_paths[GRAPHS_FOLDER][1].add(SUFFIX)


def bucket_names() -> list[str]:
    """Return what can be chosen as a list of buckets: presets, and the person's own."""
    return [*PRESETS, CUSTOM]


def bucket_problem(preset: str, text: str, with_model: bool) -> str | None:
    """Return what is wrong with a list of buckets, as far as that is known without the model; None if nothing is.

    Args:
        preset: one of ``bucket_names()``.
        text: the person's own list.
        with_model: sizes are checked against a model later.
    """
    try:
        read_buckets(preset, text, 1 if with_model else FACTOR)
    except BucketError as error:
        return in_their_language(str(error))
    return None


@errors_in_their_language()
def shape_bucket(
    preset: str, text: str, width: int, height: int, batch: int, snap: bool, model: Any, node_id: str | None
) -> tuple[Any, int, int, int, str]:
    """Return a list of buckets, a size for the latent node (width, height, batch), and its bucket, for people.

    The node ``node_id`` shows the same.

    Args:
        preset: one of ``bucket_names()``.
        text: the person's own list.
        width: wished for, in pixels.
        height: likewise.
        batch: wished for.
        snap: go to the nearest bucket.
        model: a MODEL that sizes must suit, or None.
        node_id: the node that shows the choice.

    Raises:
        ValueError: a line of the list cannot be; names it.
    """
    factor = FACTOR
    if model is not None and why_not("MODEL", "warm-up") is None:
        from .preparation.latents import size_factor

        factor = size_factor(model)
    buckets = read_buckets(preset, text, factor)
    width, height, batch, chosen = choose_size(buckets, width, height, batch, snap, factor)
    status_of(node_id)(chosen)
    return buckets, width, height, batch, in_their_language(chosen)


@errors_in_their_language()
def warm_up(
    things: Mapping[str, Any], buckets: Any, positive: Any, negative: Any, node_id: str | None
) -> tuple[str, list[dict[str, Any]]]:
    """Prepare every bucket of an accelerated MODEL, VAE or both. Return a summary for people, and figures of each.

    Where this installation cannot compile at all, that is the summary.

    Args:
        things: "model" and "vae"; None for what is not connected.
        buckets: a ``BucketSet``.
        positive: CONDITIONING for the model, or None.
        negative: likewise.
        node_id: the node that shows how far it is.

    Raises:
        ValueError: nothing is connected, or it is not accelerated, or the model's prompt is missing.
    """
    connected = _connected(things)
    reason = why_not("warm-up", *_kinds(connected))
    if reason is not None:
        summary: str = message("nothing prepared: {reason}", reason=reason)
        status_of(node_id)(summary)
        return in_their_language(summary), []
    from .preparation.warm_up import warm_up_buckets

    summary, prepared = warm_up_buckets(connected, buckets, positive, negative, node_id)
    return in_their_language(summary), prepared


def report(things: Mapping[str, Any], node_id: str | None) -> tuple[str, dict[str, Any], torch.Tensor | None]:
    """Return what served the calls of objects and of the process: as text for people, as JSON data, as a picture.

    The node ``node_id`` shows the same.

    Args:
        things: by keys of ``compatibility.KINDS``; None for what is not connected.
        node_id: the node that shows the report.
    """
    reason = why_not("everything")
    if reason is not None:
        text = in_their_language(message("nothing is accelerated: {reason}", reason=reason))
        status_of(node_id)(text)
        return text, {"objects": [], "reason": reason}, None
    from .report.report import report as report_on
    from .report.report import text_of
    from .report.report_picture import as_image

    found = report_on(_connected(things))
    text = in_their_language(text_of(found))
    status_of(node_id)(text)
    try:
        return text, found, as_image(found)
    except Exception:  # an old Pillow, say: a picture is not worth the report
        log.warning("OneDiff: the report's picture could not be drawn", exc_info=True)
        return text, found, None


def _passes_through(kind: str, node_id: str | None) -> bool:
    """Return True if this installation cannot accelerate such objects at all. Say so on the node and in the log."""
    reason = why_not(kind)
    if reason is None:
        return False
    status_of(node_id)(message("not accelerated: {reason}", reason=reason))
    if host_changed(kind) is None:  # which said so itself
        log.warning("OneDiff: %s; the %s passes through unchanged", reason, kind)
    elif host_changed("everything") is None:
        from .process.process import metrics

        metrics().fell_back(reason)
    return True


def _require(*kinds: str) -> None:
    reason = why_not(*kinds)
    if reason is not None:
        raise RuntimeError(message("OneDiff cannot work here: {reason}. Until then, bypass this node.", reason=reason))

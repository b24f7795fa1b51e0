"""Saving an accelerated MODEL's compiled graphs as one file, and loading such a file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import folder_paths

from ..engines import choose
from ..engines.base import EngineError
from ..files import write_atomically
from ..graphs.dispatch import Dispatcher
from ..graphs.key import compiler
from ..messages import Message, joined, message
from ..settings import GRAPH_SUFFIX as SUFFIX
from ..settings import GRAPHS_FOLDER as FOLDER
from ..store.artifact import Artifact, ArtifactError, pack, unpack
from ..store.trust import Untrusted
from .model import accelerate, find_dispatcher
from .process import library, store
from .rehearsal import rehearse

log = logging.getLogger(__name__)


def save_graphs(
    model: Any, name: str, latent: Any = None, positive: Any = None, negative: Any = None
) -> tuple[str, str]:
    """Write the compiled graphs that serve ``model`` into one file.

    Args:
        model: a MODEL that went through OneDiff Model Speedup.
        name: of the file, without its ending; may name a subfolder.
        latent: sizes to compile for when nothing is compiled yet.
        positive: conditioning to compile with.
        negative: likewise; leave out for a model that is sampled at cfg 1.

    Returns:
        The file's path, and a description of what is inside.

    Raises:
        ValueError: with the words that say what to connect or change.
        OSError: the file could not be written; an older one of that name is as it was.
    """
    path = _path_for(name)
    dispatcher = _dispatcher_of(model)
    if not dispatcher.graph_keys():
        _compile_for(model, latent, positive, negative)
    artifacts = [artifact for key in dispatcher.graph_keys() if (artifact := store().find(key)) is not None]
    if not artifacts:
        reasons = dispatcher.refusals() or [
            message("its engine's graphs are not kept, or the cache folder cannot be written to")
        ]
        raise ValueError(
            message("there is no compiled graph of this model to save: {reasons}.", reasons=joined("; ", reasons))
        )
    write_atomically(path, pack(artifacts))
    log.info("OneDiff: saved %d compiled graph(s) to %s", len(artifacts), path)
    return str(path), describe(artifacts)


def load_graphs(model: Any, name: str, strict: bool, node_id: str | None) -> tuple[Any, str]:
    """An accelerated clone of ``model`` with the compiled graphs of a saved file.

    Args:
        model: any MODEL; one that is accelerated already keeps its engine.
        name: of the file, as ``saved_graphs`` lists it.
        strict: whether a graph that does not fit this machine is an error or is compiled again.
        node_id: the node that shows what is going on.

    Returns:
        The model, and a description of what was in the file.

    Raises:
        ValueError: the file is missing, damaged or not trusted; or, when strict, does not fit.
    """
    found = folder_paths.get_full_path(FOLDER, name)
    if found is None:
        raise ValueError(message("there is no file {name} in models/{folder}", name=name, folder=FOLDER))
    path = Path(found)
    try:
        artifacts = unpack(path.read_bytes())
        for artifact in artifacts:
            artifact.checked_parts()
            store().check(artifact, path)
    except (ArtifactError, Untrusted, OSError) as error:
        raise ValueError(message("{name} was not loaded: {error}", name=name, error=error)) from error
    clone = model if find_dispatcher(model) is not None else accelerate(model, artifacts[0].manifest.engine, node_id)
    if find_dispatcher(clone) is None:
        raise ValueError(
            message(
                "{name} was not loaded: a {kind} has no diffusion model to accelerate",
                name=name,
                kind=type(model).__qualname__,
            )
        )
    device = model.load_device
    for artifact in artifacts:
        problem = _other_architecture(artifact, model) or mismatch(artifact, device)
        if problem is None:
            _adopt(artifact, name)
        elif strict:
            raise ValueError(message("{name} does not fit: {problem}", name=name, problem=problem))
        else:
            log.warning(
                "OneDiff: %s: %s; it will be compiled again on first use (choose strict to stop)", name, problem
            )
    return clone, describe(artifacts)


def _adopt(artifact: Artifact, name: str) -> None:
    try:
        library().adopt(artifact)
    except OSError as error:
        raise ValueError(
            message(
                "{name} was not loaded: it could not be kept in {folder} ({error}); make room there, or set "
                "ONEDIFF_CACHE_DIR to a folder that can be written to",
                name=name,
                folder=store().folder,
                error=error,
            )
        ) from error


def mismatch(artifact: Artifact, device: Any) -> Message | None:
    """In what the graph was compiled for something else than this machine, or None: field, both values."""
    manifest = artifact.manifest
    try:
        here = compiler(choose(manifest.engine, device), device)
    except EngineError as error:
        return message("engine: compiled with {engine}, and here {error}", engine=manifest.engine, error=error)
    theirs = {**manifest.environment, **{f"option {name}": value for name, value in manifest.options.items()}}
    ours = {**here.environment, **{f"option {name}": value for name, value in here.options.items()}}
    for field in sorted({*theirs, *ours}):
        if theirs.get(field) != ours.get(field):
            return message(
                "{field}: compiled for {theirs}, here it is {ours}",
                field=field,
                theirs=theirs.get(field),
                ours=ours.get(field),
            )
    return None


def _other_architecture(artifact: Artifact, model: Any) -> Message | None:
    """Why the graph cannot be of this model's architecture, or None: it wants weights that are not there."""
    module = model.model.diffusion_model
    here = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    wanted = [name for kind, name, _ in artifact.manifest.binding["inputs"] if kind == "weight"]
    missing = [name for name in wanted if name not in here]
    if missing:
        return message(
            "architecture: compiled for {target}, and this model has no weight {weight}",
            target=artifact.manifest.target,
            weight=missing[0],
        )
    return None


def describe(artifacts: list[Artifact]) -> str:
    """What is inside a file, for people: a few lines per graph."""
    lines: list[str] = []
    for artifact in artifacts:
        manifest = artifact.manifest
        size = sum(part.size for part in manifest.parts.values()) / 2**20
        lines.append(f"{manifest.target} · {manifest.engine} · {size:.1f} MB")
        lines.append(
            message("  compiled {when} in {seconds:.0f} s", when=manifest.created, seconds=manifest.compile_seconds)
        )
        lines.append("  " + ", ".join(f"{name} {value}" for name, value in sorted(manifest.environment.items())))
    return joined("\n", lines)


def _dispatcher_of(model: Any) -> Dispatcher:
    dispatcher = find_dispatcher(model)
    if dispatcher is None:
        raise ValueError(message("this MODEL is not accelerated: connect the output of OneDiff Model Speedup."))
    return dispatcher


def _compile_for(model: Any, latent: Any, positive: Any, negative: Any) -> None:
    """Compile what an image of this latent's size needs.

    Raises:
        ValueError: there is no latent or no prompt to compile with.
    """
    if latent is None or positive is None:
        raise ValueError(
            message(
                "nothing is compiled yet for this model, and compiling needs sizes and a prompt: connect a latent and "
                "the positive conditioning (and the negative one, unless you sample at cfg 1), or connect the "
                "sampler's LATENT output here, so that saving waits for the first image."
            )
        )
    rehearse(model, latent["samples"], positive, negative, exact=True)


def _path_for(name: str) -> Path:
    folder = Path(folder_paths.get_folder_paths(FOLDER)[0])
    path = (folder / f"{name.removesuffix(SUFFIX)}{SUFFIX}").resolve()
    if not name.strip() or not path.is_relative_to(folder.resolve()) or path.name == SUFFIX:
        raise ValueError(message("{name!r} is no name for a file in models/{folder}", name=name, folder=FOLDER))
    return path

"""Save the compiled graphs of accelerated objects as one file, and load such a file."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import folder_paths
import torch

from ..cache.keys import Variant, compiler
from ..engines import choose
from ..engines.base import EngineError
from ..files import check_name, write_atomically
from ..messages import Message, joined, message, printable
from ..model_families import ALL_SIZES, describe
from ..serving.dispatcher import Dispatcher
from ..settings import GRAPH_SUFFIX as SUFFIX
from ..settings import GRAPHS_FOLDER as FOLDER
from ..store.artifact import Artifact, ArtifactError
from ..store.graph_file import open_graphs, pack
from ..store.trust import Untrusted, VerifiedArtifact
from .adapters.adapter import adapter_of, device_of, dispatcher_of
from .compatibility import KINDS
from .preparation.rehearsal import REHEARSALS
from .process.process import library, store
from .report.report import compiling_in_background

log = logging.getLogger(__name__)


def save_graphs(
    things: Mapping[str, Any], name: str, latent: Any = None, positive: Any = None, negative: Any = None
) -> tuple[str, str]:
    """Write the compiled graphs that serve accelerated objects into one file.

    Args:
        things: what went through our speedup nodes, by keys of ``compatibility.KINDS``.
        name: of the file, without its ending; may name a subfolder.
        latent: sizes to compile for when nothing is compiled yet.
        positive: conditioning to compile a MODEL with.
        negative: likewise; leave out for a model that is sampled at cfg 1.

    Returns:
        The file's path, and a description of what is inside.

    Raises:
        ValueError: with the words that say what to connect or change.
        OSError: the file could not be written; an older one of that name is as it was.
    """
    path = _path_for(name)
    _require_something(things)
    dispatchers = {kind: _dispatcher_of(kind, thing) for kind, thing in things.items()}
    found: dict[str, Artifact] = {}
    for kind, dispatcher in dispatchers.items():
        if not dispatcher.graph_keys():
            _compile_for(kind, things[kind], latent, positive, negative)
        kept = {key: artifact for key in dispatcher.graph_keys() if (artifact := store().find(key)) is not None}
        if not kept:
            raise ValueError(_nothing_to_save(kind, dispatcher))
        found |= kept
    artifacts = list(found.values())
    write_atomically(path, pack(artifacts))
    log.info("OneDiff: saved %d compiled graph(s) to %s", len(artifacts), path)
    return str(path), summary(artifacts)


def load_graphs(things: Mapping[str, Any], name: str, strict: bool, node_id: str | None) -> tuple[dict[str, Any], str]:
    """Return accelerated copies of objects, with the compiled graphs of a saved file.

    Of a file with graphs for several objects, those that are for none of ``things`` are left alone.

    Args:
        things: the host's objects, by keys of ``compatibility.KINDS``. One that is accelerated already keeps its
            engine.
        name: of the file, as ``actions.saved_files`` lists it.
        strict: raise if a graph does not fit this machine or an object has none. Otherwise it is compiled again.
        node_id: the node that shows what is going on.

    Returns:
        The accelerated copies, and a description of what was in the file and what of it does not fit.

    Raises:
        ValueError: the file is missing, damaged or not trusted; or, when strict, does not fit.
    """
    _require_something(things)
    artifacts = _read(name)
    loaded: dict[str, Any] = {}
    problems: list[Message] = []
    for kind, thing in things.items():
        judged = [(artifact, _other_architecture(artifact, kind, thing)) for artifact in artifacts]
        own = [artifact for artifact, problem in judged if problem is None]
        loaded[kind] = _accelerated(kind, thing, (own or artifacts)[0].manifest.engine, name, node_id)
        if not own:
            problems += [_does_not_fit(name, kind, problem) for _, problem in judged[:1] if problem is not None]
        for artifact in own:
            problem = _other_dtype(artifact, kind, thing) or mismatch(artifact, device_of(kind, thing))
            if problem is None:
                _adopt(artifact, name)
            else:
                problems.append(_does_not_fit(name, kind, problem))
        unused = [_other_choice(artifact, kind, loaded[kind]) for artifact in own]
        problems += [_does_not_fit(name, kind, problem) for problem in unused[:1] if problem and None not in unused]
    problems = list(dict.fromkeys(problems))
    if problems and strict:
        raise ValueError(problems[0])
    for problem in problems:
        log.warning("OneDiff: %s; it will be compiled again on first use (choose strict to stop)", problem)
    return loaded, joined("\n", [summary(artifacts), *problems])


def _require_something(things: Mapping[str, Any]) -> None:
    if not things:
        raise ValueError(
            message("nothing is connected: connect at least one of {inputs}.", inputs=", ".join(map(str, KINDS)))
        )


def _read(name: str) -> list[VerifiedArtifact]:
    """Return the graphs in a saved file, checked: whole, and of somebody that this installation trusts.

    Raises:
        ValueError: the file is missing, damaged or not trusted.
    """
    found = folder_paths.get_full_path(FOLDER, name)
    if found is None:
        if not folder_paths.get_filename_list(FOLDER):
            raise ValueError(
                message(
                    "models/{folder} has no compiled graph yet: use OneDiff Save Compiled Graph first, or put a file "
                    "there and press R",
                    folder=FOLDER,
                )
            )
        raise ValueError(message("there is no file {name} in models/{folder}", name=name, folder=FOLDER))
    path = Path(found)
    try:
        with open_graphs(path) as artifacts:
            return [store().verified(artifact, path) for artifact in artifacts]
    except (ArtifactError, Untrusted, OSError) as error:
        raise ValueError(message("{name} was not loaded: {error}", name=name, error=error)) from error


def _accelerated(kind: str, thing: Any, engine: str, name: str, node_id: str | None) -> Any:
    made = thing if dispatcher_of(kind, thing) is not None else adapter_of(kind).accelerate(thing, engine, node_id)
    if dispatcher_of(kind, made) is None:
        raise ValueError(
            message(
                "{name} was not loaded: this {type} cannot be accelerated as a {kind}; the log says why",
                name=name,
                type=type(thing).__qualname__,
                kind=KINDS[kind],
            )
        )
    return made


def _adopt(artifact: Artifact, name: str) -> None:
    try:
        library().index.adopt(artifact)
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


# -- whether a graph fits --------------------------------------------------------------------------


def _does_not_fit(name: str, kind: str, problem: Message) -> Message:
    return message("{name} does not fit this {kind}: {problem}", name=name, kind=KINDS[kind], problem=problem)


def mismatch(artifact: Artifact, device: Any) -> Message | None:
    """Return in what field the graph was compiled for another machine than this, with both values; or None."""
    manifest = artifact.manifest
    try:
        here = compiler(choose(manifest.engine, device), device, Variant.of(manifest.options))
    except EngineError as error:
        return message("engine: compiled with {engine}, and here {error}", engine=manifest.engine, error=error)
    theirs = {**manifest.environment, **{f"option {name}": value for name, value in manifest.options.items()}}
    ours = {**here.environment, **{f"option {name}": value for name, value in here.options.items()}}
    for field in sorted({*theirs, *ours}):
        if theirs.get(field) != ours.get(field):
            return _other(field, theirs.get(field), ours.get(field))
    return None


def _other(field: str, theirs: Any, ours: Any) -> Message:
    return message("{field}: compiled for {theirs}, here it is {ours}", field=field, theirs=theirs, ours=ours)


def _other_architecture(artifact: Artifact, kind: str, thing: Any) -> Message | None:
    """Return why the graph cannot be of this object's architecture, or None."""
    wanted = [name for kind, name, _ in artifact.manifest.binding["inputs"] if kind == "weight"]
    missing = [_first_missing(wanted, module) for module in adapter_of(kind).modules(thing)]
    if missing and None not in missing:
        return message(
            "architecture: compiled for {target}, and this {kind} has no weight {weight}",
            target=artifact.manifest.target,
            kind=KINDS[kind],
            weight=missing[0],
        )
    return adapter_of(kind).other_architecture(thing, artifact.manifest)


def _first_missing(wanted: Sequence[str], module: torch.nn.Module) -> str | None:
    here = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return next((name for name in wanted if name not in here), None)


def _other_dtype(artifact: Artifact, kind: str, thing: Any) -> Message | None:
    """Return in what other dtype than this object's the graph computes, or None."""
    ours = adapter_of(kind).dtype(thing)
    # One line is "tensor 0 float32[?x?x?x?]@cpu"; images and latents are what has most axes.
    tensors = [line.split()[2].partition("[") for line in artifact.manifest.signature if line.startswith("tensor ")]
    theirs, _, _ = max(tensors, key=lambda tensor: tensor[2].count("x"), default=("", "", ""))
    if ours is None or f"torch.{theirs}" == str(ours):
        return None
    return _other("dtype", theirs, str(ours).removeprefix("torch."))


def _other_choice(artifact: Artifact, kind: str, made: Any) -> Message | None:
    """Return which choice on this object's node keeps the graph from being used, or None."""
    dispatcher = dispatcher_of(kind, made)
    assert dispatcher is not None
    try:
        engine, precision = dispatcher.chosen(device_of(kind, made))
    except EngineError:
        return None  # said elsewhere: nothing at all serves
    theirs = "fp8" if Variant.of(artifact.manifest.options).fp8 else "lossless"
    for field, there, here in (("engine", artifact.manifest.engine, engine), ("precision", theirs, precision)):
        if there != here:
            return message(
                "{field}: compiled for {theirs}, and what is connected is {ours}; choose {theirs} on {node}, and "
                "connect its output to this node",
                field=field,
                theirs=there,
                ours=here,
                node=adapter_of(kind).node,
            )
    return None


_FOR_PEOPLE = ("torch", "python", "os", "device", "architecture")  # `graphs show FILE` prints the whole environment


def summary(artifacts: Sequence[Artifact]) -> str:
    """Return what is inside a file, for people: a few lines per graph."""
    lines: list[str] = []
    for artifact in artifacts:
        manifest = artifact.manifest
        size = sum(part.size for part in manifest.parts.values()) / 2**20
        words = describe(manifest.target, manifest.shapes["axes"])
        lines.append(
            message(
                "{family}, {sizes} · {engine} · {size:.1f} MB",
                family=printable(", ".join(filter(None, (words.family, words.variant)))),
                sizes=message("all sizes") if words.sizes == ALL_SIZES else printable(words.sizes),
                engine=printable(manifest.engine),
                size=size,
            )
        )
        lines.append(
            message(
                "  compiled {when} in {seconds:.0f} s",
                when=printable(manifest.created[:10]),
                seconds=manifest.compile_seconds,
            )
        )
        environment = (f"{name} {manifest.environment.get(name, '')}" for name in _FOR_PEOPLE)
        lines.append("  " + printable(", ".join(environment)))
    return joined("\n", lines)


# -- what is to be saved ---------------------------------------------------------------------------


def _dispatcher_of(kind: str, thing: Any) -> Dispatcher:
    dispatcher = dispatcher_of(kind, thing)
    if dispatcher is None:
        raise ValueError(
            message(
                "this {kind} is not accelerated: connect the output of {node}.",
                kind=KINDS[kind],
                node=adapter_of(kind).node,
            )
        )
    return dispatcher


def _nothing_to_save(kind: str, dispatcher: Dispatcher) -> Message:
    reasons = dispatcher.refusals() or [
        message("its engine's graphs are not kept, or the cache folder cannot be written to")
    ]
    return message(
        "there is no compiled graph of this {kind} to save: {reasons}.",
        kind=KINDS[kind],
        reasons=joined("; ", reasons),
    )


def _compile_for(kind: str, thing: Any, latent: Any, positive: Any, negative: Any) -> None:
    """Compile what an image of this latent's size needs.

    Raises:
        ValueError: there is not enough to compile with.
    """
    rehearsal = REHEARSALS.get(kind)
    enough = rehearsal is not None and latent is not None and not (rehearsal.needs_prompt and positive is None)
    if not enough and compiling_in_background():
        raise ValueError(
            message(
                "nothing is compiled yet for this {kind}, and another process is still compiling: save once that is "
                "done, or choose compile: wait on its node.",
                kind=KINDS[kind],
            )
        )
    if rehearsal is None:
        raise ValueError(
            message(
                "nothing is compiled yet for this {kind}: connect what was made with it to after, so that saving "
                "waits for it.",
                kind=KINDS[kind],
            )
        )
    if not enough:
        raise ValueError(rehearsal.nothing_compiled)
    rehearsal.run(thing, latent["samples"], positive, negative, exact=True)


def _path_for(name: str) -> Path:
    """Return the file that a person names.

    Raises:
        ValueError: no file can have such a name, or it is outside the folder.
    """
    check_name(name)
    folder = Path(folder_paths.get_folder_paths(FOLDER)[0])
    path = (folder / f"{name.removesuffix(SUFFIX)}{SUFFIX}").resolve()
    if not name.strip() or not path.is_relative_to(folder.resolve()) or path.name == SUFFIX:
        raise ValueError(
            message(
                "“{name}” cannot be the name of a file in models/{folder}; use letters, digits and spaces",
                name=name,
                folder=FOLDER,
            )
        )
    return path

"""``onediff-comfy graphs``: look after the compiled graphs on this machine's disk."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .folders import config_folder
from .terminal import counted, say, say_json, whole_number

if TYPE_CHECKING:
    from .model_families import GraphWords
    from .store.artifact import Artifact, Manifest
    from .store.store import Entry, GraphStore


def add_commands(graphs: argparse.ArgumentParser) -> None:
    """Declare the commands, and which function each is done by."""
    commands = graphs.add_subparsers(required=True)

    def command(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(command=function)
        return added

    command("list", _list, "every kept graph: model family, sizes, last use")
    show = command("show", _show, "everything that is known about a graph")
    show.add_argument("graph", help="a key, its beginning, or a file")
    verify = command("verify", _verify, "check graphs; exit status 1 if one is damaged or not trusted")
    verify.add_argument("graph", nargs="*", help="keys, their beginnings, or files; every kept graph if none is given")
    remove = command("remove", _remove, "remove kept graphs; what is needed again is compiled again")
    remove.add_argument("graph", nargs="+", help="keys, or their beginnings")
    prune = command("prune", _prune, "remove the least recently used graphs")
    prune.add_argument("--limit-mb", type=whole_number, required=True, help="megabytes that may remain; 0 removes all")
    export = command("export", _export, "copy a kept graph into a file to share")
    export.add_argument("graph", help="a key or its beginning")
    export.add_argument("file", type=Path)
    import_ = command("import", _import, "keep the graphs of a file")
    import_.add_argument("file", type=Path)
    import_.add_argument(
        "--trust",
        action="store_true",
        help="believe the file although another installation compiled it; a compiled graph is code that runs here",
    )


def _list(options: argparse.Namespace) -> int:
    rows = [_row(entry) for entry in _store().entries()]
    if options.json:
        say_json(rows)
    elif not rows:
        say(f"no compiled graphs in {_store().folder}")
    else:
        family, sizes = (max(len(row[name] or "?") for row in rows) for name in ("family", "sizes"))
        for row in rows:
            state = row["problem"] or (
                f"{row['engine']}, compiled {row['created'][:10]} in {row['compile_seconds']:.0f} s"
            )
            what = f"{row['family'] or '?':{family}}  {row['sizes'] or '?':{sizes}}"
            say(f"{row['key'][:12]}  {what}  {row['mb']:7.1f} MB  used {row['used']}  {state}")
        say(f"{counted(len(rows), 'graph')}, {sum(row['mb'] for row in rows):.1f} MB, in {_store().folder}")
    return 0


def _show(options: argparse.Namespace) -> int:
    with _artifacts(options.graph) as artifacts:
        manifests = [artifact.manifest for artifact in artifacts]
    if options.json:
        say_json([json.loads(manifest.to_json()) for manifest in manifests])
        return 0
    for manifest in manifests:
        fields = json.loads(manifest.to_json())
        say(f"{'for':16} {_words(manifest)}")
        for name in ("key", "target", "engine", "created", "compile_seconds", "format"):
            say(f"{name:16} {fields[name]}")
        for name in ("environment", "options", "parts"):
            say(f"{name}")
            for key, value in sorted(fields[name].items()):
                text = f"{value['size']} bytes, sha256 {value['sha256']}" if name == "parts" else value
                say(f"  {key:32} {text}")
        say(f"{'sizes':16} {_sizes(manifest)}")
        say("signature")
        for line in fields["signature"]:
            say(f"  {line}")
    return 0


def _sizes(manifest: Manifest) -> str:
    from .capture.call import NotCovered
    from .capture.shape_range import ShapeRange

    try:
        return str(ShapeRange.from_json(manifest.shapes))
    except (NotCovered, ValueError, KeyError, TypeError) as error:
        return f"cannot be read ({error})"


def _verify(options: argparse.Namespace) -> int:
    if options.graph:
        rows = [row for name in options.graph for row in _verified(name)]
    else:
        rows = [_row(entry) for entry in _store().entries()]
    bad = [row for row in rows if row["problem"]]
    if options.json:
        say_json(rows)
    else:
        for row in bad:
            say(f"{row['path']}: {row['problem']}")
        are = "is" if len(rows) == 1 else "are"
        say(f"{len(rows) - len(bad)} of {counted(len(rows), 'graph')} {are} whole and trusted")
    return 1 if bad else 0


def _verified(name: str) -> list[dict[str, Any]]:
    """Return a row for each graph in the file ``name``, or for the kept one whose key begins with it."""
    from .store.artifact import ArtifactError
    from .store.trust import Untrusted

    if not _is_file(name):
        return [_row(_kept(name))]
    rows = []
    with _graphs_in(Path(name)) as artifacts:
        for artifact in artifacts:
            row = _described(artifact.manifest) | {"key": artifact.manifest.key, "path": name, "problem": None}
            try:
                _store().verified(artifact, Path(name))
            except (ArtifactError, Untrusted, OSError) as error:
                row["problem"] = str(error)
            rows.append(row)
    return rows


def _remove(options: argparse.Namespace) -> int:
    folder = _store().folder
    entries = list({entry.path: entry for entry in map(_kept, options.graph)}.values())
    for entry in entries:
        if folder not in entry.path.parents:
            raise LookupError(f"{entry.path} is in a shared folder, which is only read; remove it where it is written")
    for entry in entries:
        try:
            entry.path.unlink(missing_ok=True)  # another process may have been quicker
        except OSError as error:
            raise OSError(f"{entry.path} cannot be removed: {error.strerror or error}") from error
    if options.json:
        say_json([str(entry.path) for entry in entries])
    else:
        say(f"removed {counted(len(entries), 'graph')}; a running ComfyUI keeps what it has in memory until it ends")
    return 0


def _prune(options: argparse.Namespace) -> int:
    removed = [str(path) for path in _store().prune(limit=options.limit_mb << 20)]
    if options.json:
        say_json(removed)
    else:
        say(f"removed {counted(len(removed), 'graph')}")
    return 0


def _export(options: argparse.Namespace) -> int:
    from .files import write_atomically
    from .store.artifact import Artifact
    from .store.graph_file import pack

    with _artifacts(options.graph) as artifacts:
        keys = [artifact.manifest.key for artifact in artifacts]
        content = pack([Artifact(each.manifest_text, each.seal, each.checked_parts()) for each in artifacts])
    try:
        _refuse_to_replace(options.file)
        write_atomically(options.file, content)
    except OSError as error:
        raise OSError(f"{options.file} cannot be written: {error.strerror or error}") from error
    if options.json:
        say_json({"file": str(options.file), "graphs": keys})
    else:
        say(f"wrote {options.file}, {options.file.stat().st_size / 2**20:.1f} MB")
    return 0


def _refuse_to_replace(path: Path) -> None:
    """Refuse to write a graph over what is none: where a name was mistyped, that is a person's own file.

    Raises:
        OSError: says what is there.
    """
    from .store.artifact import ArtifactError
    from .store.graph_file import manifests_in

    if path.is_dir():
        raise OSError("it is a folder; give the name of a file, such as shared.graph")
    if not os.path.lexists(path):
        return
    if not path.is_file():
        raise OSError("it is no regular file; give another name")
    try:
        manifests_in(path)
    except ArtifactError as error:
        raise OSError(f"it is there, and is no graph ({error}); give another name, or remove it first") from error


def _import(options: argparse.Namespace) -> int:
    store = _store()
    with _graphs_in(options.file) as artifacts:
        for artifact in artifacts:  # all of them, before any is kept
            _ = artifact.checked_parts() if options.trust else store.verified(artifact, options.file.absolute())
        keys = [artifact.manifest.key for artifact in artifacts]
        for number, artifact in enumerate(artifacts):
            try:
                _keep(store, artifact, options)
            except OSError as error:
                kept = f"; kept of {counted(len(keys), 'graph')}: {', '.join(keys[:number])}" if number else ""
                why = error.strerror or error
                raise OSError(f"{options.file}: {keys[number]} was not kept in {store.folder}: {why}{kept}") from error
    if options.json:
        say_json(keys)
    else:
        say(f"kept {counted(len(keys), 'graph')} from {options.file}")
    return 0


def _keep(store: GraphStore, artifact: Artifact, options: argparse.Namespace) -> None:
    """Keep a graph of a file; believe it if a person said so, and only if it is kept.

    Raises:
        ArtifactError, Untrusted, OSError: see ``GraphStore.adopt``.
    """
    from .store.trust import Trust, Untrusted

    source, trust, is_new = options.file.absolute(), Trust(config_folder()), False
    if options.trust:
        try:
            trust.check(artifact, source)
        except Untrusted:
            store.trust(artifact)
            is_new = True
    try:
        store.adopt(artifact, source)
    except BaseException:
        if is_new:
            trust.distrust(artifact)
        raise


@contextlib.contextmanager
def _artifacts(name: str) -> Iterator[list[Artifact]]:
    """Yield the graphs in the file ``name``, or the kept one whose key begins with ``name``; as ``_graphs_in``."""
    path = Path(name)
    if not _is_file(name):
        entry = _kept(name)
        if entry.manifest is None:
            raise LookupError(f"{entry.path}: {entry.problem}")
        path = entry.path
    with _graphs_in(path) as artifacts:
        yield artifacts


def _is_file(name: str) -> bool:
    return os.path.lexists(name) and not Path(name).is_dir()


@contextlib.contextmanager
def _graphs_in(path: Path) -> Iterator[list[Artifact]]:
    """Yield the graphs in a file; see ``open_graphs``.

    Raises:
        OSError: it cannot be read, or holds no graphs; names the file, and says what to do.
    """
    from .store.artifact import ArtifactError
    from .store.graph_file import open_graphs

    try:
        with open_graphs(path) as artifacts:
            for artifact in artifacts:
                _ = artifact.manifest  # it is read when it is first asked for
            yield artifacts
    except ArtifactError as error:
        raise OSError(
            f"{path}: {error}. Give a file that OneDiff Save Compiled Graph or graphs export wrote; for anything else, "
            "such as a graph file of the earlier OneDiff, run its workflow once: it is compiled here and kept"
        ) from error


def _kept(name: str) -> Entry:
    """Return the one kept graph whose key begins with ``name``.

    Raises:
        LookupError: there is none, or there are several.
    """
    if not name:
        raise LookupError("a graph's key is empty here; see graphs list")
    store = _store()
    found: dict[str, Entry] = {}
    for entry in store.entries():  # where a key is in several folders, the one that is used is the one of our own
        if entry.path.stem.startswith(name) and (entry.path.stem not in found or store.folder in entry.path.parents):
            found[entry.path.stem] = entry
    if len(found) != 1:
        have = "graphs have keys that begin" if found else "graph has a key that begins"
        raise LookupError(f"{len(found) or 'no'} {have} with {name}, and there is no such file; see graphs list")
    return next(iter(found.values()))


def _row(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "key": entry.path.stem,
        "path": str(entry.path),
        "mb": round(entry.nbytes / 2**20, 3),
        "used": _when(entry.used),
        **_described(manifest),
        "problem": entry.problem,
    }


def _described(manifest: Manifest | None) -> dict[str, Any]:
    words = _words(manifest) if manifest else None
    return {
        "family": words.family if words else None,
        "sizes": ", ".join(filter(None, (words.sizes, words.variant))) if words else None,
        "target": manifest.target if manifest else None,
        "engine": manifest.engine if manifest else None,
        "created": manifest.created if manifest else None,
        "compile_seconds": manifest.compile_seconds if manifest else None,
    }


def _words(manifest: Manifest) -> GraphWords:
    from .model_families import describe

    axes: Sequence[Sequence[Any]] = manifest.shapes["axes"]
    return describe(manifest.target, axes)


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OSError, OverflowError):  # a file may say that it is of any time
        return "?"


def _store() -> GraphStore:
    from .store.store import default_store

    return default_store()

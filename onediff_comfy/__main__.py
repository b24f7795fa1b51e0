"""``python -m onediff_comfy``, or ``onediff-comfy``: install the pack, make and look after compiled graphs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from . import warmup_command


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 if all is well, 1 if something is wrong with a graph or file."""
    options = _parser().parse_args(arguments)
    if options.command in (_install, _uninstall):  # which work where there is no torch
        try:
            return int(options.command(options))
        except OSError as error:
            return _failed(error)
    from .store.artifact import ArtifactError
    from .store.trust import Untrusted

    try:
        return int(options.command(options))
    except (ArtifactError, Untrusted, OSError, LookupError) as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    _print(f"onediff-comfy: {error}", sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m onediff_comfy", description=__doc__)
    topics = parser.add_subparsers(required=True)
    graphs = topics.add_parser("graphs", help="compiled graphs on this machine's disk")
    commands = graphs.add_subparsers(required=True)

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(command=function)
        return added

    command("list", _list, "every kept graph: size, last use, what it is for")
    show = command("show", _show, "everything that is known about a graph")
    show.add_argument("graph", help="a key, its beginning, or a file")
    command("verify", _verify, "check every kept graph; exit status 1 if one is damaged or not trusted")
    prune = command("prune", _prune, "remove the least recently used graphs")
    prune.add_argument("--limit-mb", type=int, required=True, help="megabytes that may remain; 0 removes all")
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
    text = "have a running ComfyUI prepare a workflow's buckets; exit status 1 if one is not ready"
    warmup = topics.add_parser("warmup", help=text, description=text)
    warmup.add_argument("--json", action="store_true", help="print JSON")
    warmup_command.add_arguments(warmup)
    warmup.set_defaults(command=warmup_command.warm_up)
    for name, function, text in (
        ("install", _install, "put the pack into ComfyUI's custom_nodes, in place of what this command put there"),
        ("uninstall", _uninstall, "remove what install put into ComfyUI's custom_nodes; compiled graphs stay"),
    ):
        placed = topics.add_parser(name, help=text, description=text)
        placed.add_argument("--comfyui", type=Path, required=True, help="ComfyUI's folder, or its --base-directory")
        placed.set_defaults(command=function)
    return parser


def _install(options: argparse.Namespace) -> int:
    from . import installation

    _print(f"{installation.install(options.comfyui)} is in place; restart ComfyUI")
    return 0


def _uninstall(options: argparse.Namespace) -> int:
    from . import installation

    _print(f"{installation.uninstall(options.comfyui)} is removed; restart ComfyUI")
    return 0


def _list(options: argparse.Namespace) -> int:
    rows = [_row(entry) for entry in _store().entries()]
    if options.json:
        _print_json(rows)
    elif not rows:
        _print(f"no compiled graphs in {_store().folder}")
    else:
        for row in rows:
            state = (
                row["problem"] or f"{row['engine']}, compiled {row['created'][:10]} in {row['compile_seconds']:.0f} s"
            )
            _print(f"{row['key'][:12]}  {row['mb']:7.1f} MB  used {row['used']}  {row['target']}  {state}")
        _print(f"{len(rows)} graphs, {sum(row['mb'] for row in rows):.1f} MB, in {_store().folder}")
    return 0


def _show(options: argparse.Namespace) -> int:
    manifests = [artifact.manifest for artifact in _artifacts(options.graph)]
    if options.json:
        _print_json([json.loads(manifest.to_json()) for manifest in manifests])
        return 0
    for manifest in manifests:
        fields = json.loads(manifest.to_json())
        for name in ("key", "target", "engine", "created", "compile_seconds", "format"):
            _print(f"{name:16} {fields[name]}")
        for name in ("environment", "options", "parts"):
            _print(f"{name}")
            for key, value in sorted(fields[name].items()):
                text = f"{value['size']} bytes, sha256 {value['sha256']}" if name == "parts" else value
                _print(f"  {key:32} {text}")
        _print(f"{'sizes':16} {_sizes(manifest)}")
        _print("signature")
        for line in fields["signature"]:
            _print(f"  {line}")
    return 0


def _sizes(manifest: Any) -> str:
    from .capture.call import NotCovered
    from .capture.shape_range import ShapeRange

    try:
        return str(ShapeRange.from_json(manifest.shapes))
    except (NotCovered, ValueError, KeyError, TypeError) as error:
        return f"cannot be read ({error})"


def _verify(options: argparse.Namespace) -> int:
    rows = [_row(entry) for entry in _store().entries()]
    bad = [row for row in rows if row["problem"]]
    if options.json:
        _print_json(rows)
    else:
        for row in bad:
            _print(f"{row['path']}: {row['problem']}")
        _print(f"{len(rows) - len(bad)} of {len(rows)} graphs are whole and trusted")
    return 1 if bad else 0


def _prune(options: argparse.Namespace) -> int:
    removed = [str(path) for path in _store().prune(limit=options.limit_mb << 20)]
    if options.json:
        _print_json(removed)
    else:
        _print(f"removed {len(removed)} graphs")
    return 0


def _export(options: argparse.Namespace) -> int:
    from .files import write_atomically
    from .store.artifact import pack

    artifacts = _artifacts(options.graph)
    for artifact in artifacts:
        artifact.checked_parts()
    write_atomically(options.file, pack(artifacts))
    if options.json:
        _print_json({"file": str(options.file), "graphs": [artifact.manifest.key for artifact in artifacts]})
    else:
        _print(f"wrote {options.file}, {options.file.stat().st_size / 2**20:.1f} MB")
    return 0


def _import(options: argparse.Namespace) -> int:
    from .files import read_regular
    from .store.artifact import MAX_FILE, unpack

    store = _store()
    artifacts = unpack(read_regular(options.file, MAX_FILE))
    for artifact in artifacts:
        artifact.checked_parts()
    for artifact in artifacts:
        if options.trust:
            store.trust(artifact)
        store.adopt(artifact, options.file)
    if options.json:
        _print_json([artifact.manifest.key for artifact in artifacts])
    else:
        _print(f"kept {len(artifacts)} graphs from {options.file}")
    return 0


def _artifacts(name: str) -> list[Any]:
    """Return the graphs in the file ``name``, or the kept one whose key begins with ``name``."""
    from .files import read_regular
    from .store.artifact import MAX_FILE, unpack

    path = Path(name)
    if os.path.lexists(name) and not path.is_dir():
        return list(unpack(read_regular(path, MAX_FILE)))
    found = [entry for entry in _store().entries() if entry.path.stem.startswith(name)]
    if len(found) != 1:
        raise LookupError(f"{len(found) or 'no'} graphs have a key that begins with {name}; see graphs list")
    if found[0].artifact is None:
        raise LookupError(f"{found[0].path}: {found[0].problem}")
    return [found[0].artifact]


def _row(entry: Any) -> dict[str, Any]:
    manifest = entry.artifact.manifest if entry.artifact else None
    return {
        "key": entry.path.stem,
        "path": str(entry.path),
        "mb": round(entry.nbytes / 2**20, 3),
        "used": _when(entry.used),
        "target": manifest.target if manifest else None,
        "engine": manifest.engine if manifest else None,
        "created": manifest.created if manifest else None,
        "compile_seconds": manifest.compile_seconds if manifest else None,
        "problem": entry.problem,
    }


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OSError, OverflowError):  # a file may say that it is of any time
        return "?"


def _store() -> Any:
    from .store.store import default_store

    return default_store()


def _print(text: str, stream: Any = None) -> None:
    """Print a line. What a file says may hold anything, and a terminal obeys some of it."""
    from .messages import printable

    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(printable(text).encode(encoding, "backslashreplace").decode(encoding), file=stream)


def _print_json(value: Any) -> None:
    for line in json.dumps(value, indent=1).splitlines():  # in ASCII: what a terminal acts on is escaped
        _print(line)


if __name__ == "__main__":
    sys.exit(main())

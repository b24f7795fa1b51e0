"""``onediff-comfy``: install the pack, see if this machine can run it, look after compiled graphs, serve many GPUs."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

if not __package__:  # run as `python path/to/onediff_comfy`, from any folder, by any Python: Windows' embedded one too
    # What stood first is the package's own folder, whose files are not to be found as modules of their own.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    runpy.run_module("onediff_comfy", run_name="__main__", alter_sys=True)  # this file once more, and then it ends

from . import __version__, doctor_command, graphs_command, store_command, warmup_command
from .fleet import command as fleet_command
from .terminal import say

NAME = "onediff-comfy"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 if all is well, 1 if something is wrong with a graph, file or machine."""
    try:
        status = _run(_parser().parse_args(arguments))
        sys.stdout.flush()  # or a pipe that nobody reads any more is noticed only when Python ends
        return status
    except BrokenPipeError:  # of `| head`, which has seen enough
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(options: argparse.Namespace) -> int:
    """Run the command, and print what went wrong in a line."""
    errors: tuple[type[Exception], ...] = (OSError, LookupError)
    if options.needs_torch:
        try:
            from .store.artifact import ArtifactError
            from .store.trust import Untrusted
        except ImportError as error:
            return _failed(f"{error}. Use the Python that runs ComfyUI; {NAME} doctor says what it lacks")
        errors = (ArtifactError, Untrusted, *errors)
    try:
        return int(options.command(options))
    except BrokenPipeError:
        raise
    except errors as error:
        return _failed(str(error))


def _failed(text: str) -> int:
    say(f"{NAME}: {text}", sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    parser.set_defaults(needs_torch=False)
    topics = parser.add_subparsers(required=True)
    graphs = topics.add_parser("graphs", help="compiled graphs on this machine's disk")
    graphs.set_defaults(needs_torch=True)
    graphs_command.add_commands(graphs)
    store = topics.add_parser("store", help="the object store that a fleet of machines shares, and its keys")
    store.set_defaults(needs_torch=True)
    store_command.add_commands(store)
    text = "have a running ComfyUI prepare a workflow's buckets; exit status 1 if one is not ready"
    warmup = topics.add_parser("warmup", help=text, description=text)
    warmup.add_argument("--json", action="store_true", help="print JSON")
    warmup_command.add_arguments(warmup)
    warmup.set_defaults(command=warmup_command.warm_up)
    text = "check what this machine has and what is missing; exit status 1 if something is"
    doctor = topics.add_parser("doctor", help=text, description=text)
    doctor_command.add_arguments(doctor)
    doctor.set_defaults(command=doctor_command.doctor)
    text = "many ComfyUIs behind one address"
    fleet_command.add_commands(topics.add_parser("fleet", help=text, description=text))
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

    say(f"{installation.install(options.comfyui)} is in place; restart ComfyUI")
    return 0


def _uninstall(options: argparse.Namespace) -> int:
    from . import installation

    say(f"{installation.uninstall(options.comfyui)} is removed; restart ComfyUI")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m onediff_comfy fleet``: many ComfyUIs behind one address, and what they are doing."""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..messages import printable
from ..terminal import say, say_json
from ..warmup_command import address_of, shown
from .fleet_options import GATEWAY_PORT, FleetOptions

NEEDED = ("ray", "aiohttp", "obstore", "prometheus_client")
_DEFAULT_GATEWAY = f"http://127.0.0.1:{GATEWAY_PORT}"
_ASK_S = 10.0


def add_commands(topic: argparse.ArgumentParser) -> None:
    """Declare ``serve`` and ``status``."""
    commands = topic.add_subparsers(required=True)
    text = "start ComfyUI on each GPU, and one address for all of them"
    served = commands.add_parser("serve", help=text, description=text)
    served.set_defaults(command=serve)
    _add_serve_arguments(served)
    text = "workers, queues and graphs of a running fleet; exit status 1 if it has no worker that is ready"
    told = commands.add_parser("status", help=text, description=text)
    told.add_argument("--gateway", default=_DEFAULT_GATEWAY, help=f"its address; {_DEFAULT_GATEWAY} unless given")
    told.add_argument("--json", action="store_true", help="print JSON")
    told.set_defaults(command=status)


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    default = FleetOptions("", "")
    parser.add_argument("--comfyui", required=True, help="ComfyUI's folder, on every machine the same")
    parser.add_argument("--python", default="", help="its interpreter; that of its .venv or venv unless given")
    parser.add_argument("--replicas", type=int, default=0, help="workers; one for each GPU unless given")
    parser.add_argument("--max-replicas", type=int, default=0, help="start more, up to this many, while prompts wait")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument("--host", default=default.host, help=f"where the gateway listens; {default.host} unless given")
    parser.add_argument("--port", type=int, default=default.port, help=f"{default.port} unless given")
    parser.add_argument("--base", default="", help="whose models and custom_nodes are used; ComfyUI's own unless given")
    parser.add_argument("--folder", default=default.folder, help="what workers write, on each machine by itself")
    parser.add_argument("--shared", default="", help="inputs and users' files, on all machines the same folder")
    parser.add_argument("--journal", default="", help="URL of the journal: s3://…, file:///…; in --folder unless given")
    parser.add_argument("--store", default="", help="URL of the graphs that all machines share: s3://…, file:///…")
    parser.add_argument("--store-role", default="", help="what workers may do there")
    parser.add_argument("--warm-up", default="", help="a folder of workflows (API form) that each worker runs first")
    parser.add_argument("comfyui_args", nargs="*", help="after --: more for ComfyUI's command line")
    parser.add_argument("--ray-address", default="", help="a Ray cluster that runs: auto, or host:port")
    parser.add_argument("--detach", action="store_true", help="with --ray-address: leave the fleet running and end")


def missing() -> str | None:
    """Return what to do if packages that a fleet needs are not there, or None."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return (
        f"fleet serve needs {', '.join(absent)}. They go into an environment of their own, not into ComfyUI's: "
        "python -m venv fleet && fleet/bin/pip install 'onediff-comfy[fleet-gateway]'"
    )


def options_of(given: argparse.Namespace) -> FleetOptions:
    """Return the fleet that a command line asks for.

    Raises:
        ValueError: says what to change.
    """
    comfyui = Path(given.comfyui).expanduser().resolve()
    if not (comfyui / "main.py").is_file():
        raise ValueError(f"{comfyui} has no main.py; name ComfyUI's folder with --comfyui")
    python = given.python or next(map(str, filter(Path.is_file, _interpreters(comfyui))), "")
    if not python or shutil.which(python) is None:
        raise ValueError(f"ComfyUI's interpreter is not at {python or comfyui / '.venv'}; name it with --python")
    replicas = given.replicas or (1 if given.cpu else _gpus())
    if not replicas:
        raise ValueError("there is no NVIDIA GPU here; say --cpu, or --replicas with --ray-address")
    names = ("base", "folder", "shared", "warm_up")
    folders: dict[str, Any] = {
        name: str(Path(text).expanduser().resolve()) for name in names if (text := getattr(given, name))
    }
    if "warm_up" in folders and not Path(folders["warm_up"]).is_dir():
        raise ValueError(f"there is no folder {folders['warm_up']}; --warm-up names one with workflows in API form")
    same = ("max_replicas", "cpu", "host", "port", "journal", "store", "store_role")
    given_as_it_is: dict[str, Any] = {name: getattr(given, name) for name in same}
    arguments = shlex.join(given.comfyui_args)
    options = FleetOptions(str(comfyui), python, replicas=replicas, comfyui_args=arguments)
    return replace(options, **folders, **given_as_it_is)


def _interpreters(comfyui: Path) -> list[Path]:
    return [comfyui / folder / "bin" / "python" for folder in (".venv", "venv")]


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def serve(given: argparse.Namespace) -> int:
    """Start a fleet and run it until it is stopped. Return 0, or 1 after a line that says why it cannot be."""
    absent = missing()
    if absent is not None:
        return _failed(absent)
    try:
        options = options_of(given)
    except ValueError as error:
        return _failed(str(error))
    from . import cluster

    package = str(Path(__file__).resolve().parents[2])
    os.environ.update(cluster.environment_for_ray(package, os.environ))  # Ray's processes inherit it
    import ray

    stopped = threading.Event()
    try:
        cluster.run(options, given.ray_address or None, _say)
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray has set its own, which end with a trace
            signal.signal(number, lambda *_: stopped.set())
        _say(f"ready: {options.replicas} workers")
        while not given.detach and not stopped.wait(1):
            pass
    except KeyboardInterrupt:
        pass
    except Exception as error:  # Ray raises many kinds, plain ones among them, and its last line says what happened
        return _failed((str(error).strip().splitlines() or [type(error).__name__])[-1])
    _say("ending; unfinished prompts are in the journal")
    ray.shutdown()
    return 0


def status(given: argparse.Namespace) -> int:
    """Print what a fleet is doing. Return 0 if a worker is ready, 1 otherwise."""
    gateway = address_of(given.gateway)
    if gateway != shown(gateway):  # errors quote addresses, and urllib takes none with a password
        return _failed(f"{shown(gateway)} was given with a name or a password; give its address alone with --gateway")
    try:
        with urllib.request.urlopen(f"{gateway}/fleet/status", timeout=_ASK_S) as answer:
            found = json.loads(answer.read())
    except (http.client.HTTPException, ValueError, OSError, RecursionError) as error:
        why = str(error).strip() or type(error).__name__
        return _failed(f"no fleet answers at {gateway} ({why}); start one with fleet serve, or name it with --gateway")
    try:
        ready = any(worker["state"] == "ready" for worker in found["workers"])
        rows, lines = _rows(found), _lines(found)
    except (AttributeError, LookupError, TypeError, ValueError):
        return _failed(f"what answers at {gateway} is no fleet's gateway, or one of another version; see --gateway")
    if given.json:
        say_json(found)
    else:
        _print_table(_HEAD, rows)
        for line in lines:
            say(line)
    return 0 if ready else 1


_HEAD = ("worker", "state", "GPU", "prompts", "compiled", "loaded", "served", "eager", "weights")


def _rows(found: dict[str, Any]) -> list[list[str]]:
    rows = [
        [
            worker["name"],
            worker["state"] + (f": {worker['detail']}" if worker.get("detail") else ""),
            worker.get("gpu") or "",
            str(len(worker["prompts"])),
            *(str(sum(graph["how"] == how for graph in worker["graphs"])) for how in ("compiled", "loaded")),
            *(f"{worker['report'].get(name, 0):.0f}" for name in ("served", "eager")),
            ", ".join(worker["checkpoint"]),
        ]
        for worker in found["workers"]
    ]
    return [[printable(text) for text in row] for row in rows]  # clients name files, and a terminal obeys


def _lines(found: dict[str, Any]) -> list[str]:
    counts = {name: number for name, number in found["counts"].items() if number}
    return [" · ".join(f"{number} {name}" for name, number in line.items()) for line in (found["queue"], counts)]


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: on a terminal rich's, if rich is installed."""
    try:
        if not sys.stdout.isatty():
            raise ImportError("a file or a pipe has no width to fit a table into")
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        for row in (head, *rows):
            cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
            say("  ".join(cells).rstrip())
        return
    table = Table(*head)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _say(text: str) -> None:
    say(text)
    sys.stdout.flush()  # who waits for it may read a pipe


def _failed(text: str) -> int:
    say(f"onediff-comfy: {text}", sys.stderr)
    return 1

"""The pack in a host that is about to wait for its first prompt, in this process.

    python waiting_for_a_prompt.py COMFY_DIR

Prints as JSON whether a thread is there to import a compiler, with graphs in the store and without; and whether it has
begun while a prompt runs, and is done while none does. What there is of the host's server is its queue.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

(comfyui,) = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = True
import comfy.model_management  # noqa: E402, F401

from onediff_comfy.host.preparation.first_prompt import prepare_when_idle  # noqa: E402

NAME, WAIT = "onediff-first-prompt", 60.0  # seconds after which something is broken, not slow
LOOKED_FOR = 5.0  # seconds, in which it would have begun: the host is looked at before


def imported() -> bool:
    return "torch._inductor.codecache" in sys.modules


def has_begun() -> bool:
    return "onediff_comfy.host.adapters" in sys.modules


def is_under_way() -> bool:
    return any(thread.name == NAME for thread in threading.enumerate())


def main() -> None:
    queue = types.SimpleNamespace(mutex=threading.RLock(), currently_running={0: "a prompt"})
    server = types.ModuleType("server")
    server.PromptServer = types.SimpleNamespace(  # type: ignore[attr-defined]
        instance=types.SimpleNamespace(prompt_queue=queue)
    )
    sys.modules["server"] = server
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ONEDIFF_CACHE_DIR"] = folder
        prepare_when_idle()
        found = {"without graphs": is_under_way()}
        Path(folder, "graphs").mkdir()
        Path(folder, "graphs", "some.graph").touch()
        prepare_when_idle()
        until = time.monotonic() + LOOKED_FOR
        while not has_begun() and time.monotonic() < until:
            time.sleep(0.1)
        found |= {"under way": is_under_way(), "while a prompt runs": has_begun()}
        queue.currently_running = {}
        until = time.monotonic() + WAIT
        while not imported() and time.monotonic() < until:
            time.sleep(0.1)
        found |= {"while none does": imported()}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what is being imported meanwhile is not waited for


main()

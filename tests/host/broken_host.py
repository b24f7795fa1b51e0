"""Breaks what is relied on of the host, one thing after another, and prints as JSON what our nodes made of each.

python broken_host.py COMFY_DIR CHECKPOINT
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

comfyui, checkpoint = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = True
import comfy.controlnet  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402

from onediff_comfy.host import actions, compatibility  # noqa: E402

SHOWN: list[str] = []


class _Shows:
    """In place of the host's server: keeps the texts that nodes show."""

    @staticmethod
    def send_progress_text(text: str, _node_id: str) -> None:
        SHOWN.append(text)


sys.modules["server"] = types.ModuleType("server")
sys.modules["server"].PromptServer = types.SimpleNamespace(instance=_Shows)  # type: ignore[attr-defined]


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def ways_to_break(use: compatibility.Use) -> Iterator[tuple[str, Any]]:
    """What the thing could become in another version of the host; None: nothing at all."""
    if not _inherited(use):
        yield "gone", None
    if use.given is not None:
        yield "other arguments", lambda only_this_now, *, and_this: None
    if use.mentions:
        found = use.found()
        code = _without(found.__code__, use.mentions)
        yield "forgetful", types.FunctionType(code, found.__globals__, None, found.__defaults__, found.__closure__)
    if use.works is not None:
        yield "another order", type("Other", (use.found(),), {"execute": lambda self, *a, **k: self.original(*a, **k)})


def _inherited(use: compatibility.Use) -> bool:
    """Whether there would be another of that name if it were gone, as good for us."""
    owner, _, name = use.path.rpartition(".")
    kind = compatibility.Use(use.module, owner).found() if owner else None
    return isinstance(kind, type) and any(name in vars(base) for base in kind.__mro__[1:-1]) and not use.mentions


def _without(code: types.CodeType, names: tuple[str, ...]) -> types.CodeType:
    """Code that has other names in place of these, as if the host had renamed its attributes."""

    def other(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return _without(value, names)
        return f"renamed_{value}" if isinstance(value, str) and value in names else value

    return code.replace(co_names=tuple(map(other, code.co_names)), co_consts=tuple(map(other, code.co_consts)))


@contextlib.contextmanager
def replaced(use: compatibility.Use, replacement: Any) -> Iterator[None]:
    owner_path, _, name = use.path.rpartition(".")
    module: Any = sys.modules[use.module]
    owner = functools.reduce(getattr, filter(None, owner_path.split(".")), module)
    before = vars(owner)[name]
    if replacement is None:
        delattr(owner, name)
    else:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)


def passes(kind: str, model: Any) -> tuple[bool, str]:
    """Whether the nodes of a kind hand on what they are given, and what they say."""
    SHOWN.clear()
    thing = object()
    nodes: dict[str, Callable[[], bool]] = {
        "everything": lambda: actions.speed_up("model", model, "eager", "1") is model,
        "MODEL": lambda: actions.speed_up("model", model, "eager", "1") is model,
        "step cache": lambda: actions.cache_steps(model, 0.1, "1") is model,
        "warm-up": lambda: actions.warm_up({"model": model}, None, None, None, "1")[1] == [],
        "files": lambda: (
            actions.saved_files() == []
            and actions.load_compiled({"model": model}, "a.graph", False, "1")[0] == {"model": model}
        ),
        "VAE": lambda: actions.speed_up("vae", thing, "eager", "1") is thing,
        "CONTROL_NET": lambda: actions.speed_up("control_net", thing, "eager", "1") is thing,
        "CLIP": lambda: actions.speed_up("clip", thing, "eager", "1") is thing,
    }
    return nodes[kind](), " ".join(SHOWN)


def main() -> None:
    warnings = _Warnings()
    logging.getLogger("onediff_comfy.host.compatibility").addHandler(warnings)
    with torch.inference_mode():
        model = comfy.sd.load_checkpoint_guess_config(checkpoint, output_clip=False, output_vae=False)[0]
        intact = compatibility.host_changes()
        accelerated = actions.speed_up("model", model, "eager", "1") is not model
        broken = []
        for kind, uses in compatibility.RELIED_ON.items():
            for use in uses:
                for how, replacement in ways_to_break(use):
                    compatibility.host_changed.cache_clear()
                    warnings.texts.clear()
                    with replaced(use, replacement):
                        problem = use.problem()
                        compatibility.host_changes()
                    handed_on, shown = passes(kind, model)
                    broken.append(
                        {
                            "kind": kind,
                            "use": str(use),
                            "how": how,
                            "problem": problem,
                            "reason": compatibility.host_changed(kind),
                            "warnings": list(warnings.texts),
                            "handed_on": handed_on,
                            "shown": shown,
                        }
                    )
    sys.stdout.write(json.dumps({"intact": intact, "accelerated": accelerated, "broken": broken}) + "\n")


main()

"""The English texts of the nodes in the form that the editor's translations have, read off the nodes themselves.

    python -m tools.locales            # whether locales/en is what the nodes say; exit status 1 if it is not
    python -m tools.locales --write    # writes it

The editor shows ``locales/<language>/nodeDefs.json`` in place of what a schema says. Other languages are written by
people, with the same keys; a test compares them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dev.environment import comfyui_path, repository
from dev.host import PACK_NAME, ComfyServer

FOLDER = repository() / "locales"


def english(node_types: Mapping[str, Any]) -> dict[str, Any]:
    """What the pack's nodes say of themselves; a text that a schema lacks is empty.

    Args:
        node_types: what the host's ``/object_info`` says.
    """
    return {
        name: _node(info)
        for name, info in sorted(node_types.items())
        if info["python_module"] == f"custom_nodes.{PACK_NAME}"
    }


def _node(info: Mapping[str, Any]) -> dict[str, Any]:
    declared = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    outputs = zip(info["output_name"], info["output"], info["output_tooltips"], strict=True)
    return {
        "display_name": info["display_name"],
        "description": info["description"],
        "inputs": {name: {"name": name, "tooltip": _tooltip(*spec)} for name, spec in declared.items()},
        "outputs": {
            # One without a name of its own is called by its type, which the editor translates itself.
            str(index): {**({"name": name} if name != kind else {}), "tooltip": tooltip or ""}
            for index, (name, kind, tooltip) in enumerate(outputs)
        },
    }


def _tooltip(_kind: Any, options: Mapping[str, Any] | None = None) -> str:
    return (options or {}).get("tooltip") or ""


def as_text(definitions: Mapping[str, Any]) -> str:
    """The content of a ``nodeDefs.json``."""
    return json.dumps(definitions, indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """Start a ComfyUI, ask it about our nodes, and compare or write the file."""
    parser = argparse.ArgumentParser(prog="python -m tools.locales", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write locales/en/nodeDefs.json")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as base, ComfyServer(comfyui_path(), Path(base), cpu=True) as server:
        text = as_text(english(server.get_json("/object_info")))
    path = FOLDER / "en" / "nodeDefs.json"
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return 0
    current = path.exists() and path.read_text(encoding="utf-8") == text
    print("locales/en is what the nodes say" if current else "locales/en is stale: python -m tools.locales --write")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())

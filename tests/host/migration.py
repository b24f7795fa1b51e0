"""Workflows of the earlier OneDiff, written here in its formats, and what must become of them."""

from __future__ import annotations

import json
from pathlib import Path

from onediff_comfy.host.legacy.replacements import REPLACEMENTS
from tools.workflows import Workflow

FOLDER = Path(__file__).with_name("old_workflows")
NAMES = ("speedup_nodes", "loaders")
"""One of nodes that are wired to what they accelerate, with boosters, and one of loaders and what came and went."""


def editor_form(name: str) -> str:
    """The file as the editor of that time saved it."""
    return (FOLDER / f"{name}.json").read_text()


def api_form(name: str) -> Workflow:
    """The same workflow as it is handed in without the editor."""
    workflow: Workflow = json.loads((FOLDER / "api" / f"{name}.json").read_text())
    return workflow


def migrated(workflow: Workflow) -> Workflow:
    """A workflow in API form with its old nodes replaced: inputs that are named in the table and no others."""
    table = {known.old: known for known in REPLACEMENTS}
    result: Workflow = {}
    for name, node in workflow.items():
        replacement = table.get(node["class_type"])
        if replacement is None:
            result[name] = {"class_type": node["class_type"], "inputs": node["inputs"]}
        else:
            carried = {new: node["inputs"][old] for new, old in replacement.inputs.items()}
            result[name] = {"class_type": replacement.new, "inputs": {**carried, **replacement.set_values}}
    return result

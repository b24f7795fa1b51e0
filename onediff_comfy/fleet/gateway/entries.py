"""The forms in which ComfyUI's API shows prompts, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from .prompt import Prompt


def queue_item(prompt: Prompt) -> list[Any]:
    """Return a prompt as ``GET /queue`` shows it."""
    targets = prompt.body.get("partial_execution_targets") or []
    return [prompt.number, prompt.id, prompt.body["prompt"], prompt.extra_data, targets]


def as_handed_in(prompt: Prompt, item: Any) -> list[Any]:
    """Return the prompt in a worker's history entry with the client's own id, which the worker does not know."""
    if not (isinstance(item, list) and len(item) > 3 and item[1] == prompt.id and isinstance(item[3], dict)):
        return queue_item(prompt)
    extra = {name: value for name, value in item[3].items() if name != "client_id"}
    extra |= {"client_id": prompt.client} if prompt.client is not None else {}
    return [*item[:3], extra, *item[4:]]


def failed(prompt: Prompt, text: str, node_errors: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a history entry that says why there is no result."""
    now = int(time.time() * 1000)
    error = {"prompt_id": prompt.id, "node_id": "", "node_type": "", "executed": [], "timestamp": now}
    error |= {"exception_type": "onediff.fleet", "exception_message": text, "traceback": []}
    started = {"prompt_id": prompt.id, "timestamp": prompt.extra_data.get("create_time", now)}
    messages = [["execution_start", started], ["execution_error", {**error, "node_errors": dict(node_errors or {})}]]
    status = {"status_str": "error", "completed": False, "messages": messages}
    return {"prompt": queue_item(prompt), "outputs": {}, "status": status}


def outcome(entry: Mapping[str, Any]) -> str:
    """Return ``success`` or ``error``, whatever form a history entry has."""
    status = entry.get("status")
    return "error" if isinstance(status, dict) and status.get("status_str") == "error" else "success"


def open_job(prompt: Prompt) -> dict[str, Any]:
    """Return an unfinished prompt as ``GET /api/jobs`` shows it."""
    status = "in_progress" if prompt.started else "pending"
    return _job(queue_item(prompt), {"status": status, "outputs_count": 0})


def finished_job(name: str, entry: Mapping[str, Any], whole: bool = False) -> dict[str, Any]:
    """Return a history entry, whatever form it has, as ``GET /api/jobs`` shows it.

    Args:
        name: the prompt's id.
        whole: show it as ``GET /api/jobs/{id}`` does.
    """
    messages, item = _at(entry, "status", "messages"), entry.get("prompt")
    told = dict(pair for pair in messages if _is_message(pair)) if isinstance(messages, list) else {}
    ends = [told[name] for name in ("execution_success", "execution_error", "execution_interrupted") if name in told]
    failure = "cancelled" if "execution_interrupted" in told else "failed"
    files = list(shown_files(entry.get("outputs")))
    saved = [file for file in files if file.get("type") == "output"]
    job = {
        "status": failure if outcome(entry) == "error" else "completed",
        "execution_start_time": _time(_at(told, "execution_start", "timestamp")),
        "execution_end_time": _time(_at(ends[-1], "timestamp")) if ends else None,
        "execution_error": told.get("execution_error"),
        "outputs_count": len(files),
        "preview_output": next(iter([*saved, *files]), None),
    }
    number, _, workflow, extra = item[:4] if isinstance(item, list) and len(item) > 3 else (None, name, {}, {})
    if whole:
        job |= {"outputs": entry.get("outputs", {}), "execution_status": entry.get("status") or {}}
        job["workflow"] = {"prompt": workflow, "extra_data": extra}
    return _job([number, name, workflow, extra], job)


def _job(item: Sequence[Any], more: Mapping[str, Any]) -> dict[str, Any]:
    number, name, _, extra, *_ = item
    created, workflow = _time(_at(extra, "create_time")), _at(extra, "extra_pnginfo", "workflow", "id")
    job = {"id": name, "priority": number, "create_time": created, "workflow_id": workflow, **more}
    return {key: value for key, value in job.items() if value is not None}


def _at(value: Any, *names: str) -> Any:
    """Return what is there by these names, each in what the one before has; None if there is nothing."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _is_message(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and isinstance(found[0], str)


def _time(found: Any) -> float | None:
    """Return a number that jobs can be sorted by, or None: a client or a worker wrote it."""
    return found if isinstance(found, int | float) and abs(found) < 1 << 63 else None


def shown_files(outputs: Any) -> Iterable[dict[str, Any]]:
    """Find the files in a prompt's outputs, each with the node and the kind that it was listed under."""
    for node, output in outputs.items() if isinstance(outputs, dict) else ():
        for kind, items in output.items() if isinstance(output, dict) else ():
            for item in items if isinstance(items, list) else ():
                if isinstance(item, dict) and isinstance(item.get("filename"), str):
                    yield {**item, "nodeId": node, "mediaType": kind}


_MADE = ("output", "temp")  # types of files that a prompt makes; "input" is a person's


def made_files(outputs: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Find the files in a prompt's outputs that the prompt made."""
    return (shown for shown in shown_files(outputs) if shown.get("type") in _MADE)


def tagged(outputs: Mapping[str, Any], tag: str) -> dict[str, Any]:
    """Return a prompt's outputs with a tag before the subfolder of each file that it made.

    Workers number their files alike, so the tag says whose file it is; and which run's, as a second run of a prompt is
    not to replace what the first has made.
    """

    def item(shown: Any) -> Any:
        if not isinstance(shown, dict) or shown.get("type") not in _MADE or "filename" not in shown:
            return shown
        return {**shown, "subfolder": f"{tag}/{shown.get('subfolder') or ''}".rstrip("/")}

    def kinds(output: Any) -> Any:
        if not isinstance(output, dict):
            return output
        return {kind: list(map(item, items)) if isinstance(items, list) else items for kind, items in output.items()}

    return {node: kinds(output) for node, output in outputs.items()}


def kept_name(tag: str, shown: Mapping[str, Any]) -> str:
    """Return the journal's name for a file that a worker lists: one that every store takes, whatever is listed."""
    listed = (*tag.split("."), shown.get("type"), shown.get("subfolder"), shown["filename"])
    return "/".join(_step(step) for part in listed if part for step in str(part).split("/") if step)


def _step(text: str) -> str:
    """Return one step of an object's name, in which ``%41`` stands for what some store does not take.

    A folder numbers what is being written with ``#``; some stores read ``\\`` as ``/``.
    """
    if not text.strip("."):
        return text.replace(".", "%2E")
    return "".join(
        character
        if character.isprintable() and character not in "%#\\"
        else quote(character, safe="", errors="surrogatepass")
        for character in text
    )

"""``onediff-comfy warmup``: have a running ComfyUI prepare a workflow's buckets, without a screen."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import struct
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import read_regular
from .messages import printable
from .terminal import say, say_json

NODE = "OneDiffWarmUp"
DEFAULT_SERVER = "http://127.0.0.1:8188"

_LARGEST_WORKFLOW = 64 << 20
_LOOK_EVERY_S = 20
_TEXT_MESSAGE = 3  # BinaryEventTypes.TEXT in ComfyUI's protocol.py


class Progress:
    """What a person sees of a warm-up on standard error: a bar on a terminal, and lines where they are kept."""

    def __init__(self) -> None:
        self._bar = _bar() if sys.stderr.isatty() else None

    def say(self, text: str) -> None:
        """Show what the node says now."""
        if self._bar is None:
            _say(text)
        else:
            self._bar.set_description_str(printable(text))

    def reached(self, number: int, of: int) -> None:
        """Show how many buckets are done."""
        if self._bar is not None:
            self._bar.total, self._bar.n = of, number
            self._bar.refresh()

    def close(self) -> None:
        """Leave the terminal to what is printed next."""
        if self._bar is not None:
            self._bar.close()


def _bar() -> Any | None:
    try:
        from tqdm import tqdm  # the host's; lines do where this Python is another
    except ImportError:
        return None
    return tqdm(total=0, file=sys.stderr, bar_format="{n_fmt}/{total_fmt} |{bar:20}| {elapsed} {desc}", leave=False)


class WarmupError(RuntimeError):
    """The warm-up could not be done; the message says why and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``warm_up`` reads from its options."""
    parser.add_argument("--workflow", type=Path, required=True, help=f"a workflow in API form with a {NODE} node")
    where = f"a running ComfyUI, as host:port or a URL; {DEFAULT_SERVER} unless given"
    parser.add_argument("--server", default=DEFAULT_SERVER, help=where)


def warm_up(options: argparse.Namespace) -> int:
    """Run the Warm Up nodes of a workflow. Return 0 if every bucket is ready, 1 otherwise.

    Progress goes to standard error, results to standard output.

    Args:
        options: ``workflow`` (a path), ``server`` (a URL, or host and port) and ``json`` (whether to print JSON).
    """
    try:
        workflow = read_workflow(options.workflow)
        if not _warm_up_nodes(workflow):
            raise WarmupError(
                f"{options.workflow} has no OneDiff Warm Up node: add one behind OneDiff Model Speedup, connect its "
                "buckets to OneDiff Shape Bucket, and export the workflow again"
            )
        progress = Progress()
        try:
            prepared = asyncio.run(_run(address_of(options.server), workflow, progress))
        finally:
            progress.close()
    except WarmupError as error:
        _say(f"onediff-comfy: {error}")
        return 1
    except KeyboardInterrupt:
        _say("stopped; what was prepared by then is kept")
        return 1
    if options.json:
        say_json(prepared)
    else:
        for bucket in prepared:
            outcome = "ready" if bucket["problem"] is None else f"NOT READY: {bucket['problem']}"
            made = f"{bucket['compiled']} compiled, {bucket['loaded']} loaded"
            say(f"{bucket['bucket']:24} {bucket['seconds']:8.1f} s  {made}  {outcome}")
    return 1 if any(bucket["problem"] is not None for bucket in prepared) else 0


def address_of(server: str) -> str:
    """Return the URL of a server that is given as one, or as ``host:port``."""
    return (server if "://" in server else f"http://{server}").rstrip("/")


def shown(server: str) -> str:
    """Return the URL of a server without what may be a password in it."""
    return re.sub(r"//.*@", "//", server)


def read_workflow(path: Path) -> dict[str, Any]:
    """Return the workflow in a file, node id → node.

    Raises:
        WarmupError: it cannot be read, or is not in API form.
    """
    try:
        workflow = json.loads(read_regular(path, _LARGEST_WORKFLOW).decode("utf-8"))
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror}" if error.strerror else str(error)  # names the file, too
        raise WarmupError(why) from error
    except (ValueError, RecursionError) as error:
        raise WarmupError(f"{path} is no JSON ({error}); export the workflow from ComfyUI again") from error
    if isinstance(workflow, dict) and isinstance(workflow.get("nodes"), list):
        raise WarmupError(
            f"{path} is in the editor's form, which only the editor can run: open it in ComfyUI and choose "
            "Workflow > Export (API)"
        )
    if not isinstance(workflow, dict) or not all(
        isinstance(node, dict) and "class_type" in node for node in workflow.values()
    ):
        raise WarmupError(f"{path} is no workflow in API form: in ComfyUI choose Workflow > Export (API)")
    return workflow


def _warm_up_nodes(workflow: Mapping[str, Any]) -> list[str]:
    return [name for name, node in workflow.items() if node["class_type"] == NODE]


async def _run(server: str, workflow: Mapping[str, Any], progress: Progress) -> list[dict[str, Any]]:
    """Have the server run the Warm Up nodes and what they need, nothing else. Return the figures of each bucket."""
    import aiohttp  # the host's; here and not above, so that the other commands do without

    client = uuid.uuid4().hex
    try:
        # Listen before handing in, or the first messages are missed. Messages have no size limit:
        # other people's previews arrive here too.
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{server}/ws?clientId={client}", max_msg_size=0) as messages,
        ):
            handing_in = asyncio.create_task(_hand_in(session, server, workflow, client))
            try:
                prompt_id = await asyncio.shield(handing_in)
                await _follow(session, messages, server, prompt_id, workflow, progress)
            except asyncio.CancelledError:
                await _stop(session, server, await handing_in)  # the server takes it, whether we wait or not
                raise
            outputs = (await _get(session, f"{server}/history/{prompt_id}"))[prompt_id]["outputs"]
    except aiohttp.InvalidURL as error:
        raise WarmupError(f"{shown(server)} is no address of a server; write it like {DEFAULT_SERVER}") from error
    except aiohttp.ClientConnectionError as error:
        raise WarmupError(
            f"no ComfyUI answers at {shown(server)}. Start it, with `python main.py` in ComfyUI's folder, or name the "
            "right address with --server"
        ) from error
    except aiohttp.ClientError as error:
        raise WarmupError(f"{shown(server)} does not answer like a ComfyUI ({error})") from error
    prepared = [bucket for name in _warm_up_nodes(workflow) for bucket in outputs.get(name, {}).get("warm_up", ())]
    if not prepared:
        raise WarmupError("ComfyUI ran the workflow but says nothing of buckets; is its onediff-comfy up to date?")
    return prepared


async def _hand_in(session: Any, server: str, workflow: Mapping[str, Any], client: str) -> str:
    body = {"prompt": workflow, "client_id": client, "partial_execution_targets": _warm_up_nodes(workflow)}
    async with session.post(f"{server}/prompt", json=body) as response:
        answer = await response.json()
    problems = [
        f"{node} ({wrong['class_type']}): {error['message']}: {error['details']}"
        for node, wrong in (answer.get("node_errors") or {}).items()
        for error in wrong["errors"]
    ]
    if response.status != 200:
        what = problems or [answer.get("error", {}).get("message", "no reason given")]
        raise WarmupError("ComfyUI refused the workflow:\n  " + "\n  ".join(what))
    if problems:  # of several Warm Up nodes some are in order; do not leave the others out without a word
        await _stop(session, server, answer["prompt_id"])
        raise WarmupError("ComfyUI refused a part of the workflow:\n  " + "\n  ".join(problems))
    return str(answer["prompt_id"])


async def _follow(
    session: Any, messages: Any, server: str, prompt_id: str, workflow: Mapping[str, Any], progress: Progress
) -> None:
    """Pass on what the nodes show until the server is done.

    Raises:
        WarmupError: it failed, was stopped, or the server went away.
    """
    from aiohttp import WSMsgType

    look_at = time.monotonic() + _LOOK_EVERY_S
    while True:
        # Nobody is told when a waiting prompt is taken off the queue. Messages about other people's
        # prompts go on arriving meanwhile, so silence would be the wrong thing to wait for.
        if time.monotonic() >= look_at:
            if not await _is_queued(session, server, prompt_id):
                return await _ended(session, server, prompt_id)
            look_at = time.monotonic() + _LOOK_EVERY_S
        try:
            message = await messages.receive(timeout=_LOOK_EVERY_S)
        except asyncio.TimeoutError:
            continue
        if message.type == WSMsgType.BINARY:
            text = _status_text(message.data, workflow)
            if text is not None:
                progress.say(text)
        elif message.type != WSMsgType.TEXT:
            raise WarmupError("ComfyUI closed the connection; its log says why. What was prepared by then is kept")
        elif _is_last(json.loads(message.data), prompt_id, workflow, progress):
            return None


def _is_last(event: Mapping[str, Any], prompt_id: str, workflow: Mapping[str, Any], progress: Progress) -> bool:
    """Return True if the server is done with the prompt, by one of its messages.

    Raises:
        WarmupError: it failed, or was stopped.
    """
    kind, data = event["type"], event["data"]
    if data.get("prompt_id") != prompt_id:
        return False
    if kind == "progress" and data.get("node") in _warm_up_nodes(workflow):
        progress.reached(data["value"], data["max"])
    if kind == "execution_error":
        raise WarmupError(f"node {data['node_id']} ({data['node_type']}): {data['exception_message'].strip()}")
    if kind == "execution_interrupted":
        raise WarmupError("somebody stopped it; what was prepared is kept, and another run goes on from there")
    if kind == "execution_cached" and set(_warm_up_nodes(workflow)) <= set(data["nodes"]):
        progress.say("this server prepared these buckets before, and nothing changed since; the figures are of then")
    # The last message about a prompt; execution_success comes before the history is written.
    return bool(kind == "executing" and data.get("node") is None)


async def _is_queued(session: Any, server: str, prompt_id: str) -> bool:
    queue = await _get(session, f"{server}/queue")
    return any(item[1] == prompt_id for item in (*queue["queue_running"], *queue["queue_pending"]))


async def _ended(session: Any, server: str, prompt_id: str) -> None:
    """Check that a prompt which is not queued any more was carried out.

    Raises:
        WarmupError: it was not.
    """
    history = (await _get(session, f"{server}/history/{prompt_id}")).get(prompt_id)
    if history is None:
        raise WarmupError("somebody took it off ComfyUI's queue before its turn came")
    if history["status"]["status_str"] != "success":
        raise WarmupError("it failed or was stopped; ComfyUI's log says why. What was prepared by then is kept")


async def _get(session: Any, url: str) -> Any:
    async with session.get(url) as response:
        return await response.json()


def _status_text(data: bytes, workflow: Mapping[str, Any]) -> str | None:
    """Return what a binary message says on a node of ours, or None if it is another message.

    The layout is ComfyUI's (server.py, send_progress_text): type, length of the node id, both 4
    bytes big-endian, then the node id and the text.
    """
    kind, length = struct.unpack_from(">II", data)
    if kind != _TEXT_MESSAGE:
        return None
    node, text = data[8 : 8 + length].decode(), data[8 + length :].decode()
    return text.splitlines()[0] if text and node in _warm_up_nodes(workflow) else None


async def _stop(session: Any, server: str, prompt_id: str) -> None:
    """Have the server drop our prompt, queued or running, and nobody else's."""
    with contextlib.suppress(Exception):  # it may be gone, and then there is nothing to stop
        for path, body in (("queue", {"delete": [prompt_id]}), ("interrupt", {"prompt_id": prompt_id})):
            async with session.post(f"{server}/{path}", json=body):
                pass


def _say(text: str) -> None:
    for line in text.splitlines():  # what a server says is in it
        say(line, sys.stderr)
    sys.stderr.flush()

"""Prompts on their way, the forms in which ComfyUI's API shows them, and which worker takes which."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ..made_files import shown_files

SECRETS = ("auth_token_comfy_org", "api_key_comfy_org")
"""What ComfyUI keeps out of its queue and history (``execution.SENSITIVE_EXTRA_DATA_KEYS``): the journal too."""

MOST_IN_FLIGHT = 2
"""Prompts handed to one worker at a time: while one runs, the next is there already."""

_MOST_NESTED = 200
"""Levels of lists and objects in each other. Of copying some hundreds the thread dies that runs ComfyUI's prompts."""

_CHECKPOINT_INPUTS = ("ckpt_name", "unet_name", "model_name")


class BadPrompt(ValueError):
    """A request that ComfyUI refuses before it looks at the workflow.

    Attributes:
        answer: what ComfyUI answers with status 400.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        error = {"type": kind, "message": text, "details": text, "extra_info": {}}
        self.answer = {"error": error, "node_errors": {}}


@dataclass(eq=False)
class Attempt:
    """A worker's try at a prompt. What comes of one that is over, however late, changes nothing any more.

    Attributes:
        prompt: which.
        worker: whose.
        taken: whether the request that hands the prompt in is over. Until then the worker's queue need not have it.
        started: whether the worker runs it.
        end: the last messages of the run, held back until the result is written.
        node: the last message about which node runs, for a client that connects anew.
    """

    prompt: Prompt
    worker: Worker
    taken: bool = False
    started: bool = False
    end: list[str] = field(default_factory=list)
    node: str | None = None

    @property
    def over(self) -> bool:
        """Return True if the worker has the prompt no more: it was lost, or the prompt is done or given up."""
        return self.prompt.attempt is not self


@dataclass(eq=False)
class Prompt:
    """A prompt between its being taken and its result.

    Attributes:
        id: a UUID, the client's or ours; stays the same however often a worker has to be found.
        number: smaller ones go first.
        body: what ``POST /prompt`` gets, less ``secrets``; this is what the journal keeps.
        secrets: kept in memory alone.
        attempt: of the worker that has it now, else None.
        attempts: how many workers have had it.
        given_up: no worker is looked for any more; why is being written.
        not_before: a time (``time.monotonic``) before which no worker is looked for, if an earlier gateway took it.
        since: when this gateway took it, of the same clock.
    """

    id: str
    number: float
    body: Mapping[str, Any]
    secrets: Mapping[str, Any] = field(default_factory=dict)
    attempt: Attempt | None = None
    attempts: int = 0
    given_up: bool = False
    not_before: float = 0.0
    since: float = field(default_factory=time.monotonic)

    @property
    def worker(self) -> Worker | None:
        """Return the worker that has it now."""
        return self.attempt.worker if self.attempt is not None else None

    @property
    def started(self) -> bool:
        """Return True if a worker runs it."""
        return self.attempt is not None and self.attempt.started

    @property
    def client(self) -> str | None:
        """Return the client that is told what happens."""
        client = self.body.get("client_id")
        return client if isinstance(client, str) else None

    @functools.cached_property
    def checkpoint(self) -> tuple[str, ...]:
        """Return the files of weights that the workflow names, in order of their names."""
        nodes = (node.get("inputs") for node in self.body["prompt"].values() if isinstance(node, dict))
        values = (inputs.get(name) for inputs in nodes if isinstance(inputs, dict) for name in _CHECKPOINT_INPUTS)
        return tuple(sorted({value for value in values if isinstance(value, str)}))  # others are links to nodes

    @property
    def extra_data(self) -> dict[str, Any]:
        """Return what ComfyUI shows of a prompt besides the workflow."""
        extra = dict(self.body.get("extra_data") or {})
        if self.client is not None:
            extra["client_id"] = self.client
        return extra

    def to_worker(self) -> dict[str, Any]:
        """Return what the worker's ``POST /prompt`` gets."""
        extra = {**self.extra_data, **self.secrets}
        return {**self.body, "prompt_id": self.id, "number": self.number, "extra_data": extra}

    def to_journal(self) -> dict[str, Any]:
        """Return what ``from_journal`` reads."""
        return {"id": self.id, "number": self.number, "body": self.body}

    @staticmethod
    def from_journal(kept: Mapping[str, Any]) -> Prompt:
        """Return a prompt that an earlier gateway took.

        Raises:
            BadPrompt: it is none.
        """
        body = kept.get("body")
        if not isinstance(body, dict) or not is_id(kept.get("id")):
            raise BadPrompt("invalid_prompt", "this is no prompt that a gateway wrote")
        prompt = parse({**body, "prompt_id": kept["id"], "number": kept.get("number")}, 0)
        created = (body.get("extra_data") or {}).get("create_time")
        prompt.body["extra_data"].update({"create_time": created} if isinstance(created, int) else {})
        return prompt

    def take_back(self) -> None:
        """Part from the worker that has it."""
        if self.attempt is not None:
            self.attempt.worker.prompts.pop(self.id, None)
        self.attempt = None


def parse(body: Any, counter: int) -> Prompt:
    """Return the prompt in a request's JSON.

    Args:
        body: of ``POST /prompt``.
        counter: how many prompts came before.

    Raises:
        BadPrompt: ComfyUI would refuse it unseen.
    """
    workflow = body.get("prompt") if isinstance(body, dict) else None
    if not isinstance(workflow, dict):
        raise BadPrompt("no_prompt", "No prompt provided")
    if _is_nested(body):
        raise BadPrompt("invalid_prompt", f"The prompt has more than {_MOST_NESTED} lists and objects in each other")
    extra = body.get("extra_data") or {}
    if not isinstance(extra, dict):
        raise BadPrompt("invalid_extra_data", "extra_data must be an object")
    extra = dict(extra)
    secrets = {name: extra.pop(name) for name in SECRETS if name in extra}
    extra["create_time"] = int(time.time() * 1000)  # whatever the client says, as in ComfyUI
    number = _number(body["number"]) if "number" in body else float(-counter if body.get("front") else counter)
    kept = {name: body[name] for name in ("prompt", "client_id", "partial_execution_targets") if name in body}
    return Prompt(_id(body.get("prompt_id")), number, {**kept, "extra_data": extra}, secrets)


def _is_nested(body: Any) -> bool:
    level = [body]
    for _ in range(_MOST_NESTED):
        below = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in below for value in values if isinstance(value, dict | list)]
    return bool(level)


def is_id(given: Any) -> bool:
    """Return True if something is a prompt's id: a UUID as Python writes it. Only such ids become names of objects."""
    try:
        return isinstance(given, str) and str(uuid.UUID(given)) == given
    except ValueError:
        return False


def _id(given: Any) -> str:
    if given is None:
        return str(uuid.uuid4())
    if is_id(given):
        return str(given)
    raise BadPrompt("invalid_prompt_id", "prompt_id must be a valid UUID")


def _number(given: Any) -> float:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = float(given)
        if math.isfinite(number):  # among others there is no order
            return number
    raise BadPrompt("invalid_number", "number must be a number")


# -- who takes it ----------------------------------------------------------------------------------


class Worker(Protocol):
    """What the choice of a worker depends on."""

    @property
    def prompts(self) -> dict[str, Prompt]:
        """Return what it has, by id."""

    @property
    def ready(self) -> bool:
        """Return True if it takes prompts."""

    @property
    def load(self) -> int:
        """Return how many prompts it has."""

    @property
    def checkpoint(self) -> tuple[str, ...] | None:
        """Return that of the last prompt that it was handed; None before the first."""

    @property
    def last_used(self) -> float:
        """Return when that was."""


AnyWorker = TypeVar("AnyWorker", bound=Worker)


def choose(checkpoint: tuple[str, ...], workers: Iterable[AnyWorker]) -> AnyWorker | None:
    """Return the worker that is to take a prompt, or None if it is better to wait.

    Weights stay where they are: a worker that had the same ones last is asked first. Where all of those have as much as
    they may have, one that does nothing takes the prompt. A worker that is busy with other weights does so only if
    nobody has these.
    """
    able = [worker for worker in workers if worker.ready]
    same = [worker for worker in able if worker.checkpoint == checkpoint]
    free = [worker for worker in able if worker.load < MOST_IN_FLIGHT]
    if of_same := [worker for worker in same if worker.load < MOST_IN_FLIGHT]:
        return min(of_same, key=lambda worker: worker.load)
    if same:
        free = [worker for worker in free if worker.load == 0]
    return min(free, key=lambda worker: (worker.load, worker.checkpoint is not None, worker.last_used), default=None)


# -- the forms of ComfyUI's API --------------------------------------------------------------------


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

"""Prompts on their way, and which worker takes which."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

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


@dataclass
class Heard:
    """What a worker has told of a prompt.

    Attributes:
        end: the last messages of the run, held back until the result is written.
        node: the last message about which node runs, for a client that connects anew.
    """

    end: list[str] = field(default_factory=list)
    node: str | None = None


@dataclass(eq=False)
class Prompt:
    """A prompt between its being taken and its result.

    Attributes:
        id: a UUID, the client's or ours; stays the same however often a worker has to be found.
        number: smaller ones go first.
        body: what ``POST /prompt`` gets, less ``secrets``; this is what the journal keeps.
        secrets: kept in memory alone.
        worker: the worker that has it now, else None.
        started: whether that worker runs it.
        attempts: how many workers have had it.
        not_before: a time (``time.monotonic``) before which no worker is looked for.
        since: when this gateway took it, of the same clock.
        heard: what that worker has told of it.
    """

    id: str
    number: float
    body: Mapping[str, Any]
    secrets: Mapping[str, Any] = field(default_factory=dict)
    worker: Worker | None = None
    started: bool = False
    attempts: int = 0
    not_before: float = 0.0
    since: float = field(default_factory=time.monotonic)
    heard: Heard = field(default_factory=Heard)

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
        if self.worker is not None:
            self.worker.prompts.pop(self.id, None)
        self.worker, self.started, self.heard = None, False, Heard()


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

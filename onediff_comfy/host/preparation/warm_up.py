"""Prepare every bucket of a MODEL, a VAE or both before the first image."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import comfy.model_management
import comfy.utils

from ...buckets import Bucket, BucketError, BucketSet, shown
from ...messages import joined, message
from ..adapters.adapter import adapter_of, dispatcher_of
from ..compatibility import KINDS
from ..process.process import metrics
from ..report.status import status_of
from .rehearsal import REHEARSALS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What came of one bucket.

    Attributes:
        bucket: as text.
        seconds: that it took.
        compiled: graphs that were compiled.
        loaded: graphs that were loaded from disk.
        problem: why images of this size will not be accelerated, or None.
    """

    bucket: str
    seconds: float
    compiled: int
    loaded: int
    problem: str | None

    def __str__(self) -> str:
        outcome = "ready" if self.problem is None else f"NOT READY: {self.problem}"
        return f"{self.bucket} in {self.seconds:.1f} s ({self.compiled} compiled, {self.loaded} loaded): {outcome}"


def warm_up_buckets(
    things: Mapping[str, Any], buckets: BucketSet, positive: Any, negative: Any, node_id: str | None
) -> tuple[str, list[dict[str, Any]]]:
    """Make one sampling step, and decode and encode one image, for every bucket and each of its batch sizes.

    All of it is thrown away. With the first bucket comes the graph for any other size and prompt: a bucket's own is
    for one prompt length only. An interruption comes out as the host raises it; what was made by then is kept.

    Args:
        things: an accelerated "model", an accelerated "vae", or both; keys of ``compatibility.KINDS``.
        buckets: the sizes.
        positive: CONDITIONING; None where there is no model.
        negative: CONDITIONING; None for a model that is sampled at cfg 1.
        node_id: the node that shows how far it is.

    Returns:
        A summary for people, and the fields of ``Prepared`` for each bucket and batch size.

    Raises:
        ValueError: there is nothing to prepare, something is not accelerated, or the model's prompt is missing.
    """
    if not things:
        raise ValueError(message("nothing is connected: connect at least one of {inputs}.", inputs="model, vae"))
    for kind, thing in things.items():
        if dispatcher_of(kind, thing) is None:
            raise ValueError(
                message(
                    "this {kind} is not accelerated: connect the output of {node}. "
                    "If it is connected, that node says why it could not accelerate.",
                    kind=KINDS[kind],
                    node=adapter_of(kind).node,
                )
            )
    if positive is None and any(REHEARSALS[kind].needs_prompt for kind in things):
        raise ValueError(message("a model is prepared with a prompt: connect the positive conditioning."))
    singles = [bucket.at(batch) for bucket in buckets.buckets for batch in bucket.batches]
    show, bar = status_of(node_id), comfy.utils.ProgressBar(len(singles), node_id=node_id)
    done: list[Prepared] = []
    for number, bucket in enumerate(singles, start=1):
        show(message("{number} of {of}: {bucket} …", number=number, of=len(singles), bucket=shown(bucket)))
        any_size = all(prepared.problem is not None for prepared in done)  # not there yet
        done.append(_prepare(things, bucket, positive, negative, any_size))
        log.log(
            logging.WARNING if done[-1].problem else logging.INFO,
            "OneDiff: warm-up %d of %d: %s",
            number,
            len(singles),
            done[-1],
        )
        bar.update_absolute(number)
    summary = _summary(done)
    show(summary)
    return summary, [asdict(prepared) for prepared in done]


def _prepare(things: Mapping[str, Any], bucket: Bucket, positive: Any, negative: Any, any_size: bool) -> Prepared:
    before, start, problem = metrics().snapshot(), time.monotonic(), None
    try:
        for exact in (False, True) if any_size else (True,):
            for kind, thing in things.items():
                rehearsal = REHEARSALS[kind]
                rehearsal.run(thing, rehearsal.empty_latent(thing, bucket), positive, negative, exact)
    except comfy.model_management.InterruptProcessingException:  # an Exception in older hosts
        raise
    except Exception as error:
        # Out of memory, most of all: a size too large says nothing about the others.
        log.debug("warming up %s failed", bucket, exc_info=True)
        problem = str(error)
        if not isinstance(error, BucketError):
            problem = message("{kind}: {error}", kind=type(error).__name__, error=problem)
        comfy.model_management.soft_empty_cache()
    after, seconds = metrics().snapshot(), time.monotonic() - start
    fell_back = [reason for reason, count in after["fallbacks"].items() if count > before["fallbacks"].get(reason, 0)]
    return Prepared(
        shown(bucket),
        round(seconds, 3),
        after["compiled"] - before["compiled"],
        after["loaded"] - before["loaded"],
        problem or joined("; ", fell_back) or None,
    )


def _summary(done: list[Prepared]) -> str:
    ready = sum(prepared.problem is None for prepared in done)
    seconds = sum(prepared.seconds for prepared in done)
    compiled, loaded = sum(prepared.compiled for prepared in done), sum(prepared.loaded for prepared in done)
    first = message(
        "{ready} of {of} ready in {seconds:.0f} s: {compiled} compiled, {loaded} loaded",
        ready=ready,
        of=len(done),
        seconds=seconds,
        compiled=compiled,
        loaded=loaded,
    )
    not_ready = [
        message("{bucket} is not: {problem}", bucket=prepared.bucket, problem=prepared.problem)
        for prepared in done
        if prepared.problem
    ]
    return joined("\n", [first, *not_ready])

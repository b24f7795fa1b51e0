"""Models whose forwards are built as those of newer hosts are, served while a plan of the host's compiler is followed.

    python planned_models.py COMFY_DIR

Prints as JSON, by model, with our pause and with it left out: what came of each of some calls. See ``followed``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path[:0] = [sys.argv.pop(), str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = True
import comfy.ldm.lightricks.av_model as models  # noqa: E402
import comfy.model_prefetch as prefetch  # noqa: E402
import torch  # noqa: E402
from comfy.patcher_extension import WrappersMP  # noqa: E402

from benchmarks import allocation_plans as plans  # noqa: E402
from onediff_comfy.cache.memory import GraphCache  # noqa: E402
from onediff_comfy.compilation.library import GraphLibrary  # noqa: E402
from onediff_comfy.host.adapters.forward_wrappers import ForwardWrapper  # noqa: E402
from onediff_comfy.host.adapters.placement import ModelServers  # noqa: E402
from onediff_comfy.host.adapters.sampling_runs import RunWrapper  # noqa: E402
from onediff_comfy.host.process.host_compiler import can_pause  # noqa: E402
from onediff_comfy.host.process.services import host_services  # noqa: E402
from onediff_comfy.metrics import Metrics  # noqa: E402
from onediff_comfy.serving.dispatcher import Dispatcher  # noqa: E402

CALLS = 6


@torch.library.custom_op("planned_models::pausing", mutates_args=())
def pausing(x: torch.Tensor) -> torch.Tensor:
    """As operators of comfy-kitchen's: a table that outlives the call is made in a pause of their own."""
    with prefetch.pause_malloc_graph():
        table = torch.ones(1)
    return x * table


@pausing.register_fake
def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_MODELS = """
import comfy.model_prefetch
import comfy.patcher_extension
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x.add_(self.outer(torch.tanh(self.inner(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, transformer_options={}):
        kind = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
        wrappers = comfy.patcher_extension.get_all_wrappers(kind, transformer_options)
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        return executor.execute(x, transformer_options)

    def queue(self, x, options):
        return comfy.model_prefetch.make_prefetch_queue(list(self.blocks), x.device, options)


class AroundWrappers(Model):
    # The plan is opened before wrappers are called, and closed once the output is copied out.
    def forward(self, x, transformer_options={}):
        output = torch.empty_like(x)
        comfy.model_prefetch.malloc_graph_begin(x.device)
        found = super().forward(x, transformer_options)
        output.copy_(found)
        del found
        comfy.model_prefetch.malloc_graph_end()
        return output

    def _forward(self, x, transformer_options={}):
        queue, x = self.queue(x, transformer_options), x * 0.5
        for block in self.blocks:
            comfy.model_prefetch.prefetch_queue_pop(queue, x.device, block, malloc_scope="block")
            x = block(x)
        comfy.model_prefetch.prefetch_queue_pop(queue, x.device, None, malloc_scope="block")
        return x * 2


class PausingBlock(Block):
    def forward(self, x):
        return x.add_(self.outer(torch.tanh(torch.ops.planned_models.pausing(self.inner(x)))))


class OperatorPauses(AroundWrappers):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(PausingBlock() for _ in range(3))


class InsideForward(Model):
    # The plan is the blocks' alone. What replaces a block is given a closure that runs it.
    def _forward(self, x, transformer_options={}):
        replaced = transformer_options.get("patches_replace", {}).get("dit", {})
        queue, x = self.queue(x, transformer_options), x * 0.5
        comfy.model_prefetch.malloc_graph_begin(x.device)
        for index, block in enumerate(self.blocks):
            comfy.model_prefetch.prefetch_queue_pop(queue, x.device, block, x.dtype, malloc_scope="block")

            def original(given):
                return {"img": block(given["img"])}

            if ("single_block", index) in replaced:
                x = replaced[("single_block", index)]({"img": x}, {"original_block": original})["img"]
            else:
                x = block(x)
        comfy.model_prefetch.prefetch_queue_pop(queue, x.device, None, malloc_scope="block")
        comfy.model_prefetch.malloc_graph_end()
        return x * 2


class Cores(AroundWrappers):
    # Blocks are run by the queue, which may record them as CUDA graphs.
    def _forward(self, x, transformer_options={}):
        queue = self.queue(x, transformer_options)
        state = x.clone()
        for block in self.blocks:
            def core():
                block(state)

            comfy.model_prefetch.prefetch_queue_pop(
                queue, x.device, block, core=core, enable_graph=True, malloc_scope="block"
            )
        comfy.model_prefetch.prefetch_queue_pop(queue, x.device, None, malloc_scope="block")
        return state * 2


class PausesItself(Model):
    # Blocks are called in the host's own pause, too, for tensors that are kept from one block to the next.
    def _forward(self, x, transformer_options={}):
        x = x * 0.5
        prefix = x[:2].clone()
        comfy.model_prefetch.malloc_graph_begin(x.device)
        for block in self.blocks:
            comfy.model_prefetch.prefetch_queue_pop(None, x.device, block, malloc_scope="block")
            with comfy.model_prefetch.pause_malloc_graph():
                prefix = block(prefix) * 1.0
            x.add_(prefix.mean())
            x = block(x)
        comfy.model_prefetch.prefetch_queue_pop(None, x.device, None, malloc_scope="block")
        comfy.model_prefetch.malloc_graph_end()
        return x * 2


class GivenUpAround(AroundWrappers):
    # Nothing can be captured of it, which is found out in its second block.
    def _forward(self, x, transformer_options={}):
        x = x * 0.5
        for index, block in enumerate(self.blocks):
            comfy.model_prefetch.prefetch_queue_pop(None, x.device, block, malloc_scope="block")
            x = block(x)
            if index and float(x.sum()) > 1e9:
                x.add_(1)
        comfy.model_prefetch.prefetch_queue_pop(None, x.device, None, malloc_scope="block")
        return x * 2


class GivenUpInside(Model):
    def _forward(self, x, transformer_options={}):
        comfy.model_prefetch.malloc_graph_begin(x.device)
        x = GivenUpAround._forward(self, x)
        comfy.model_prefetch.malloc_graph_end()
        return x
"""


def written(code: str, module: ModuleType) -> None:
    """Run code as if it stood in a module's file."""
    exec(compile(code, str(module.__file__), "exec"), vars(module))


Call = Callable[[torch.Tensor], torch.Tensor]


def followed(call: Call, opened: plans.Opened) -> tuple[torch.Tensor, dict[str, int]]:
    """Return a call's output, and what was counted of its plan.

    Allocations that it planned, and that outlived it; breaks; allocations that were freed in a pause; plans that were
    given up; how many blocks were left open.
    """
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    before = [plan for plan in opened.plans.values() if isinstance(plan, plans.CountingPlan)]
    counted = [(plan.planned, plan.rogue_count, plan.freed_in_pause) for plan in before] or [(0, 0, 0)]
    output = call(x)
    (plan,) = opened.plans.values()
    assert isinstance(plan, plans.CountingPlan)
    now = (plan.planned, plan.rogue_count, plan.freed_in_pause)
    found = dict(
        zip(("planned", "rogues", "freed"), (a - b for a, b in zip(now, counted[0], strict=True)), strict=True)
    )
    return output, {**found, **opened.counted(), "left_open": int(opened.active() is not None) + len(plan._scopes)}


class Streamed:
    """The host's model object of a model that is not wholly on the device."""

    model_lowvram, device = True, torch.device("cpu")

    def __init__(self, diffusion_model: torch.nn.Module) -> None:
        self.diffusion_model = diffusion_model

    def get_dtype_inference(self) -> torch.dtype:
        return torch.float32


def looked_at(kind: type, opened: plans.Opened, paused: bool, streamed: bool = False) -> dict[str, Any]:
    """Return what some calls of a model planned: without us first, then served, whole or block by block."""
    torch.manual_seed(0)
    model = kind().eval().requires_grad_(False)
    alone: Call = model
    with plans.watched(opened):
        expected, planned_alone = followed(alone, opened)
    opened.clean_up()
    services = host_services()
    if not paused:
        services = dataclasses.replace(services, unplanned=contextlib.nullcontext, tracing=contextlib.nullcontext)
    metrics = Metrics()
    dispatcher = Dispatcher("eager", GraphLibrary(GraphCache(1 << 30), metrics), services)
    host_model = Streamed(model)
    host_model.model_lowvram = streamed
    around_run = RunWrapper(dispatcher)
    around_run.open += 1  # these calls are of one run
    servers = ModelServers(dispatcher, in_blocks=streamed)
    servers.add(host_model)
    around_forward = ForwardWrapper(around_run, servers)
    options = {"wrappers": {WrappersMP.DIFFUSION_MODEL: {"onediff": [around_forward]}}}
    calls = []
    failed = None
    with plans.watched(opened):
        for _ in range(CALLS):
            try:
                output, row = followed(lambda x: model(x, options), opened)
            except RuntimeError as error:
                failed = str(error)
                break
            calls.append({**row, "right": torch.allclose(output, expected, atol=1e-6)})
    opened.clean_up()
    opened.counted()
    found = metrics.snapshot()
    return {
        "alone": planned_alone["planned"],
        "calls": calls,
        "failed": failed,
        "served": found["served"],
        "eager": found["fallbacks"],
    }


def main() -> None:
    opened = plans.install(lambda _device: plans.CountingPlan())
    written(_MODELS, models)
    served = ("AroundWrappers", "OperatorPauses", "InsideForward", "Cores", "PausesItself")
    whole = (*served, "GivenUpAround", "GivenUpInside")
    in_blocks = ("AroundWrappers", "InsideForward", "PausesItself")
    with torch.inference_mode():
        found = {
            f"{name}{' in blocks' if streamed else ''}": {
                how: looked_at(getattr(models, name), opened, how == "paused", streamed)
                for how in ("paused", "not paused")
            }
            for streamed, names in ((False, whole), (True, in_blocks))
            for name in names
        }
        del prefetch.pause_malloc_graph
        can_pause.cache_clear()
        found["cannot be paused"] = looked_at(models.AroundWrappers, opened, paused=True)  # type: ignore[attr-defined]
    sys.stdout.write(json.dumps(found) + "\n")


main()

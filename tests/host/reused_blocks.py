"""Models served block by block whose runs reuse what deep blocks computed in an earlier step.

    python reused_blocks.py COMFY_DIR

Prints as JSON, of models that use their blocks in several ways, how many of ten calls reused something, how many were
exactly the model's own output, how far the worst was off, and how many blocks were computed.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

comfyui = sys.argv[1]
sys.argv = sys.argv[:1]
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = True
import comfy.model_management as memory  # noqa: E402
import torch  # noqa: E402

from onediff_comfy.host.adapters.blocks import BlockServer  # noqa: E402
from onediff_comfy.host.adapters.part import DiffusionModel  # noqa: E402
from onediff_comfy.host.process.process import library  # noqa: E402
from onediff_comfy.host.process.services import host_services  # noqa: E402
from onediff_comfy.runtime.step_cache import StepCache  # noqa: E402
from onediff_comfy.serving.dispatcher import Dispatcher  # noqa: E402

STEPS = 10


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.layer(x).tanh()


class Writing(Block):
    """Returns the tensor that it is given, written to, as some of Flux' do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 0.1 * self.layer(x).tanh()
        return x


class TwoStreams(Block):
    """Of an image and a prompt, as in Flux and SD3; the last gives no prompt."""

    last = False

    def forward(self, context: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        mixed = self.layer(x + context.mean(1, keepdim=True)).tanh()
        return None if self.last else context + 0.1 * mixed.mean(1, keepdim=True), x + 0.1 * mixed


class Net(torch.nn.Module):
    """Calls its blocks one after the other."""

    def __init__(self, kind: Callable[[], torch.nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(kind() for _ in range(6))
        self.calls = 0

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        x = x.clone()
        for block in self.blocks:
            x = block(x)
        return x


class Streams(Net):
    """An image of as many tokens as the prompt has, so that one could be taken for the other."""

    def __init__(self) -> None:
        super().__init__(TwoStreams)
        self.blocks[-1].last = True

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        for block in self.blocks:
            context, x = block(context, x)
        return x


class Refined(Net):
    """A short list before the others refines the prompt alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(Block() for _ in range(4))
        self.refiner = torch.nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        context = self.refiner[0](context)
        return super().forward(x + context.mean(1, keepdim=True), context, transformer_options)


class PromptFirst(Net):
    """Its first blocks see the prompt alone, which is the same in each step."""

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        for block in self.blocks[:3]:
            context = block(context)
        for block in self.blocks[3:]:
            x = block(x + context.mean(1, keepdim=True))
        return x


class Summing(Net):
    """Uses what each block gives, not only the last."""

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        total = torch.zeros_like(x)
        for block in self.blocks:
            x = block(x)
            total = total + x
        return total


class Skipping(Net):
    """Leaves a block out from its seventh call on, as a guidance that skips layers at the end of an image."""

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        late = transformer_options["sigmas"].item() >= 7
        for number, block in enumerate(self.blocks):
            if not (late and number == 3):
                x = block(x)
        return x


class Turning(Net):
    """Calls its blocks but for the first in the other order from its seventh call on."""

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        late = transformer_options["sigmas"].item() >= 7
        x = self.blocks[0](x)
        for block in reversed(self.blocks[1:]) if late else self.blocks[1:]:
            x = block(x)
        return x


class Turned(Summing):
    """Needs what each block gives from its fourth call on, and calls them in another order."""

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        if transformer_options["sigmas"].item() < 3:
            return Net.forward(self, x, context, transformer_options)
        x = total = self.blocks[0](x)
        for block in reversed(self.blocks[1:]):
            x = block(x)
            total = total + x
        return total


class Told(Summing):
    """Needs what each block gives where an option says so, and calls them in the same order."""

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        forward = Summing.forward if transformer_options["late"] else Net.forward
        return forward(self, x, context, transformer_options)


class Ending(Net):
    """Ends after four blocks from its seventh call on."""

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        late = transformer_options["sigmas"].item() >= 7
        for block in self.blocks[: 4 if late else None]:
            x = block(x)
        return x


class Changed(Summing):
    """Begins to use what each block gives when an extension says so."""

    sums = False

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        forward = Summing.forward if self.sums else Net.forward
        return forward(self, x, context, transformer_options)


class Prefetching(Net):
    """Has the host bring weights ahead, where the options say so."""

    def __init__(self) -> None:
        super().__init__()
        self.prefetched: list[bool] = []

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        self.prefetched.append(transformer_options["prefetch_dynamic_vbars"])
        return super().forward(x, context, transformer_options)


class Counting(Net):
    """Counts its calls on itself, as a cache of another extension's does, and gives another number each time."""

    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, context, transformer_options) + self.calls


class Random(Net):
    def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        return super().forward(x, context, transformer_options) + torch.rand_like(x)


class Taking(Net):
    """Takes what another network gives for each block from the end of a list, as the host does for a ControlNet."""

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any], control: dict[str, list[Any]]
    ) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x += control["output"].pop()
        return x


class Model:
    device = torch.device("cpu")

    def get_dtype_inference(self) -> torch.dtype:
        return torch.float32


def images(steps: int = STEPS) -> list[torch.Tensor]:
    """What a sampler gives to a model, step by step: a little changes each time."""
    generator = torch.Generator().manual_seed(1)
    start, way = torch.randn(2, 1, 4, 8, generator=generator)
    return [start + 0.01 * step * way for step in range(steps)]


def run(net: Net, threshold: float = 0.1, **options: Any) -> dict[str, Any]:
    """What a run of ten steps gives."""
    model, dispatcher = Model(), Dispatcher("eager", library(), host_services())
    return run_on(net, BlockServer(DiffusionModel(model), dispatcher), dispatcher, threshold, **options)


def run_on(
    net: Net, server: BlockServer, dispatcher: Dispatcher, threshold: float = 0.1, **options: Any
) -> dict[str, Any]:
    cache = StepCache(threshold)
    context = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(2))
    off, exact, computed = 0.0, 0, []
    with torch.inference_mode():
        dispatcher.begin_run(cache)
        for step, x in enumerate(images()):
            call = {"uuids": ["one"], "cond_or_uncond": [0], "sigmas": torch.tensor(float(step)), **options}
            if isinstance(net, Told):
                call["late"] = step >= 7
            given: dict[str, Any] = {"context": context, "transformer_options": call}
            both = [dict(given), dict(given)]
            if isinstance(net, Taking):
                for each in both:
                    each["control"] = {"output": [torch.full((1, 4, 8), 0.01) for _ in net.blocks]}
            dispatcher.begin_step()
            served = dispatcher.metrics.snapshot()["served"]
            torch.manual_seed(step)
            actual = server(net, net.forward, (x,), both[0])
            drawn = torch.rand(1)
            torch.manual_seed(step)
            expected = net(x, **both[1])
            assert torch.equal(drawn, torch.rand(1)), "random numbers were drawn that the model does not draw"
            computed.append(dispatcher.metrics.snapshot()["served"] - served)
            off = max(off, float((actual - expected).abs().max() / (expected.max() - expected.min())))
            exact += torch.equal(actual, expected)
        dispatcher.end_run(net)
    fallbacks = dispatcher.metrics.snapshot()["fallbacks"]
    return {
        "reused": cache.reused,
        "exact": exact,
        "off": off,
        "computed": computed,
        "why": sorted(cache.others),
        "eager": fallbacks,
    }


def functions_called() -> dict[str, Any]:
    """A run in which the options hold a function of another node's, which counts its calls."""
    called: list[int] = []

    class Calling(Net):
        def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
            transformer_options["patches"]["counts"][0](x)
            return super().forward(x, context, transformer_options)

    found = run(Calling(), patches={"counts": [lambda _x: called.append(1)]})
    return {**found, "called": len(called)}


def noted(memo: Any) -> dict[str, Any]:
    """A run in which nothing is reused, of a forward that counts its calls in an option, and writes to its input."""

    class Noting(Net):
        def forward(self, x: torch.Tensor, context: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
            memo = transformer_options["memo"]
            counts = vars(memo) if isinstance(memo, types.SimpleNamespace) else memo[0]
            counts["calls"] += 1
            x += 0.01
            return super().forward(x - 0.01, context, transformer_options)

    found = run(Noting(), threshold=1e-9, memo=memo)
    return {**found, "called": memo.calls if isinstance(memo, types.SimpleNamespace) else memo[0]["calls"]}


def counted() -> dict[str, Any]:
    """A run of a model that counts its calls: how many of them were ours."""
    net = Counting()
    found = run(net)
    return {**found, "called": net.calls}


def little_memory() -> dict[str, Any]:
    """A run on a device of a thousand bytes: what is kept of one call takes 256."""
    total = memory.get_total_memory
    memory.get_total_memory = lambda *_args, **_options: 1000
    try:
        return run(Net())
    finally:
        memory.get_total_memory = total


def changed_between_runs() -> dict[str, Any]:
    """The second of two runs, before which the model's code has begun to do something else."""
    model, net, dispatcher = Model(), Changed(), Dispatcher("eager", library(), host_services())
    server = BlockServer(DiffusionModel(model), dispatcher)
    assert run_on(net, server, dispatcher)["reused"] == 6
    Changed.sums = True
    return run_on(net, server, dispatcher)


def prefetched() -> dict[str, Any]:
    """A run in which the host would bring weights ahead."""
    net = Prefetching()
    found = run(net, prefetch_dynamic_vbars=True)
    return {**found, "ahead": net.prefetched.count(True), "not ahead": net.prefetched.count(False)}


def main() -> None:
    torch.manual_seed(0)
    found = {
        "adding": run(Net()),
        "writing": run(Net(Writing)),
        "two streams": run(Streams()),
        "refined": run(Refined()),
        "taking": run(Taking()),
        "at a threshold of nearly nothing": run(Net(), threshold=1e-9),
        "prompt first": run(PromptFirst()),
        "summing": run(Summing()),
        "skipping": run(Skipping()),
        "turning": run(Turning()),
        "turned": run(Turned()),
        "ending": run(Ending()),
        "told": run(Told()),
        "random": run(Random()),
        "counting": counted(),
        "changed between runs": changed_between_runs(),
        "prefetching": prefetched(),
        "little memory": little_memory(),
        "functions": functions_called(),
        "noting": noted([{"calls": 0}]),
        "noting in an object": noted(types.SimpleNamespace(calls=0)),
    }
    sys.stdout.write(json.dumps(found) + "\n")


main()

"""A MODEL in Dynamic VRAM, served from the pages that the host keeps its weights in, in this process.

    python in_dynamic_vram.py COMFY_DIR CHECKPOINT

Prints as JSON of each picture how far it is from one of an ordinary model, and what served it.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import json
import os
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

comfyui, checkpoint = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
import comfy_aimdo.control  # noqa: E402
import torch  # noqa: E402
from comfy.cli_args import args  # noqa: E402 - the host's path first

ON_GPU = torch.cuda.is_available()
args.cpu = not ON_GPU
args.use_pytorch_cross_attention = True
if ON_GPU:
    comfy_aimdo.control.init()  # whoever is imported next looks for what it has loaded
import comfy.ldm.flux.model  # noqa: E402
import comfy.model_management as memory  # noqa: E402
import comfy.model_prefetch as model_prefetch  # noqa: E402
import comfy.ops  # noqa: E402
import comfy.sd  # noqa: E402
import pages_of_cpu  # noqa: E402
from counting import answered  # noqa: E402
from pages_of_cpu import PAGE, Pages  # noqa: E402
from tiny_flux import sampled, with_lora  # noqa: E402

from onediff_comfy.engines.eager import EagerGraph  # noqa: E402
from onediff_comfy.host.adapters import model as of_model  # noqa: E402
from onediff_comfy.host.adapters.functional_call import FunctionalCall  # noqa: E402
from onediff_comfy.host.adapters.model import accelerate, find_dispatcher  # noqa: E402
from onediff_comfy.host.process.memory_pressure import device_reserve, evictable_bytes, held_weights  # noqa: E402
from onediff_comfy.host.process.process import library, metrics  # noqa: E402
from onediff_comfy.host.weights import pinned_module, residency  # noqa: E402
from onediff_comfy.host.weights.pinned_module import PinnedModule  # noqa: E402
from onediff_comfy.host.weights.residency import StreamedModules  # noqa: E402
from onediff_comfy.serving.decision import Invocation  # noqa: E402
from onediff_comfy.serving.dispatcher import Dispatcher  # noqa: E402


def loaded(dtype_of_file: torch.dtype | None = None, **options: Any) -> Any:
    weights = comfy.utils.load_torch_file(checkpoint)
    weights = {name: weight.to(dtype_of_file or weight.dtype) for name, weight in weights.items()}
    model = comfy.sd.load_state_dict_guess_config(weights, output_clip=False, output_vae=False, model_options=options)[
        0
    ]
    return pages_of_cpu.off_device(model) if model.is_dynamic() and not ON_GPU else model


def case(name: str, model: Any, expected: torch.Tensor, seed: int = 1) -> dict[str, Any]:
    dispatcher = find_dispatcher(model)
    assert dispatcher is not None
    before, captured = dispatcher.metrics.snapshot(), metrics().snapshot()["captured"]
    actual = sampled(model, seed)
    after = dispatcher.metrics.snapshot()
    return {
        "name": name,
        "off": float((actual - expected).abs().max() / (expected.max() - expected.min())),
        **answered(before, after),
        "captured": metrics().snapshot()["captured"] - captured,
        "pinned": pinned(model),
        "there": pages_there(model) / (pages_at_most(model) or 1),
        "loaded_models": len({id(entry.model.model) for entry in memory.current_loaded_models}),
    }


def taken_away(model: Any, between: Callable[[Any], None]) -> Any:
    """A clone of ``model`` between whose two steps something happens to the memory."""
    clone, steps = model.clone(), []

    def wrapper(apply: Any, given: dict[str, Any]) -> Any:
        steps.append(1)
        if len(steps) == 2:
            between(clone)
        return apply(given["input"], given["timestep"], **given["c"])

    clone.set_model_unet_function_wrapper(wrapper)
    return clone


def a_page_less(model: Any) -> None:
    model.partially_unload(None, 32 << 20 if ON_GPU else PAGE)


def all_away_and_back(model: Any) -> None:
    model.partially_unload(None, 1e30)
    next(iter(model.model.dynamic_vbars.values())).prioritize()


def norms_doubled(model: Any) -> None:
    for name, weight in model.model.diffusion_model.named_parameters():
        if name.endswith(("norm.scale", "norm.weight")):
            weight.data.mul_(2)


def main() -> None:
    """With a GPU in the real Dynamic VRAM, whose eager pictures are then what is expected; else in its double."""
    engine = os.environ.get("ENGINE", "eager")
    with torch.inference_mode():
        if ON_GPU:
            begin_on_gpu()
        plain = loaded()
        models = {0.0: plain, 0.8: with_lora(plain, 0.8), 0.3: with_lora(plain, 0.3)}
        expected = {strength: sampled(model, 1) for strength, model in models.items()}
        other_seed = sampled(plain, 2)
        norms = sampled(taken_away(loaded(), norms_doubled), 1)
        memory.unload_all_models()
        if not ON_GPU:
            pages_of_cpu.begin()
        base = plain if ON_GPU else loaded()
        assert base.is_dynamic()
        by_host, before = sampled(base, 1), places(base)
        fast = accelerate(base, engine)
        cases = []
        if "ONLY_BLOCKS" not in os.environ:
            cases = every_case(fast, base, expected, {"other seed": other_seed, "norms": norms}, engine)
        cases.append(block_by_block("no room to compute", fast, expected[0.0]))
        memory.unload_all_models()
        if "ONLY_BLOCKS" not in os.environ:
            cases.append(case("unloaded", fast, expected[0.0]))
        apart = float((expected[0.8] - expected[0.3]).abs().max() / (expected[0.0].max() - expected[0.0].min()))
        left = {"pinned": pinned(base), "notes": sorted(_notes(base)), "reserve": reserves(), "held": held(fast)}
        placed: dict[str, Any] = {"order": [before, places(base)]}
        placed["off before"] = float((by_host - expected[0.0]).abs().max())
        if not ON_GPU and "ONLY_BLOCKS" not in os.environ:
            placed["another layer"] = with_another_layer(expected[0.0], engine)
            placed["first calls"] = first_calls(engine)
            placed["looks"] = looks(engine)
            placed["returning"] = returning(engine)
            placed["in a buffer"] = in_a_buffer(engine)
            placed["stopped"] = stopped_in_a_step(expected[0.0], engine)
            placed["elsewhere"] = put_elsewhere(expected[0.0], engine)
    sys.stdout.write(json.dumps({"cases": cases, "left": left, "apart": apart, "placed": placed}) + "\n")


def every_case(
    fast: Any, base: Any, expected: dict[float, torch.Tensor], others: dict[str, torch.Tensor], engine: str
) -> list[dict[str, Any]]:
    cases = [case("first", fast, expected[0.0]), case("again", fast, others["other seed"], seed=2)]
    for strength in (0.8, 0.3, 0.0, 0.8):
        model = with_lora(fast, strength) if strength else fast
        cases.append(case(f"LoRA {strength}", model, expected[strength]))
    cases.append(case("LoRA before the node", accelerate(with_lora(base, 0.3), engine), expected[0.3]))
    cases.append(case("all taken away and back", taken_away(fast, all_away_and_back), expected[0.0]))
    cases.append(case("norms changed meanwhile", taken_away(fast, norms_doubled), others["norms"]))
    weights = pages_there(fast)
    cases.append(case("a page less", taken_away(fast, a_page_less), expected[0.0]))
    if not ON_GPU:
        Pages.room = weights // 2
        fast.partially_unload(None, 1e30)
        cases.append(case("half of the pages", fast, expected[0.0]))
        Pages.room = 1 << 20
    cases.append(case("room again", fast, expected[0.0]))
    if not ON_GPU:
        cases += short_of_memory(fast, expected[0.0])
        cases.append(out_of_memory(accelerate(base, engine), expected[0.0]))
        cases += room_of_others(accelerate(loaded(), engine), expected[0.0])
    cases.append(nowhere_else(expected[0.0], engine))
    if not ON_GPU:
        cases += left_to_the_host(expected[0.0], engine)
        cases += asked_ahead(expected, engine)
    return cases + wrong_weights(expected, engine) + eight_bits(engine)


def nowhere_else(expected: torch.Tensor, engine: str) -> dict[str, Any]:
    """A picture where weights cannot be given other places, as on a host that has moved on."""
    spread, of_model.spread_over_blocks = of_model.spread_over_blocks, lambda *_model: 1 // 0
    fast = accelerate(loaded(), engine)
    found = case("wrong places", fast, expected)
    of_model.spread_over_blocks = spread
    return found


def left_to_the_host(expected: torch.Tensor, engine: str) -> list[dict[str, Any]]:
    """Pictures block by block: in the background; where weights cannot be brought; where memory runs out in comparing.

    In the last two recordings are asked for their memory, before the host runs a block.
    """
    cases = [block_by_block("wrong in the background", accelerate(loaded(), engine, compile="background"), expected)]
    bring, telling, recordings = comfy.ops.cast_modules_with_vbar, FunctionalCall.telling, library().recordings

    def bring_few(modules: Any, *options: Any) -> Any:
        if len(modules) == 1:
            return bring(modules, *options)
        bring(modules[:-1], *options)  # of which it leaves notes
        raise RuntimeError("VRAM grow failed: 8 bytes")

    def telling_nothing(call: Any, forward: Any) -> Any:
        def nothing(**_arguments: Any) -> Any:
            raise torch.OutOfMemoryError

        told = telling(call, forward)
        nothing.__module__, nothing.__name__, nothing.__qualname__ = told.__module__, told.__name__, told.__qualname__
        return nothing

    for name, place, what, instead in (
        ("wrong bringing", comfy.ops, "cast_modules_with_vbar", bring_few),
        ("wrong comparing", FunctionalCall, "telling", telling_nothing),
    ):
        right, asked = getattr(place, what), []
        recordings.release = lambda ran_out=False, asked=asked: asked.append(ran_out) or 0
        setattr(place, what, instead)
        fast = accelerate(loaded(), engine)
        cases.append(block_by_block(name, fast, expected) | {"asked": [*asked]})
        cases[-1]["notes"] = sum("_prefetch" in vars(layer) for layer in fast.model.modules())
        asked.clear()
        with free_memory(1024):
            sampled(fast, 1, steps=4)
        cases[-1]["asked in four steps"] = len(asked)
        setattr(place, what, right)
        del recordings.release
    return cases


def asked_ahead(expected: dict[float, torch.Tensor], engine: str) -> list[dict[str, Any]]:
    """Pictures block by block where a queue of the host's has brought a block's weights before it is called.

    As LTX-2 and MiniMax ask for them. Then also where no graph answers, and the host runs the same block on them.
    """
    flux, call = comfy.ldm.flux.model, EagerGraph.__call__
    right, code = flux.Flux.forward_orig, inspect.getsource(flux.Flux.forward_orig)
    for line in ("for i, block in enumerate(self.double_blocks):", "for i, block in enumerate(self.single_blocks):"):
        assert code.count(line) == 1
        code = code.replace(line, f"{line}\n            prefetch_queue_pop(self.queue, img.device, block)")
    exec(textwrap.dedent(code), vars(flux) | {"prefetch_queue_pop": model_prefetch.prefetch_queue_pop}, asking := {})

    def forward(self: Any, *given: Any, **options: Any) -> Any:
        self.queue = [None, *self.double_blocks, *self.single_blocks, None]  # this device would get none
        model_prefetch.PREFETCH_QUEUES.append(self.queue)
        return asking["forward_orig"](self, *given, **options)

    def failing(*_given: Any) -> Any:
        raise RuntimeError("a kernel of the graph's")

    flux.Flux.forward_orig, args.fast_disk = forward, True
    cases = []
    for name, run in (("asked ahead", call), ("asked ahead, no graph", failing)):
        EagerGraph.__call__ = run
        for what, strength in ((name, 0.0), (f"LoRA, {name}", 0.8)):
            fast = accelerate(loaded(torch.float32), engine)  # of others a layer computes with a copy
            fast = with_lora(fast, strength) if strength else fast
            memory.unload_all_models()
            Pages.room = sum(sum(pages.there) for pages in Pages.all) + 4
            cases.append(block_by_block(what, fast, expected[strength]))
            model_prefetch.cleanup_prefetch_queues()  # as the host does after each node
    flux.Flux.forward_orig, args.fast_disk, EagerGraph.__call__, Pages.room = right, False, call, 1 << 20
    return cases


def with_another_layer(expected: torch.Tensor, engine: str) -> list[float]:
    """How far pictures are off, ours and the host's by turns, where a node has put another layer in one's place.

    The layer that is not in the model meanwhile has weights in its range, and comes back.
    """
    base, other = loaded(), loaded().model.diffusion_model.single_blocks[0].linear1
    sampled(base, 1)
    patched = base.clone()
    patched.add_object_patch("diffusion_model.single_blocks.0.linear1", other)
    fast = accelerate(patched, engine)
    return [float((sampled(model, 1) - expected).abs().max()) for model in (fast, base, fast, base)]


def eight_bits(engine: str) -> list[dict[str, Any]]:
    """Weights that the loader makes 8 bits of, and a LoRA on them, beside the host's own pictures from pages."""
    cases = []
    for blocks in (False, True):
        host, model = loaded(dtype=torch.float8_e4m3fn), accelerate(loaded(dtype=torch.float8_e4m3fn), engine)
        for what, strength in (("8 bits", 0.0), ("8 bits, LoRA", 0.8), ("8 bits again", 0.0)):
            plain, fast = (with_lora(each, strength) if strength else each for each in (host, model))
            expected = sampled(plain, 1)
            cases.append(block_by_block(f"{what}, in blocks", fast, expected) if blocks else case(what, fast, expected))
    return cases


def wrong_weights(expected: dict[float, torch.Tensor], engine: str) -> list[dict[str, Any]]:
    """Pictures where what an image holds is not what the host computes with, as on a host that has moved on.

    Also where it is so only since there is a LoRA.
    """
    cases = []
    of_kinds = [(pinned_module, "wrong pages", case), (residency, "wrong blocks", block_by_block)]
    for strength, (place, name, picture) in itertools.product((0.0, 0.3), of_kinds):
        fast, right = accelerate(loaded(), engine), place.put
        if strength:
            picture(name, fast, expected[0.0])
            fast, name = with_lora(fast, strength), f"LoRA on {name}"
        place.put = lambda weights, found, right=right: right(
            weights, tuple(None if weight is None else weight * 1.5 for weight in found)
        )
        cases.append(picture(name, fast, expected[strength]))
        place.put = right
    return cases


def block_by_block(name: str, fast: Any, expected: torch.Tensor) -> dict[str, Any]:
    """A picture where the host believes that there is hardly any memory to compute in."""
    with free_memory(1024):
        fast.partially_unload(None, 1e30)
        return case(name, fast, expected)


def stopped_in_a_step(expected: torch.Tensor, engine: str) -> dict[str, Any]:
    """A picture of blocks that a person stops while the first one is computed, and then the whole picture."""
    memory.unload_all_models()
    fast, call, called = accelerate(loaded(), engine), EagerGraph.__call__, list[bool]()

    def stopping(graph: Any, weights: Any, tensors: Any) -> Any:
        called.append(True)
        memory.interrupt_current_processing()
        return call(graph, weights, tensors)

    with free_memory(1024):
        sampled(fast, 1)
        EagerGraph.__call__ = stopping  # type: ignore[method-assign]
        with contextlib.suppress(memory.InterruptProcessingException):
            sampled(fast, 1)
        EagerGraph.__call__ = call  # type: ignore[method-assign]
        notes = sorted(_notes(fast))
        return {**case("after it was stopped", fast, expected), "called": len(called), "notes": notes}


def put_elsewhere(expected: torch.Tensor, engine: str) -> dict[str, Any]:
    """Pictures of what ComfyUI's Select Model Device makes of an accelerated MODEL: a clone with its own model."""
    memory.unload_all_models()
    base = loaded()
    base.cached_patcher_init = (loaded, ())
    fast = accelerate(base, engine)
    case("before", fast, expected)
    moved = fast.deepclone_multigpu(new_load_device=base.load_device)
    found = {"whole": case("put elsewhere", moved, expected), "blocks": block_by_block("in blocks", moved, expected)}
    gone = weakref.ref(moved.model.diffusion_model)
    memory.unload_all_models()
    del moved
    gc.collect()
    return found | {"gone": gone() is None, "before": case("where it was", fast, expected)}


@contextlib.contextmanager
def free_memory(size: int) -> Iterator[None]:
    """Have the host believe that so many bytes of the device are free."""
    free = memory.get_free_memory
    memory.get_free_memory = lambda _device=None, torch_free_too=False: (size, size) if torch_free_too else size
    yield
    memory.get_free_memory = free


def short_of_memory(fast: Any, expected: torch.Tensor) -> list[dict[str, Any]]:
    """Pictures where an allocation lacks memory while all pages are pinned, in their first call; then again, and with
    all weights there and less memory.
    """
    call = EagerGraph.__call__

    def allocating(graph: Any, weights: Any, tensors: Any) -> Any:
        EagerGraph.__call__ = call
        lacking.append(Pages.all[-1].free_memory(PAGE))  # finds nothing that could go
        return call(graph, weights, tensors)

    lacking: list[int] = []
    EagerGraph.__call__ = allocating
    cases = [case("short of memory", fast, expected), case("short no more", fast, expected)]
    assert lacking == [0]
    with free_memory(1024):
        cases.append(case("all there, and no room to compute", fast, expected))
    return cases


def out_of_memory(fast: Any, expected: torch.Tensor) -> dict[str, Any]:
    """A picture where memory runs out while all weights are pinned: in a graph, and in the host's own forward."""
    sampled(fast, 1)
    call, fault = EagerGraph.__call__, Pages.fault
    (vbar,) = fast.model.dynamic_vbars.values()
    pages, failed = sum(vbar.there), list[str]()

    def failing(function: Any) -> Any:
        def run(*given: Any) -> Any:
            if sum(map(bool, vbar.pins)) == pages and (function is call or failed):
                failed.append(function.__qualname__)
                raise torch.OutOfMemoryError
            return function(*given)

        return run

    EagerGraph.__call__, Pages.fault = failing(call), failing(fault)  # type: ignore[method-assign]
    found = case("out of memory", fast, expected)
    EagerGraph.__call__, Pages.fault = call, fault  # type: ignore[method-assign]
    again = case("memory again", fast, expected)
    return found | {"limit": vbar.limit, "failed": failed, "again": (again["served"], again["eager"], again["off"])}


def room_of_others(fast: Any, expected: torch.Tensor) -> list[dict[str, Any]]:
    """Pictures with memory to compute in and none for weights; then where another model's can make way.

    The other was loaded before; then after, as a model that the same steps use, and so not to be taken from.
    """
    fast.model.memory_required, other, cases = (lambda _shape, **_: 1 << 20), loaded(), []
    for name, order in (("no other model", ()), ("one before", (other, fast)), ("one after", (fast, other))):
        memory.unload_all_models()
        memory.load_models_gpu([fast])
        for model in order:
            memory.load_models_gpu([model])
            sampled(model, 1)
        fast.partially_unload(None, 1e30)
        next(iter(fast.model.dynamic_vbars.values())).prioritize()
        with free_memory((1 << 20) + PAGE), loads_nothing():
            cases.append(case(f"room of {name}", fast, expected))
    return cases


@contextlib.contextmanager
def loads_nothing() -> Iterator[None]:
    """Keep the order in which models were loaded."""
    load = memory.load_models_gpu
    memory.load_models_gpu = lambda *_models, **_options: None
    yield
    memory.load_models_gpu = load


def reserves() -> list[int | None]:
    """How much memory must be left for a recording.

    Without Dynamic VRAM, in it, as the command line may say, and where a host does not say whether it is on.
    """
    import comfy.memory_management

    listens = comfy.memory_management.aimdo_enabled
    found = []
    for enabled, reserved, headroom in ((False, 3.0, 1.0), (True, None, 0), (True, 3.0, 1.0)):
        comfy.memory_management.aimdo_enabled = enabled
        args.reserve_vram, args.vram_headroom = reserved, headroom
        found.append(device_reserve())
    args.reserve_vram, args.vram_headroom = None, 0
    del comfy.memory_management.aimdo_enabled
    found.append(device_reserve())
    comfy.memory_management.aimdo_enabled = listens
    return found


def first_calls(engine: str) -> list[list[bool]]:
    """Which calls are said to be their module's first: of two steps of a whole model; of two blocks, twice."""
    attempt, is_held_back, found = Dispatcher.attempt, Dispatcher.is_held_back, list[list[bool]]()

    def whole(self: Dispatcher, invocation: Invocation, *out: Any) -> Any:
        if invocation.moving is None:
            found[-1].append(invocation.is_first)
        return attempt(self, invocation, *out)

    def of_block(self: Dispatcher, invocation: Invocation) -> bool:
        found[-1].append(invocation.is_first)
        return is_held_back(self, invocation)

    Dispatcher.attempt, Dispatcher.is_held_back = whole, of_block  # type: ignore[method-assign]
    for free in (1 << 30, 1024):
        found.append([])
        with free_memory(free):
            sampled(accelerate(loaded(), engine), 1)
    Dispatcher.attempt, Dispatcher.is_held_back = attempt, is_held_back  # type: ignore[method-assign]
    return found


def looks(engine: str) -> list[int]:
    """How often a model's layers are looked at in two steps without room, and with room in the second."""
    in_place, found = PinnedModule.in_place, list[int]()

    def noted(*given: Any) -> Any:
        found[-1] += 1
        return in_place(*given)

    PinnedModule.in_place = noted  # type: ignore[method-assign]
    fast = accelerate(loaded(), engine)
    short = contextlib.ExitStack()
    for model in (fast, taken_away(fast, lambda _clone: short.close())):
        found.append(0)
        with short:
            short.enter_context(free_memory(1024))
            sampled(model, 1)
    PinnedModule.in_place = in_place  # type: ignore[method-assign]
    return found


def returning(engine: str) -> list[list[int]]:
    """Of images of a model: how many pages were filled, how many are at the end, how often PyTorch gave back what it
    keeps meanwhile.

    It fits in the last image, and in the one before from the second step on. Beside weights a call takes an eighth of
    their pages, from its first graph on, and the image gives them back. The first graph of the third and the fourth
    image takes twice as much. Before all of them is one that a person stops in its first call.
    """
    memory.unload_all_models()
    Pages.bytes_of_new = 16 << 10
    fast, call, found = accelerate(loaded(), engine), EagerGraph.__call__, list[list[int]]()
    emptied: list[bool] = []
    memory.load_models_gpu([fast])
    (vbar,) = fast.model.dynamic_vbars.values()
    total, fast.model.memory_required = pages_at_most(fast), lambda _shape, **_: 0

    def stopped(*_given: Any) -> Any:
        raise memory.InterruptProcessingException

    def taking(graph: Any, weights: Any, tensors: Any) -> Any:
        Pages.taken = total // (4 if len(found) in (2, 3) and not Pages.taken else 8)
        vbar.free_memory(-Pages.free() * vbar.page)
        return call(graph, weights, tensors)

    def free(_device: Any = None, torch_free_too: bool = False) -> Any:
        return (Pages.free() * vbar.page, 1) if torch_free_too else Pages.free() * vbar.page

    def empty_cache() -> None:
        emptied.append(Pages.taken > 0)  # nothing is taken yet where the host does it, before the first step

    of_host = memory.get_free_memory, memory.soft_empty_cache, EagerGraph.__call__, args.vram_headroom
    memory.get_free_memory, memory.soft_empty_cache, EagerGraph.__call__ = free, empty_cache, stopped
    args.vram_headroom = -0.5  # so that nothing is kept free, nor for what is counted twice
    others = sum(sum(pages.there) for pages in Pages.all)
    Pages.room = total // 2 + others
    with contextlib.suppress(memory.InterruptProcessingException):
        sampled(fast, 1)
    EagerGraph.__call__ = taking  # type: ignore[method-assign]

    def room_for_all(_model: Any) -> None:
        Pages.room = 2 * total + others

    for room in (*[total // 2] * 6, 5 * total // 8, total // 2, 2 * total):
        Pages.room, Pages.taken, before = room + others, 0, sum(vbar.serial)
        sampled(taken_away(fast, room_for_all) if len(found) == 7 else fast, 1)
        found.append([sum(vbar.serial) - before, pages_there(fast), sum(emptied)])
        emptied.clear()
    memory.get_free_memory, memory.soft_empty_cache, EagerGraph.__call__, args.vram_headroom = of_host
    Pages.room, Pages.taken, Pages.bytes_of_new = 1 << 20, 0, PAGE
    return found


def in_a_buffer(engine: str) -> dict[str, Any]:
    """Pictures of a model of which half the weights never stay on the device, beside the host's own of which none do.

    Of each: how far it is off; and how often the host was asked in our first two steps, and in the four after them, for
    tensors over the buffer that such weights pass through. Between those something happens to one of them.
    """
    memory.unload_all_models()
    resolved, asked, found = StreamedModules._resolved, [0], dict[str, Any]()

    def counted(self: StreamedModules, layer: Any, device: torch.device) -> Any:
        asked[-1] += layer._prefetch["signature"] is None
        return resolved(self, layer, device)

    def made(model: Any, room: float, change: Callable[[torch.nn.Module, str], None], of: str = "") -> Any:
        steps, changed = list[int](), [of]

        def wrapper(apply: Any, given: dict[str, Any]) -> Any:
            steps.append(1)
            if len(steps) == 3:
                asked.append(0)
                layers = dict(model.model.diffusion_model.double_blocks[0].named_modules())
                changed[0] = of or next(filter(lambda name: is_in_no_page(layers[name]), layers))
                change(layers[changed[0]], "weight")
            return apply(given["input"], given["timestep"], **given["c"])

        asked[:] = [0]
        model.set_model_unet_function_wrapper(wrapper)
        memory.load_models_gpu([model])
        of_others = sum(sum(pages.there) for pages in Pages.all)  # of models that are no more
        Pages.room = of_others + int(pages_at_most(model) * room)
        picture = sampled(model, 1, 6)
        Pages.room = 1 << 20
        memory.unload_all_models()
        return picture, changed[0]

    StreamedModules._resolved = counted  # type: ignore[method-assign]
    for what, change in CHANGES.items():
        ours, of = made(accelerate(loaded(torch.float32), engine), 0.5, change)
        counts = list(asked)
        by_host, _ = made(loaded(torch.float32), 0.0, change, of)
        found[what] = {"off": float((ours - by_host).abs().max()), "asked": counts, "mean": float(by_host.abs().mean())}
    StreamedModules._resolved = resolved  # type: ignore[method-assign]
    return found


def is_in_no_page(layer: torch.nn.Module) -> bool:
    return "_v" in vars(layer) and layer._v_signature is None and layer.weight is not None


def another_weight(layer: torch.nn.Module, name: str) -> None:
    weight = layer._parameters[name]
    layer._parameters[name] = type(weight)(weight.data * 2, requires_grad=False)  # type: ignore[union-attr, arg-type]


def fewer_bits(layer: torch.nn.Module, name: str) -> None:
    weight = layer._parameters[name]
    weight.data = weight.data.to(torch.float16)  # type: ignore[union-attr]


CHANGES: dict[str, Callable[[torch.nn.Module, str], None]] = {
    "nothing": lambda _layer, _name: None,
    "other values": lambda layer, name: layer._parameters[name].data.mul_(2),  # type: ignore[union-attr]
    "another weight": another_weight,
    "fewer bits": fewer_bits,
}
"""What happens to a weight that passes through a buffer."""


def held(model: Any) -> list[bool]:
    """Whether pages of a model can be taken off its device: while weights are held there, elsewhere, and afterwards.

    Then while it was held and has been recorded, and whether it is known beforehand how many bytes can be.
    """
    memory.load_models_gpu([model])
    sampled(model, 1)
    (vbar,) = model.model.dynamic_vbars.values()
    device = torch.device("cuda" if ON_GPU else "cpu", vbar.device)
    other = torch.device(device.type, vbar.device + 1)
    known = evictable_bytes(device) >= vbar.loaded_size() > 0 == evictable_bytes(other)
    taken = []
    for where in (device, other):
        with held_weights().on(where):
            taken.append(vbar.free_memory(1) > 0)
    taken.append(vbar.free_memory(1) > 0)
    with held_weights().of([vbar]):
        with held_weights().on(device):
            pass
        taken.append(vbar.free_memory(1) > 0)
    return [*taken, known]


def begin_on_gpu() -> None:
    """As the host's main.py does, which is not imported here for it is the server."""
    import comfy.memory_management
    import comfy.model_patcher

    assert comfy_aimdo.control.init_devices((device.index, 0) for device in memory.get_all_torch_devices())
    comfy.memory_management.aimdo_enabled = True
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic


def places(model: Any) -> list[str]:
    """The layers in Dynamic VRAM, in the order in which they are kept."""
    layers = [(layer._v[1], name) for name, layer in model.model.named_modules() if "_v" in vars(layer)]
    return [name for _, name in sorted(layers)]


def pinned(model: Any) -> int:
    """How many pages are pinned now."""
    return sum(bool(page & 2) for vbar in model.model.dynamic_vbars.values() for page in vbar.get_residency())


def pages_there(model: Any) -> int:
    return sum(page & 1 for vbar in model.model.dynamic_vbars.values() for page in vbar.get_residency())


def pages_at_most(model: Any) -> int:
    """How many pages all of a model's weights are in."""
    return sum(-(-vbar.offset // (32 << 20 if ON_GPU else vbar.page)) for vbar in model.model.dynamic_vbars.values())


def _notes(model: Any) -> set[str]:
    return {name for layer in model.model.modules() for name in vars(layer) if "onediff" in name}


main()

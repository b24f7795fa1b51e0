"""Models in Dynamic VRAM, accelerated again and again as prompts do it, in this process.

    python resident_forms.py COMFY_DIR CHECKPOINT

Prints as JSON how often loaders ran, when the resident forms went, and how far pictures are from the host's own. The
device is the CPU, on which the host has no Dynamic VRAM: its patchers are only told that they are dynamic.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import threading
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

comfyui, checkpoint = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
here = Path(__file__).resolve().parent
sys.path[:0] = [comfyui, str(here.parents[1]), str(here / "tiny_nodes")]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.model_management as memory  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from comfy.patcher_extension import WrappersMP  # noqa: E402
from text_encoders import TinyTextEncoder  # noqa: E402
from tiny_flux import sampled, with_lora  # noqa: E402

from onediff_comfy.host.adapters.model import accelerate, find_dispatcher  # noqa: E402
from onediff_comfy.host.adapters.module_proxy import module_behind  # noqa: E402
from onediff_comfy.host.adapters.text_encoder import accelerate_clip, stacks_of  # noqa: E402
from onediff_comfy.host.adapters.vae import accelerate_vae  # noqa: E402
from onediff_comfy.host.weights import dynamic_vram  # noqa: E402

dynamic_vram.can_pin = lambda: False  # as in hosts where the weights of a MODEL cannot be pinned

WAIT = 60.0  # seconds after which something is broken, not slow


class Dynamic(ModelPatcher):  # type: ignore[misc]
    def is_dynamic(self) -> bool:
        return True


class _While(threading.Timer):
    """A while that is over when this script says so, and for what is begun anew then a moment later.

    That it is over moves the module's clock.

    Attributes:
        begun: those of the scene, in their order.
        over: what those that are begun now wait for.
        due: it has not been cancelled in time.
    """

    begun: ClassVar[list[_While]] = []
    over = threading.Event()

    def __init__(self, seconds: float, function: Callable[..., object], arguments: list[Any]) -> None:
        super().__init__(seconds, function, arguments)
        self.over, self.due = _While.over, threading.Event()
        self.begun.append(self)

    def run(self) -> None:
        self.over.wait()
        if not self.finished.wait(0.02):
            now[0] += self.interval
            self.due.set()
            self.function(*self.args, **self.kwargs)
        self.finished.set()

    @classmethod
    def passes(cls) -> bool:
        """Have the while that was begun last be over; whether it was that of a form, and has ended."""
        last = cls.begun[-1]
        last.over.set()
        last.join(WAIT)
        return last.interval == dynamic_vram._KEPT_SECONDS and last.due.is_set() and not last.is_alive()


# Nothing else of that module is other than it is: it compares its timer with the thread that it runs on.
dynamic_vram.threading = types.SimpleNamespace(**vars(threading) | {"Timer": _While})  # type: ignore[assignment]
now = [0.0]
dynamic_vram.time = types.SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]})  # type: ignore[assignment]


class _Leaks(logging.Handler):
    """Keeps the host's warnings of models that are on the device though their patcher is gone."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "memory leak" in record.getMessage():
            self.texts.append(record.getMessage())


def from_file(kind: str) -> Any:
    """A MODEL, a VAE or a CLIP as the host's loaders make them without Dynamic VRAM."""
    if kind == "CLIP":
        return TinyTextEncoder.execute("sd15", 0).args[0]
    model, _, vae, _ = comfy.sd.load_checkpoint_guess_config(
        checkpoint, output_clip=False, output_vae=kind == "VAE", output_model=kind == "MODEL"
    )
    return model if kind == "MODEL" else vae


def patcher_of(thing: Any) -> Any:
    return thing if isinstance(thing, ModelPatcher) else thing.patcher


def dynamic(kind: str, loads: Counter[str]) -> Any:
    """The same in Dynamic VRAM, whose loader counts how often it is asked for the resident form."""

    def load(kind: str, disable_dynamic: bool = False) -> Any:
        assert disable_dynamic
        loads[kind] += 1
        patcher = patcher_of(from_file(kind))
        if kind == "VAE":
            patcher.model.half()  # as in a file of fp16, where the VAE's dtype is fp32
            patcher.__class__ = Dynamic  # the host's takes no notice of what it is asked for
        return patcher

    thing = from_file(kind)
    patcher_of(thing).__class__ = Dynamic
    patcher_of(thing).cached_patcher_init = (load, (kind,))
    return thing


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / (expected.max() - expected.min()))


def gone(thing: weakref.ref[Any], seconds: float = 0.0) -> bool:
    """Whether it goes within this time; a collection may be needed, as the host does one after each prompt."""
    end = time.monotonic() + seconds
    while thing() is not None and time.monotonic() < end:
        time.sleep(0.02)
    gc.collect()
    return thing() is None


def listed(model: Any) -> list[Any]:
    """The patchers by which the host manages the memory of a model."""
    return [entry.model for entry in memory.current_loaded_models if entry.real_model() is model]


def lora_changes() -> dict[str, Any]:
    """A slider that is moved between prompts, then a second node on the same loader."""
    loads: Counter[str] = Counter()
    loader = dynamic("MODEL", loads)
    output = None
    for strength in (0.8, 0.6, 0.4):
        output = None  # the host drops it when the prompt starts
        output = accelerate(with_lora(loader, strength), "eager")
        sampled(output, 1)
    second = accelerate(loader, "eager")
    return {"loads": loads["MODEL"], "shared": second.is_clone(output), "entries": len(listed(second.model))}


def pictures() -> dict[str, Any]:
    """Two nodes with different LoRAs, and one without, in turns."""
    loads: Counter[str] = Counter()
    loader, plain = dynamic("MODEL", loads), from_file("MODEL")
    pairs = {
        strength: (
            with_lora(plain, strength) if strength else plain,
            accelerate(with_lora(loader, strength) if strength else loader, "eager"),
        )
        for strength in (0.8, 0.0, 0.3)
    }
    turns = (0.8, 0.3, 0.0, 0.8, 0.3, 0.3, 0.0)
    no_lora = sampled(plain, 1)
    wanted = {strength: sampled(pairs[strength][0], 1) for strength in pairs}
    return {
        "loads": loads["MODEL"],
        "off": [off(sampled(pairs[strength][1], 1), wanted[strength]) for strength in turns],
        "apart": [off(wanted[strength], no_lora) for strength in (0.8, 0.3)],
    }


def between_prompts() -> dict[str, Any]:
    """Nobody holds a clone for a while: the host goes on managing the model, and it is found again."""
    loads: Counter[str] = Counter()
    loader = dynamic("MODEL", loads)
    output = accelerate(with_lora(loader, 0.8), "eager")
    sampled(output, 1)
    model, patched = weakref.ref(output.model), output.model.state_dict()
    del output
    gc.collect()
    kept = model() is not None
    entries = [patcher.model is model() for patcher in listed(model())] if kept else []
    memory.unload_all_models()
    originals = from_file("MODEL").model.state_dict()
    now = model().state_dict() if kept else {}
    found = {
        "kept": kept,
        "managed": entries,
        "was_patched": sum(not torch.equal(patched[name], weight) for name, weight in originals.items()),
        "still_patched": sum(not torch.equal(now[name], weight) for name, weight in originals.items() if kept),
    }
    output = accelerate(with_lora(loader, 0.3), "eager")
    found |= {"loads": loads["MODEL"], "off": off(sampled(output, 1), sampled(with_lora(from_file("MODEL"), 0.3), 1))}
    return found


def clones_of_others() -> dict[str, Any]:
    """What a LoRA loader behind the node has made is all that is left, for longer than a form is kept."""
    loads: Counter[str] = Counter()
    loader = dynamic("MODEL", loads)
    _While.over.set()
    behind = with_lora(accelerate(loader, "eager"), 0.5)
    gc.collect()
    for begun in _While.begun:  # none where the host keeps the clone that another was made of
        begun.join(WAIT)
    again = accelerate(loader, "eager")
    return {"loads": loads["MODEL"], "shared": again.is_clone(behind)}


def the_while_passes(running: Any) -> dict[str, Any]:
    """The node is taken out of the workflow; ``running`` is what the host's queue says."""
    loads: Counter[str] = Counter()
    loader = dynamic("MODEL", loads)
    output = accelerate(with_lora(loader, 0.8), "eager")
    sampled(output, 1)
    model, weights = weakref.ref(output.model), weakref.ref(output.model.diffusion_model)
    del output
    found: dict[str, Any] = {"kept": not gone(model), "passed": _While.passes()}
    if running:
        found["gone_while_running"] = gone(model)
        running.clear()
    found |= {"gone": gone(model, WAIT), "weights_gone": gone(weights), "loaded": len(memory.current_loaded_models)}
    accelerate(loader, "eager")
    return found | {"loads": loads["MODEL"]}


def a_newer_while(mutex: Any) -> dict[str, Any]:
    """A while is over, but the host's queue is busy just then; meanwhile another clone dies."""
    loader = dynamic("MODEL", Counter())
    first, second = accelerate(loader, "eager"), accelerate(with_lora(loader, 0.8), "eager")
    model = weakref.ref(second.model)
    del first
    gc.collect()
    (older,) = _While.begun
    _While.over = threading.Event()
    with mutex:
        older.over.set()
        due = older.due.wait(WAIT)
        del second
        gc.collect()
    older.join(WAIT)
    found = {"due": due, "whiles": len(_While.begun), "kept": not gone(model)}
    return found | {"passed": _While.passes(), "gone": gone(model, WAIT)}


def in_a_cycle() -> dict[str, Any]:
    """The clone is found as garbage, with all that only it holds, in the middle of something of its timer's."""
    loads: Counter[str] = Counter()
    loader = dynamic("MODEL", loads)
    for _ in range(2):
        node: dict[str, Any] = {"model": accelerate(loader, "eager")}
        node["itself"] = node
        del node
        gc.collect()
    timer = _While.begun[-1]
    form = weakref.ref(dynamic_vram._forms()[loader.model])
    collected = threading.Thread(target=dynamic_vram._ResidentForm.outlive, args=(form,), daemon=True)
    with timer.finished._cond:  # type: ignore[attr-defined]
        collected.start()
        collected.join(10)
        answered = not collected.is_alive()
    return {"loads": loads["MODEL"], "answered": answered, "passed": _While.passes()}


def dynamic_model_goes() -> dict[str, Any]:
    """Another checkpoint, or everything is freed: nothing is left to wait for."""
    loads: Counter[str] = Counter()
    loader = dynamic("MODEL", loads)
    output = accelerate(with_lora(loader, 0.8), "eager")
    sampled(output, 1)
    model, source = weakref.ref(output.model), weakref.ref(loader.model)
    del output
    found = {"kept": not gone(model)}
    del loader
    found |= {"source_gone": gone(source), "gone": gone(model), "loaded": len(memory.current_loaded_models)}
    # The other way round: the clone goes last.
    loader = dynamic("MODEL", loads)
    output = accelerate(loader, "eager")
    model, source = weakref.ref(output.model), weakref.ref(loader.model)
    del loader
    found |= {"source_gone_first": gone(source)}
    del output
    return found | {"gone_last": gone(model)}


def on_another_gpu() -> dict[str, Any]:
    """A model beside another, as the host keeps those of a split over GPUs, that has been in Dynamic VRAM."""
    loads: Counter[str] = Counter()
    output = accelerate(from_file("MODEL"), "eager")
    other = dynamic("MODEL", loads)
    other.__class__ = ModelPatcher  # the host makes it of the class of the one that it is beside
    other.is_multigpu_base_clone = True
    next(iter(other.model.diffusion_model.children()))._v = object()
    output.set_additional_models("multigpu", [other])
    for seed in (1, 2):
        sampled(output, seed)
    (now,) = output.get_additional_models_with_key("multigpu")
    return {
        "loads": loads["MODEL"],
        "resident": not any("_v" in vars(layer) for layer in now.model.modules()),
        "of_the_split": getattr(now, "is_multigpu_base_clone", not hasattr(output, "is_multigpu_base_clone")),
        "found_again": one_to_the_host(now, output),
    }


def split_behind_the_node() -> dict[str, Any]:
    """A MODEL that is served in Dynamic VRAM, and is split over GPUs behind our node; then the MODEL as it is.

    What a run is of is noted by a wrapper of another extension's.
    """
    dynamic_vram.can_pin = lambda: True
    loads: Counter[str] = Counter()
    ran: list[tuple[bool, str | None]] = []

    def noting(executor: Any, *given: Any, **named: Any) -> Any:
        patcher = executor.class_obj.model_patcher
        ran.append((patcher.is_dynamic(), patcher.get_attachment("of another extension")))
        return executor(*given, **named)

    source = dynamic("MODEL", loads)
    expected = [sampled(with_lora(source, 0.8), seed) for seed in (1, 2)]
    output = accelerate(with_lora(source, 0.8), "eager")
    output.set_attachments("of another extension", "kept")
    output.add_wrapper(WrappersMP.PREDICT_NOISE, noting)
    split, other = output.clone(), dynamic("MODEL", loads)
    other.is_multigpu_base_clone = False  # there is no other GPU for a thread
    next(iter(other.model.diffusion_model.children()))._v = object()
    split.set_additional_models("multigpu", [other])
    found: dict[str, Any] = {"loads": [], "without a patcher": []}
    pictures = []
    for model in (output, split, split, output):
        pictures.append(sampled(model, 1 + len(pictures) % 2))
        found["loads"].append(loads["MODEL"])
        gc.collect()  # as the host does after each prompt
        found["without a patcher"] += [entry.model is None for entry in memory.current_loaded_models]
    dynamic_vram.can_pin = lambda: False
    dispatcher = find_dispatcher(output)
    assert dispatcher is not None
    own = [model.is_dynamic() for model in (output, split)]
    model = None
    del source, output, split, other
    gc.collect()
    return found | {
        "left": len(memory.current_loaded_models),
        "ran": ran[::2],
        "off": [float((now - expected[i % 2]).abs().max()) for i, now in enumerate(pictures)],
        "served": dispatcher.metrics.snapshot()["served"],
        "own": own,
    }


def one_to_the_host(patcher: Any, another: Any) -> bool:
    """Whether a split over GPUs takes a patcher for another's on a GPU; True where the host knows no such split."""
    known = hasattr(patcher, "clone_base_uuid")
    return not known or bool(patcher.clone_base_uuid == another.clone_base_uuid)


def clones_to_the_host() -> dict[str, Any]:
    """Whom a split over GPUs takes for one another: clones of an accelerated MODEL, and not that and its source."""
    loader = dynamic("MODEL", Counter())
    first, second = accelerate(loader, "eager"), accelerate(with_lora(loader, 0.8), "eager")
    knows_splits = hasattr(loader, "clone_base_uuid")
    return {
        "accelerated": one_to_the_host(first, second) and one_to_the_host(first, first.clone()),
        "and_its_source": knows_splits and one_to_the_host(first, loader),
    }


def state_of(patcher: Any) -> dict[str, str]:
    """What there is on a patcher and its model, weights left out."""
    lists = ("patches", "object_patches", "callbacks", "wrappers", "attachments", "injections", "model_options")
    found = {name: str(getattr(patcher, name)) for name in lists}
    found |= {"on the patcher": str(sorted(vars(patcher))), "on the model": str(sorted(vars(patcher.model)))}
    found |= {f"on {path}": str(sorted(vars(layer))) for path, layer in patcher.model.named_modules()}
    return found


def leftovers() -> list[str]:
    """What an accelerated clone that is sampled and dropped leaves on what the host has given us."""
    loader = dynamic("MODEL", Counter())
    before, weights = state_of(loader), loader.model.state_dict()
    sampled(accelerate(loader, "eager"), 1)
    gc.collect()
    after, now = state_of(loader), loader.model.state_dict()
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    return changed + [name for name, weight in weights.items() if now[name].data_ptr() != weight.data_ptr()]


def other_kind(
    kind: str,
    accelerated: Callable[[Any], Any],
    served: Callable[[Any], list[Any]],
    used: Callable[[Any], torch.Tensor],
) -> dict[str, Any]:
    """The same for a VAE or a CLIP, as far as theirs is code of its own.

    Args:
        accelerated: makes it.
        served: its modules that graphs stand in for.
        used: what it makes, by the host's code on its weights: a capture would take most of this script's time.
    """
    loads: Counter[str] = Counter()
    loader = dynamic(kind, loads)
    expected = used(from_file(kind))
    first = accelerated(loader)
    second = accelerated(loader)
    found: dict[str, Any] = {
        "shared": first.patcher.is_clone(second.patcher),
        "served": [
            module in list(thing.patcher.model.modules()) for thing in (first, second) for module in served(thing)
        ],
        "off": [off(used(first), expected)],
        "managed in Dynamic VRAM": first.patcher.parent.is_dynamic(),
    }
    model = weakref.ref(first.patcher.model)
    del first, second
    gc.collect()
    again = accelerated(loader)
    found |= {"loads": loads[kind], "off": [*found["off"], off(used(again), expected)]}
    del again
    found["kept"] = not gone(model)
    del loader
    return found | {"gone": gone(model)}


def vaes() -> dict[str, Any]:
    latent = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(1))

    def decoded(vae: Any) -> torch.Tensor:
        vae.first_stage_model = module_behind(vae.first_stage_model)
        image: torch.Tensor = vae.decode(latent)
        return image

    return other_kind(
        "VAE", lambda vae: accelerate_vae(vae, "eager"), lambda vae: [module_behind(vae.first_stage_model)], decoded
    )


def clips() -> dict[str, Any]:
    def encoded(clip: Any) -> torch.Tensor:
        clip.cond_stage_model = clip.patcher.model
        embedding: torch.Tensor = clip.encode_from_tokens(clip.tokenize("a lighthouse on a cliff"))
        return embedding

    return other_kind("CLIP", lambda clip: accelerate_clip(clip, "eager"), stacks_of, encoded)


def main() -> None:
    found: dict[str, Any] = {}
    logging.getLogger().addHandler(leaks := _Leaks())
    gc.freeze()
    with torch.inference_mode():
        for name, scene in {
            "lora_changes": lora_changes,
            "pictures": pictures,
            "between_prompts": between_prompts,
            "in_a_cycle": in_a_cycle,
            "clones_of_others": clones_of_others,
            "the_while_passes": lambda: the_while_passes(None),
            "dynamic_model_goes": dynamic_model_goes,
            "on_another_gpu": on_another_gpu,
            "split_behind_the_node": split_behind_the_node,
            "clones_to_the_host": clones_to_the_host,
            "leftovers": leftovers,
            "VAE": vaes,
            "CLIP": clips,
        }.items():
            memory.unload_all_models()
            _While.begun, _While.over = [], threading.Event()
            found[name] = scene()
            gc.collect()
            gc.freeze()  # collections in later scenes have less to look through
        # Last: from here on there is something like the host's server.
        running: dict[int, str] = {}
        queue = types.SimpleNamespace(mutex=threading.RLock(), currently_running=running)
        server = types.ModuleType("server")
        server.PromptServer = types.SimpleNamespace(  # type: ignore[attr-defined]
            instance=types.SimpleNamespace(prompt_queue=queue)
        )
        sys.modules["server"] = server
        _While.begun, _While.over = [], threading.Event()
        found["a_newer_while"] = a_newer_while(queue.mutex)
        _While.begun, _While.over = [], threading.Event()
        running[0] = "a prompt"
        found["a_prompt_is_running"] = the_while_passes(running)
    found["leaks"] = leaks.texts
    sys.stdout.write(json.dumps(found) + "\n")


main()

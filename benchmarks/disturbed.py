"""Are images right after one in the middle of which something happened, where a model does not fit? On a GPU.

    COMFYUI_PATH=... python -m benchmarks.disturbed --model flux --form fp8 --left 12 --output FILE

Part of the GPU's memory is held by another process, as in ``any_card``, and weights are in Dynamic VRAM. For each thing
that may happen an image is begun that it happens to, and ends or not. Then one is made that has to be the image of
before, answered by graphs, with no page of weights pinned behind it. The memory in use is noted. Prints a line for
each, and ends with 1 if an image is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from .any_card import MODELS, end_of_node, from_file, held
from .checkpoints import FORMATTED
from .host import reported, start_host
from .memory_modes import off
from .sampling import Sampler, counters, environment, when_done
from .variants import variant

if TYPE_CHECKING:
    import torch

_ALLOWED = 2e-2  # of the range: what rounding in another order explains in 16 bits, as in ``memory_modes``
_SHOWN = 4  # images before: blocks are recorded in the first
_STEP = 2  # in which something happens
_REPLAY = 30  # of that step's blocks
_TAKEN = 64 << 20  # bytes that are taken at once, until there are no more
_PINNED = 2  # in what comfy-aimdo tells of a page


@dataclass(frozen=True)
class Row:
    """An image behind one to which something happened.

    Attributes:
        what: happened.
        ended: the exception that ended the image to which it happened; None if it was made.
        off: the largest difference to ComfyUI's own image, as a share of its range.
        off_before: likewise to our image of before.
        served: calls that graphs answered.
        eager: calls that they did not.
        pinned: pages of weights that are pinned behind it.
        resident_bytes: of weights on the device.
        allocated_mib: by PyTorch.
        seconds: that it took.
    """

    what: str
    ended: str | None
    off: float
    off_before: float
    served: int
    eager: int
    pinned: int
    resident_bytes: int
    allocated_mib: float
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.off <= _ALLOWED and self.served > 0 and self.pinned == 0


def main() -> int:
    """Run the benchmark; print a line for each image and write JSON. Ends with 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="flux")
    parser.add_argument("--form", choices=FORMATTED, default="fp8", help="of the weights")
    parser.add_argument("--left", type=float, default=12, help="GiB of the device's memory")
    parser.add_argument("--size", help="image width x height in pixels (default: what the model was made for)")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--engine", default="inductor")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file of weights is written")
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    start_host(dynamic_vram=True)
    report = reported(lambda: _run(options), options.output)
    return 0 if all(Row(**row).is_right for row in report["rows"]) else 1


def _run(options: argparse.Namespace) -> dict[str, Any]:
    import comfy.model_management

    model, rows = from_file(options, options.form), list[Row]()
    with held(options.left):
        images = Images(options, model)
        for what, happening in HAPPENINGS.items():
            row = images.behind(what, happening)
            rows.append(row)
            print("right" if row.is_right else "WRONG", row, flush=True)
    return {
        "what": {key: value for key, value in vars(options).items() if key != "output"},
        "environment": environment(comfy.model_management.get_torch_device()),
        "rows": list(map(asdict, rows)),
    }


class Images:
    """Images of one model, ComfyUI's own and ours.

    Args:
        options: as the command line has them.
        model: a MODEL in Dynamic VRAM.

    Attributes:
        model: as we run it.
        sampler: makes images of it.
        load: makes the same model once more.
    """

    def __init__(self, options: argparse.Namespace, model: Any) -> None:
        from onediff_comfy.host.process.process import library

        library().background = None  # what comes often gets a graph of its own there, in the middle of any image
        self.sampler = Sampler(options.model, options.size, 1, options.steps)
        self.load = lambda: from_file(options, options.form)
        self._expected = self.made(model)
        self.model = variant(model, f"onediff-{options.engine}")
        for _ in range(_SHOWN):
            self._before = self.made(self.model)

    def made(self, model: Any, callback: Callable[..., None] | None = None) -> torch.Tensor:
        """Return an image, once the host has given back what a node leaves."""
        try:
            latent: torch.Tensor = self.sampler(model, 0, callback=callback)
            return latent
        finally:
            end_of_node()

    def behind(self, what: str, happening: Callable[[Images], None]) -> Row:
        """Have something happen, and return what the next image is like."""
        ended = _ended(lambda: happening(self))
        before, begun = counters(), when_done()
        image = self.made(self.model)
        seconds, after = when_done() - begun, counters()
        vbars = list(self.model.model.dynamic_vbars.values())
        return Row(
            what=what,
            ended=ended,
            off=off(image, self._expected),
            off_before=off(image, self._before),
            served=after["served"] - before["served"],
            eager=after["fallbacks"] - before["fallbacks"],
            pinned=sum(bool(page & _PINNED) for vbar in vbars for page in vbar.get_residency()),
            resident_bytes=sum(vbar.loaded_size() for vbar in vbars),
            allocated_mib=_allocated() / 2**20,
            seconds=round(seconds, 3),
        )


def _nothing(images: Images) -> None:
    images.made(images.model)


def _stopped(images: Images) -> None:
    """A person stops it: another thread says so, wherever the image is by then."""
    import comfy.model_management

    begun = time.perf_counter()
    images.made(images.model)
    timer = threading.Timer((time.perf_counter() - begun) / 2, comfy.model_management.interrupt_current_processing)
    timer.start()
    try:
        images.made(images.model)
    finally:
        timer.join()
        comfy.model_management.interrupt_current_processing(False)


def _failing_replay(error: Callable[[], BaseException]) -> Callable[[Images], None]:
    def happen(images: Images) -> None:
        """It fails in a block, between what is copied for its recording and what that gives."""
        import torch

        replay, begun, replays = torch.cuda.CUDAGraph.replay, [False], [0]

        def failing(graph: torch.cuda.CUDAGraph) -> None:
            replays[0] += begun[0]
            if replays[0] == _REPLAY:
                replays[0] += 1
                raise error()
            replay(graph)

        def callback(step: int, *_latents: Any) -> None:
            begun[0] = begun[0] or step >= _STEP

        with patch.object(torch.cuda.CUDAGraph, "replay", failing):
            images.made(images.model, callback)
        assert replays[0] > _REPLAY, "nothing was replayed"

    return happen


def _interruption() -> BaseException:
    import comfy.model_management

    return comfy.model_management.InterruptProcessingException()


def _no_memory() -> BaseException:
    import torch

    return torch.OutOfMemoryError("none, for a benchmark")


def _out_of_memory(images: Images) -> None:
    """Between two steps somebody in this process takes all of the memory, weights of the model among it."""
    import torch

    taken = list[torch.Tensor]()

    def callback(step: int, *_latents: Any) -> None:
        if step == _STEP:
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(_TAKEN, dtype=torch.uint8, device="cuda"))

    images.made(images.model, callback)


def _weights_taken(images: Images) -> None:
    """Between two steps all weights make way."""

    def callback(step: int, *_latents: Any) -> None:
        if step == _STEP:
            for vbar in images.model.model.dynamic_vbars.values():
                vbar.free_memory(1 << 60)
                vbar.prioritize()

    images.made(images.model, callback)


def _unloaded(_images: Images) -> None:
    import comfy.model_management

    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()


def _another_model(images: Images) -> None:
    images.made(images.load())


HAPPENINGS: dict[str, Callable[[Images], None]] = {
    "nothing": _nothing,
    "stopped by a person": _stopped,
    "stopped in a block": _failing_replay(_interruption),
    "a replay without memory": _failing_replay(_no_memory),
    "all memory taken": _out_of_memory,
    "all weights taken": _weights_taken,
    "unloaded": _unloaded,
    "another model": _another_model,
    "nothing again": _nothing,
}


def _ended(run: Callable[[], None]) -> str | None:
    """Return what ended ``run``, after the host has done what its executor does then; None if nothing did."""
    import comfy.model_management

    try:
        run()
    except (Exception, comfy.model_management.InterruptProcessingException) as error:
        ended, ran_out = type(error).__name__, comfy.model_management.is_oom(error)
    else:
        return None
    if ran_out:  # and no exception is handled here, which would hold what was computed
        comfy.model_management.unload_all_models()
    return ended


def _allocated() -> int:
    import torch

    return torch.cuda.memory_allocated()


if __name__ == "__main__":
    sys.exit(main())

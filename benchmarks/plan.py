"""What `make bench` measures: which scripts, of which variants, and what is compiled before any of them.

A plan's long jobs come first, so that several GPUs end at about the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .whole import PARTS


@dataclass(frozen=True)
class Step:
    """A process to run.

    Attributes:
        what: names it, in the report too.
        module: a script of this folder.
        arguments: of its command line, without ``--output``.
        gib: GPU memory that it takes at most, roughly.
    """

    what: str
    module: str
    arguments: tuple[str, ...]
    gib: int


@dataclass(frozen=True)
class Job:
    """Something to measure.

    Attributes:
        what: names it in the report.
        module: a script of this folder.
        arguments: of its command line, without variants.
        variants: that take turns; none if the script has no such option.
        compiled: further arguments, for each of the processes that make its graphs before.
        gib: GPU memory that a process takes at most, roughly.
        alone: it needs folders of its own with nothing in them.
        packages: a folder of Python packages that its processes find first: another PyTorch; none if empty.
    """

    what: str
    module: str
    arguments: str
    variants: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    gib: int = 8
    alone: bool = False
    packages: str = ""

    def measuring(self) -> Step:
        """Return the process that measures it."""
        chosen = ("--variants", ",".join(self.variants)) if self.variants else ()
        return Step(self.what, self.module, (*self.arguments.split(), *chosen), self.gib)

    def compiling(self) -> Iterator[Step]:
        """Yield the processes that make its graphs."""
        for more in self.compiled:
            arguments = (*self.arguments.split(), "--rounds", "1", *more.split())
            yield Step(f"{self.what} {more}".strip(), self.module, arguments, self.gib)


def with_other_torch(jobs: Sequence[Job], packages: str) -> Iterator[Job]:
    """Yield the jobs; those of first images once more with the PyTorch of a folder of packages."""
    for job in jobs:
        yield job
        if job.module == "restart":
            yield replace(job, what=f"{job.what}-other-torch", packages=packages)


_OURS = "onediff-inductor"
_BOTH = ("eager", _OURS)


def _whole(what: str, arguments: str, gib: int) -> Job:
    parts = tuple(f"--variants {_OURS} --part {part}" for part in PARTS)
    return Job(what, "whole", arguments, _BOTH, parts, gib)


def _steps(what: str, arguments: str, more: tuple[str, ...], gib: int) -> Job:
    """A model's steps. ``more`` are variants beside eager and ours; ComfyUI's EasyCache takes no compiling."""
    variants = ("eager", *more, _OURS)
    compiled = [f"--variants {name}" for name in variants if name != "eager" and not name.startswith("easycache")]
    return Job(what, "sampling", arguments, variants, tuple(compiled), gib)


_SDXL_LOSSY = (f"{_OURS}+fp8", f"{_OURS}+steps:0.5", "easycache:0.2")
_FLUX_LOSSY = (f"{_OURS}+fp8", f"{_OURS}+steps:0.1", "easycache:0.2")
_FLUX = "--model flux --steps 28 --rounds 3"
_SMALL_CARDS = "--steps 20 --rounds 3 --left 12,16,8,24"
_TINY_OURS = "onediff-eager"
_TINY_LOSSY = (f"{_TINY_OURS}+steps:0.1", "easycache:0.2")

PLANS = {
    "full": (
        _whole("wan-5s-fp8", "--model wan-5s --format fp8 --rounds 2", 18),
        _whole("qwen-image-fp8", "--model qwen-image --format fp8", 20),
        _steps("flux", _FLUX, ("torch_compile", *_FLUX_LOSSY), 25),
        _steps("flux-fp8", f"{_FLUX} --format fp8", (f"{_OURS}+steps:0.1",), 16),
        _steps("sdxl", "--model sdxl", ("torch_compile", *_SDXL_LOSSY), 8),
        Job(
            "quality-flux",
            "quality",
            "--model flux --steps 28 --seeds 1 --prompts 1",
            (_OURS, *_FLUX_LOSSY),
        ),
        Job("restart-sdxl", "restart", "--model sdxl", (_OURS,), alone=True),
        Job("background-sdxl", "any_size", "walk --model sdxl --changes 0 --patience 240", alone=True),
        Job("small-card", "any_card", "--model flux --formats fp8 --left 12 --steps 20", _BOTH, gib=16),
        _steps("sd15", "--model sd15 --rounds 7", ("torch_compile",), 4),
        Job("quality-sdxl", "quality", "--model sdxl --seeds 1", (_OURS, *_SDXL_LOSSY)),
        _whole("z-image", "--model z-image", 14),
        Job("vae", "vae", "--no-bucket --cases decode-1024,encode-1024", (), ("",)),
    ),
    "any-card": (
        Job("wan", "any_card", "--model wan-14b --formats fp8 --steps 4 --rounds 2 --left 12,8,16,24", _BOTH, gib=32),
        Job("flux-bf16", "any_card", f"--model flux --formats bf16 {_SMALL_CARDS}", _BOTH, gib=32),
        Job("flux-fp8", "any_card", f"--model flux --formats fp8 {_SMALL_CARDS}", _BOTH, gib=32),
    ),
    "tiny": (
        Job(
            "whole-tiny",
            "whole",
            "--model tiny --rounds 1",
            ("eager", _TINY_OURS),
            (f"--variants {_TINY_OURS} --part decoding", f"--variants {_TINY_OURS} --part text"),
        ),
        Job("tiny", "sampling", "--model tiny --rounds 2", ("eager", _TINY_OURS, *_TINY_LOSSY)),
        Job("restart-tiny", "restart", "--model tiny", ("eager", _TINY_OURS), alone=True),
        Job("quality-tiny", "quality", "--model tiny --seeds 1", (_TINY_OURS, *_TINY_LOSSY)),
    ),
}
"""By name: ``full`` and ``any-card``, all cells of small cards, need a GPU; ``tiny`` is for a CPU, to see that it runs.

Nothing of ``any-card`` can be compiled side by side, since other processes hold what a small card does not have.
"""

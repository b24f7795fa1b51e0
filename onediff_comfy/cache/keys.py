"""What makes two calls the same graph, as keys that are equal in every process and on every machine.

There are two, because they answer different questions at different prices:

* A ``CallKey`` is known before anything is traced. It names the target's code and the call's
  signature. Where it is known already, its graph is used at once.
* A ``GraphKey`` is known after the capture (seconds). It names what is computed: the digest of the
  graph itself. Many call keys lead to one graph key: after an update of the host that left the
  model's operators alone, with an extension that adds an option no model reads, from another
  class with the same forward. Compilation (minutes) is paid per graph key only.

Neither holds a weight value, an ``id``, a default ``repr`` or a path.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ..capture.call import Signature, TensorSpec
from ..capture.shape_range import IMAGE_AXES
from ..engines.base import Engine
from . import numeric_settings

PROCESSORS = Path("/proc/cpuinfo")
"""What Linux says of its processors."""
FORMAT_VERSION = 2
"""Raised when the meaning of a key or the calling convention of a compiled graph changes."""


def _digest(kind: str, fields: object) -> str:
    text = json.dumps([FORMAT_VERSION, kind, fields], sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


@dataclass(frozen=True)
class CompilerFingerprint:
    """Everything besides the graph that decides what machine code comes out.

    Attributes:
        engine: the engine's name.
        options: the engine's options.
        environment: versions of whatever takes part, the hardware, and torch's numeric settings.
    """

    engine: str
    options: Mapping[str, str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Variant:
    """What a person chose to give up for speed: nothing, if not said otherwise.

    Attributes:
        reusable: forwards are compiled whole and brief (see ``rewrites.step_cache_split``).
        fp8: large linear layers are computed in fp8 (see ``rewrites.fp8_linear``).
    """

    reusable: bool = False
    fp8: bool = False

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Variant:
        """Return what was chosen where code was compiled with these options."""
        return cls(reusable=_REUSE in options, fp8=_PRECISION in options)

    def __str__(self) -> str:
        """Return the variant for people, to stand behind the name of what is compiled."""
        return f"{', fp8' if self.fp8 else ''}{', step cache' if self.reusable else ''}"

    def options(self) -> dict[str, str]:
        """Return it as a compiler's options. An fp8 layer is one operator, whose arithmetic needs a name."""
        reuse = {_REUSE: "first block"} if self.reusable else {}
        return {**reuse, **({_PRECISION: "fp8 rows of large layers, by a product"} if self.fp8 else {})}


_REUSE, _PRECISION = "reuse", "precision"
LOSSLESS = Variant()
"""Nothing was given up for speed."""


def compiler(engine: Engine, device: torch.device, variant: Variant = LOSSLESS) -> CompilerFingerprint:
    """Describe ``engine`` as it would compile for ``device`` in this process."""
    environment = {
        "torch": torch.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "os": platform.system(),
        "machine": platform.machine(),
        **_hardware(device),
        **numeric_settings.described(),
        **engine.versions(device),
    }
    return CompilerFingerprint(engine.name, {**engine.options(), **variant.options()}, environment)


def _hardware(device: torch.device) -> dict[str, str]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "device": "cuda",
            "cuda": str(torch.version.cuda or torch.version.hip),
            "architecture": f"sm_{properties.major}{properties.minor}",
            "multiprocessors": str(properties.multi_processor_count),
            "cudnn": str(torch.backends.cudnn.version()),  # which attention it takes; pip updates it without torch
        }
    return {
        "device": device.type,
        "architecture": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(PROCESSORS),
    }


@functools.cache
def processor(listing: Path) -> str:
    """Name what the CPU can do: kernels are built for exactly this one, and another may not know their instructions.

    Args:
        listing: Linux's list of processors; elsewhere, where there is none, what the system calls the processor.
    """
    try:
        lines = listing.read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    able = {words for line in lines if line.startswith(("flags", "Features")) for words in [line.partition(":")[2]]}
    text = "\n".join(sorted(" ".join(sorted(words.split())) for words in able))
    return hashlib.sha256(text.encode()).hexdigest()[:16] if able else platform.processor()


@dataclass(frozen=True)
class CallKey:
    """Names a call before it is captured.

    Attributes:
        target: fingerprint of the module's code and weight metadata.
        signature: the call's signature.
        host: what identifies the host's code and the settings of it that steer a capture.
        compiler: what will compile it.
    """

    target: str
    signature: Signature
    host: str
    compiler: CompilerFingerprint

    @property
    def digest(self) -> str:
        return _digest("call", [self.target, self.signature.lines(), self.host, asdict(self.compiler)])


_LEAST_AXES = 3  # samples, tokens, width


def same_widths(signature: Signature) -> Signature:
    """Return a signature with all sizes left open but channels and widths, in which no graph is general.

    Calls that differ in these are of other kinds: a prompt of another text encoder, a latent of another VAE. That the
    host cannot compute one, for a node was connected wrongly, says nothing of the others.
    """
    open_ = signature.any_sizes().tensors
    kept = tuple(
        replace(spec, shape=(*spec.shape[:axis], size, *spec.shape[axis + 1 :])) if axis else spec
        for spec, (axis, size) in zip(open_, map(_width, signature.tensors), strict=True)
    )
    return replace(signature, tensors=kept)


def _width(spec: TensorSpec) -> tuple[int, int]:
    """Return which axis of a tensor is not of images, samples or tokens, and its size; (0, 0) if all are.

    Of two axes the second may be a length, as of tokens and of what masks them.
    """
    if len(spec.shape) < _LEAST_AXES or not spec.dtype.is_floating_point:
        return 0, 0
    axis = 1 if len(spec.shape) >= IMAGE_AXES else len(spec.shape) - 1
    return axis, spec.shape[axis]


def asker(target: str, signature: Signature) -> int:
    """Return a number of what asks for a graph, whatever the sizes of the call.

    Args:
        target: fingerprint of the module.
        signature: of a call.
    """
    return int(_digest("asker", [target, signature.any_sizes().lines()])[:12], 16)


@dataclass(frozen=True)
class GraphKey:
    """Names a compiled graph.

    Attributes:
        capture: digest of the captured graph, binding and constants.
        compiler: what compiles it.
        conditions: on sizes, where there is such a graph already that was compiled for others.
    """

    capture: str
    compiler: CompilerFingerprint
    conditions: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return _digest("graph", [self.capture, asdict(self.compiler), *([self.conditions] if self.conditions else [])])

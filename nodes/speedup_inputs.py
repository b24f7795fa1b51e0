"""The inputs that every speedup node has."""

from __future__ import annotations

from ..onediff_comfy.host.node_api import io
from ..onediff_comfy.settings import COMPILE_CHOICES, ENGINE_NAMES


def engine_input(what: str, otherwise: str) -> io.Combo.Input:
    """Return the input that chooses the engine for ``what``.

    Args:
        otherwise: what goes on where no engine can run ("the image is made")."""
    return io.Combo.Input(
        "engine",
        options=list(ENGINE_NAMES),
        default="auto",
        tooltip=(
            f"What compiles {what}. auto: the best engine this machine has. inductor: PyTorch's compiler, fastest on "
            "current GPUs. oneflow: OneFlow graphs. cudagraph: no compiling, only the overhead of launching is saved "
            "(NVIDIA). eager: the captured graph step by step, for finding faults, not faster. An engine that cannot "
            f"run here says why on the node, and {otherwise} without it."
        ),
    )


def compile_input(first: str, meanwhile: str) -> io.Combo.Input:
    """Return the input that chooses who waits for compiling.

    Args:
        first: what waits ("image").
        meanwhile: what goes on where nothing waits."""
    return io.Combo.Input(
        "compile",
        options=list(COMPILE_CHOICES),
        default=COMPILE_CHOICES[0],
        optional=True,
        tooltip=(
            f"Who waits for compiling. auto: nobody; {meanwhile} usual speed while another process compiles, and "
            f"faster once it is done. What no other process can compile, such as a patched model, the first {first} "
            "waits for. background: nobody in any case; what no other process can compile is not accelerated. "
            f"wait: the first {first}."
        ),
    )

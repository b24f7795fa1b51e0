"""What people are told where Inductor cannot compile: mostly, which compiler their machine lacks."""

from __future__ import annotations

import os
import shutil

from ...messages import first_line, message
from ..base import EngineError


def explained(error: Exception) -> EngineError:
    """Return what a person is told of an error that compiling raised: what their machine lacks, if it is that."""
    text = str(error)
    if "InvalidCxxCompiler" in text or type(error).__name__ == "InvalidCxxCompiler":
        tried = os.environ.get("CXX") or "g++, clang++"
        return EngineError(
            message(
                "no working C++ compiler was found (tried {tried}), and Inductor needs one; install g++ "
                "(Debian/Ubuntu: apt install g++; Windows: Visual Studio Build Tools) or set CXX to one",
                tried=tried,
            )
        )
    if "Failed to find C compiler" in text or (not _c_compiler() and "gcc" in text):
        return EngineError(
            message(
                "no C compiler was found, and Triton needs one to launch its kernels; install gcc "
                "(Debian/Ubuntu: apt install gcc) or set CC to one"
            )
        )
    if "Python.h" in text:
        return EngineError(
            message(
                "the headers of this Python are missing, and compiled code needs them; install them "
                "(Debian/Ubuntu: apt install python3-dev)"
            )
        )
    told = {"kind": type(error).__name__, "first_line": first_line(error)}
    return EngineError(message("Inductor failed: {kind}: {first_line}", **told))


def _c_compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")

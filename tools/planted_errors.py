"""Plant an error in each kernel and in what chooses it, one at a time, and see its tests fail.

    python -m tools.planted_errors            # all; those of kernels need an NVIDIA GPU
    python -m tools.planted_errors --cpu      # those that a CPU's tests find

Each is planted in a copy of the repository. Exit status 1 if a test passed in spite of an error, or failed without one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dev.environment import repository

PASSED, FAILED = 0, 1  # as pytest ends; anything else says that no test was run
_AT_ONCE = max(1, (os.cpu_count() or 2) // 3)
_COPIED = ("benchmarks", "dev", "locales", "nodes", "onediff_comfy", "tests", "tools", "web", "workflows")
_COPIED_FILES = ("__init__.py", "pyproject.toml")


@dataclass(frozen=True)
class Error:
    """A change that makes something wrong.

    Attributes:
        what: says what is wrong then.
        file: that has it, from the package's folder.
        right: what is there, once.
        wrong: what is put in its place.
        tests: of tests/unit, as pytest is told.
        gpu: only a GPU's tests can find it.
    """

    what: str
    file: str
    right: str
    wrong: str
    tests: str
    gpu: bool = True


_KERNELS, _ATTENTION = "engines/inductor/kernels.py", "engines/inductor/attention_kernels.py"
_NORM_ROPE, _FEW_BITS = "engines/inductor/passes/norm_rope.py", "engines/inductor/passes/few_bits.py"
_FP8, _FORMS = "capture/rewrites/fp8_linear.py", "capture/rewrites/op_substitutions.py"
_OF_KERNEL, _OF_ATTENTION = "test_norm_rope.py -k the_kernel", "test_attention_kernels.py -k wide_attention"

ERRORS = (
    Error("norm: no epsilon", _KERNELS, " / WIDTH + eps)", " / WIDTH)", _OF_KERNEL),
    Error("norm: a sum for a mean", _KERNELS, "keep_dims=True) / WIDTH", "keep_dims=True)", _OF_KERNEL),
    Error("norm: one scale for all channels", _KERNELS, "tl.load(scale + channel)", "tl.load(scale)", _OF_KERNEL),
    Error("norm: rounded to fewer bits", _KERNELS, "normed.to(values.dtype)", "normed.to(tl.bfloat16)", _OF_KERNEL),
    Error("rotation: turned back", _KERNELS, "tl.split(for_even)", "tl.split(for_odd)", _OF_KERNEL),
    Error("rotation: a sign", _KERNELS, "odd_even * even + odd_odd", "odd_even * even - odd_odd", _OF_KERNEL),
    Error("rotation: of the token before", _KERNELS, "tl.minimum(token + first,", "tl.minimum(token,", _OF_KERNEL),
    Error("rotation: beyond the last", _KERNELS, "tl.minimum(token + first, last)", "token + first", _OF_KERNEL),
    Error("rotation: the first sample's for all", _KERNELS, "batch * rotations_batch + ", "", _OF_KERNEL),
    Error("heads: written where there are none", _KERNELS, "values.dtype), mask=is_head", "values.dtype)", _OF_KERNEL),
    Error("heads: of the first sample", _KERNELS, "x + batch * x_batch + ", "x + ", _OF_KERNEL),
    Error("heads: not their own stride", _KERNELS, "head * x_head", "head * WIDTH", _OF_KERNEL),
    Error(
        "places: in 32 bits", _KERNELS, "token = tl.program_id(0).to(tl.int64)", "token = tl.program_id(0)", _OF_KERNEL
    ),
    Error("parts: all in the first one's place", _NORM_ROPE, "first = first + part", "first = 0 * part", _OF_KERNEL),
    Error(
        "parts: one epsilon for all",
        _NORM_ROPE,
        "_Norm(part, scale, epsilon)",
        "_Norm(part, scale, eps[0])",
        _OF_KERNEL,
    ),
    Error(
        "parts: one scale for all",
        _NORM_ROPE,
        "_Norm(part, scale, epsilon)",
        "_Norm(part, scales[0], epsilon)",
        _OF_KERNEL,
    ),
    Error("softmax: no scale", _KERNELS, 'float("-inf")) * scale', 'float("-inf"))', _OF_ATTENTION),
    Error(
        "softmax: powers that overflow", _KERNELS, "tl.exp(values - tl.max(values, 0))", "tl.exp(values)", _OF_ATTENTION
    ),
    Error("softmax: what is beyond a row", _KERNELS, 'other=float("-inf")', "other=0.0", _OF_ATTENTION),
    Error("softmax: the first row for all", _KERNELS, "tl.program_id(0).to(tl.int64) * columns", "0", _OF_ATTENTION),
    Error("softmax: the wrong 16 bits", _ATTENTION, "dtype == torch.float16", "dtype != torch.float16", _OF_ATTENTION),
    Error(
        "softmax: too few columns",
        _ATTENTION,
        "1 << (columns - 1)",
        "1 << (columns - 2)",
        "test_attention_kernels.py -k holds_a_row_whole",
        gpu=False,
    ),
    Error(
        "attention: scores in 16 bits",
        _ATTENTION,
        "torch.bmm(left, right, out_dtype=torch.float32)",
        "torch.bmm(left, right).float()",
        _OF_ATTENTION,
    ),
    Error(
        "attention: cuDNN's without a scale",
        _ATTENTION,
        "compute_log_sumexp=False, scale=scale",
        "compute_log_sumexp=False, scale=1.0",
        "test_attention_kernels.py -k cudnns_attention_is_no_worse",
    ),
    Error(
        "8 bits: conversion that does not saturate",
        _FEW_BITS,
        "exact = new.call_function(aten.div.Tensor",
        "exact = new.call_function(aten.mul.Tensor",
        "test_scaled_fp8.py -k saturates_as_eager",
    ),
    Error(
        "fp8: rows by another's scale",
        _FP8,
        "scale_a=left_scale,",
        "scale_a=left_scale.flip(0),",
        "test_fp8_linear.py -k 'scales_of_their_own or has_8_bit_units'",
    ),
    Error(
        "fp8: one scale for all rows",
        _FP8,
        "rows.abs().amax(-1, keepdim=True)",
        "rows.abs().amax().expand(rows.shape[0], 1)",
        "test_fp8_linear.py -k scales_of_their_own",
        gpu=False,
    ),
    Error("fp8: no bias", _FP8, "bias=bias,", "bias=None,", "test_fp8_linear.py -k off_by_three_percent", gpu=False),
    Error(
        "fp8: beyond the largest number",
        _FP8,
        ".div(_LARGEST)",
        ".div(_LARGEST * 1.2)",
        "test_fp8_linear.py -k leaves_what_8_bits_hold",
        gpu=False,
    ),
    Error("group norm: no epsilon", _FORMS, "+ eps", "+ 0 * eps", "test_general.py -k group_norm", gpu=False),
    Error(
        "upsampling: pixels changed over",
        "engines/inductor/passes/upsampling.py",
        "(0, 1), (1, 0), (1, 1)",
        "(1, 0), (0, 1), (1, 1)",
        "test_upsampling.py -k same_convolution",
        gpu=False,
    ),
    Error(
        "rows: too long for registers",
        "engines/inductor/while_compiling/row_reductions.py",
        "MOST_ELEMENTS if hint",
        "2 * MOST_ELEMENTS if hint",
        "test_row_reductions.py",
        gpu=False,
    ),
)


def main() -> int:
    """Plant them all; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="only what a CPU's tests find")
    options = parser.parse_args()
    errors = [error for error in ERRORS if not (options.cpu and error.gpu)]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        rights = {tests: threads.submit(_ending, None, tests) for tests in dict.fromkeys(e.tests for e in errors)}
        wrongs = {error: threads.submit(_ending, error, error.tests) for error in errors}
        wanted = [_said(f"right: {tests}", found.result(), PASSED) for tests, found in rights.items()]
        wanted += [_said(error.what, found.result(), FAILED) for error, found in wrongs.items()]
    print(f"{sum(wanted)} of {len(wanted)} as they should be")
    return int(not all(wanted))


def _said(what: str, ending: tuple[int, str], wanted: int) -> bool:
    status, summary = ending
    print(f"{'seen' if status == wanted else 'NOT SEEN'}: {what} ({summary})", flush=True)
    return status == wanted


def _ending(error: Error | None, tests: str) -> tuple[int, str]:
    """Return pytest's exit status and its last line for a copy of the repository that has an error, or none."""
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        copy = Path(name)
        for each in _COPIED:
            shutil.copytree(repository() / each, copy / each, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for each in _COPIED_FILES:
            shutil.copy2(repository() / each, copy)
        if error is not None:
            path = copy / "onediff_comfy" / error.file
            path.write_text(planted(error, path.read_text()))
        paths = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "TRITON_CACHE_DIR": str(copy / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(copy / "inductor"),
            "ONEDIFF_CACHE_DIR": str(copy / "cache"),
        }
        file, *more = shlex.split(tests)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/unit/{file}", *more]
        ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        return ended.returncode, (ended.stdout.strip().splitlines() or [ended.stderr[-200:]])[-1].strip("= ")


def planted(error: Error, source: str) -> str:
    """Return a file's text with an error.

    Raises:
        ValueError: the text is not there just once, so the file has changed.
    """
    if source.count(error.right) != 1:
        raise ValueError(f"{error.what}: {error.file} has {error.right!r} {source.count(error.right)} times, not once")
    return source.replace(error.right, error.wrong)


if __name__ == "__main__":
    sys.exit(main())

"""cache/keys.py: keys that differ whenever anything differs, and are equal in every process."""

from __future__ import annotations

import dataclasses
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_comfy.cache import keys
from onediff_comfy.cache.keys import CallKey, CompilerFingerprint, GraphKey, compiler
from onediff_comfy.capture.call import Signature, split
from onediff_comfy.engines.base import Engine
from onediff_comfy.engines.cudagraph import CudaGraphEngine
from onediff_comfy.engines.eager import EagerEngine
from onediff_comfy.engines.inductor.engine import InductorEngine

CPU = torch.device("cpu")
# As on a machine with a GPU: every entry of the environment that there is.
COMPILER = CompilerFingerprint(
    engine="inductor",
    options={"mode": "default", "max_autotune": "False"},
    environment={
        "torch": "2.13.0",
        "python": "3.11",
        "os": "Linux",
        "machine": "x86_64",
        "device": "cuda",
        "cuda": "12.9",
        "architecture": "sm_90",
        "multiprocessors": "132",
        "tf32": "highest,True",
        "reduced_precision": "True,True,False",
        "deterministic": "False",
        "triton": "3.5.0",
    },
)


def call_signature(**changes: Any) -> Signature:
    arguments = {
        "x": torch.zeros(2, 4, 8, 16, dtype=torch.float16),
        "timestep": torch.zeros(2),
        "context": torch.zeros(2, 77, 32),
        "y": None,
        "control": {"input": [torch.zeros(2, 3)], "scale": 1.0},
        "transformer_options": {"sigmas": torch.zeros(1), "cond_or_uncond": [0, 1], "patches": None},
    } | changes
    return split(
        {name: value for name, value in arguments.items() if value is not ...},
        options_name="transformer_options",
        options_read=("sigmas",),
    ).signature


CALL_KEY = CallKey("a" * 64, call_signature(), "b" * 64, COMPILER)
GRAPH_KEY = GraphKey("c" * 64, COMPILER)


def variants(value: Any) -> Iterator[tuple[str, Any]]:
    """``value`` with one thing in it changed, for each thing in it, however deep.

    Raises:
        TypeError: it holds something this function has no change for; add one.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            for path, changed in variants(getattr(value, field.name)):
                yield f".{field.name}{path}", dataclasses.replace(value, **{field.name: changed})
    elif isinstance(value, Mapping):
        for name in value:
            for path, changed in variants(value[name]):
                yield f"[{name}]{path}", {**value, name: changed}
            yield f"[{name}] gone", {other: value[other] for other in value if other != name}
            yield f"[{name}] renamed", {("renamed" if other == name else other): value[other] for other in value}
        yield "[new]", {**value, "new": "1"}
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            for path, changed in variants(item):
                yield f"[{index}]{path}", (*value[:index], changed, *value[index + 1 :])
            yield f"[{index}] gone", value[:index] + value[index + 1 :]
        yield "[new]", (*value, "new")
    elif isinstance(value, str):
        yield "", value + "x"
    elif isinstance(value, int):
        yield "", value + 1
    elif isinstance(value, torch.dtype):
        yield "", torch.float64
    elif isinstance(value, torch.device):
        yield " type", torch.device("meta")
        yield " index", torch.device(value.type, 1)
    else:
        raise TypeError(f"no change known for a {type(value).__qualname__}")


VARIANTS = {
    f"{type(base).__name__}{path}": (base, changed)
    for base in (CALL_KEY, GRAPH_KEY)
    for path, changed in variants(base)
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_one_difference_changes_the_digest(variant: str) -> None:
    base, changed = VARIANTS[variant]
    assert changed.digest != base.digest


def test_the_variants_reach_every_field() -> None:
    """Guards the test above: all fields of both keys, of the signature and of the compiler are in it."""
    for kind, prefix in [
        (CallKey, "CallKey."),
        (GraphKey, "GraphKey."),
        (Signature, "CallKey.signature."),
        (CompilerFingerprint, "CallKey.compiler."),
        (CompilerFingerprint, "GraphKey.compiler."),
    ]:
        for field in dataclasses.fields(kind):
            assert any(name.startswith(prefix + field.name) for name in VARIANTS), (kind, field.name)


def test_no_two_variants_share_a_digest() -> None:
    digests = [changed.digest for _, changed in VARIANTS.values()]
    assert len(set(digests)) == len(digests)


X = (2, 4, 8, 16)
CALLS: dict[str, dict[str, Any]] = {
    "batch": {"x": torch.zeros(3, *X[1:], dtype=torch.float16)},
    "channels": {"x": torch.zeros(2, 5, 8, 16, dtype=torch.float16)},
    "height": {"x": torch.zeros(2, 4, 9, 16, dtype=torch.float16)},
    "width": {"x": torch.zeros(2, 4, 8, 17, dtype=torch.float16)},
    "height and width swapped": {"x": torch.zeros(2, 4, 16, 8, dtype=torch.float16)},
    "dtype": {"x": torch.zeros(X, dtype=torch.bfloat16)},
    "device": {"x": torch.zeros(X, dtype=torch.float16, device="meta")},
    "tokens": {"context": torch.zeros(2, 154, 32)},
    "None becomes a tensor": {"y": torch.zeros(2, 8)},
    "None becomes absent": {"y": ...},
    "a tensor becomes None": {"context": None},
    "a tensor becomes absent": {"context": ...},
    "new argument": {"guidance": None},
    "renamed argument": {"context": ..., "contexts": torch.zeros(2, 77, 32)},
    "number of a list": {"control": {"input": [torch.zeros(2, 3)] * 2, "scale": 1.0}},
    "plain value": {"control": {"input": [torch.zeros(2, 3)], "scale": 0.5}},
    "plain type": {"control": {"input": [torch.zeros(2, 3)], "scale": 1}},
    "option gone": {"transformer_options": {"sigmas": torch.zeros(1), "cond_or_uncond": []}},
    "new option": {
        "transformer_options": {"sigmas": torch.zeros(1), "cond_or_uncond": [], "patches": None, "patches_replace": {}}
    },
    "option no longer None": {
        "transformer_options": {"sigmas": torch.zeros(1), "cond_or_uncond": [], "patches": {"attn1": 1}}
    },
    "shape of an option that is read": {
        "transformer_options": {"sigmas": torch.zeros(2), "cond_or_uncond": [], "patches": None}
    },
}


@pytest.mark.parametrize("change", CALLS)
def test_calls_that_differ_have_different_keys(change: str) -> None:
    assert dataclasses.replace(CALL_KEY, signature=call_signature(**CALLS[change])).digest != CALL_KEY.digest


def test_calls_that_differ_in_values_of_tensors_or_of_unread_options_share_a_key() -> None:
    same = call_signature(
        timestep=torch.ones(2),
        transformer_options={"patches": None, "cond_or_uncond": object(), "sigmas": torch.ones(1)},
    )
    assert dataclasses.replace(CALL_KEY, signature=same).digest == CALL_KEY.digest


def test_the_order_of_options_and_environment_does_not_matter() -> None:
    turned = CompilerFingerprint(
        COMPILER.engine,
        dict(reversed(COMPILER.options.items())),
        dict(reversed(COMPILER.environment.items())),
    )
    assert GraphKey(GRAPH_KEY.capture, turned).digest == GRAPH_KEY.digest
    assert dataclasses.replace(CALL_KEY, compiler=turned).digest == CALL_KEY.digest


def test_a_call_key_is_never_a_graph_key() -> None:
    assert GraphKey("a", COMPILER).digest != CallKey("a", Signature("forward", (), (), ()), "", COMPILER).digest


def test_a_new_format_version_changes_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (CALL_KEY.digest, GRAPH_KEY.digest)
    monkeypatch.setattr(keys, "FORMAT_VERSION", keys.FORMAT_VERSION + 1)
    assert CALL_KEY.digest != before[0]
    assert GRAPH_KEY.digest != before[1]


def test_digests_are_sha256_in_hex() -> None:
    assert re.fullmatch("[0-9a-f]{64}", CALL_KEY.digest)
    assert re.fullmatch("[0-9a-f]{64}", GRAPH_KEY.digest)


def test_a_key_of_known_parts_is_the_same_for_ever() -> None:
    """A store on disk depends on it. If this fails on purpose, raise FORMAT_VERSION and put the new digest here."""
    known = GraphKey("capture", CompilerFingerprint("engine", {"b": "2", "a": "1"}, {"torch": "é"})).digest
    assert known == "fe1257cb7d6f8ae645c51b05d7eabebf0b201b17182a165f65cf4fbd3c916bf7"


@pytest.mark.parametrize("kind", ["signature", "call_key", "graph_key"])
def test_the_same_in_every_process(kind: str, identities: list[dict[str, Any]]) -> None:
    """Two fresh processes with different hash seeds, weights and addresses."""
    assert identities[0][kind] == identities[1][kind]


# -- compiler ----------------------------------------------------------------------------------


def test_compiler_describes_this_process() -> None:
    described = compiler(InductorEngine(), CPU)
    assert described.engine == "inductor"
    expected = {
        "torch": torch.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "os": platform.system(),
        "machine": platform.machine(),
        "device": "cpu",
        "architecture": torch.backends.cpu.get_cpu_capability(),
    }
    assert {name: described.environment[name] for name in expected} == expected
    assert {"tf32", "reduced_precision", "deterministic", "triton"} <= set(described.environment)
    assert all(isinstance(value, str) for value in described.environment.values())


@pytest.mark.parametrize("name", ["flags", "Features"])
def test_graphs_of_a_cpu_with_other_instructions_have_other_keys(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor builds for the CPU at hand (-march=native): another one would end the process with SIGILL."""

    def key(file: str, *processors: str) -> str:
        (tmp_path / file).write_text("\n\n".join(f"model name : x\n{name} : {able}" for able in processors))
        monkeypatch.setattr(keys, "PROCESSORS", tmp_path / file)
        return keys.GraphKey("c" * 64, compiler(InductorEngine(), CPU)).digest

    ours = key("ours", "sse avx2 avx512f", "sse avx2 avx512f")
    assert key("same", "avx2 avx512f sse") == ours
    assert key("older", "sse avx2", "sse avx2") != ours
    assert key("newer", "sse avx2 avx512f amx_tile") != ours
    assert key("uneven", "sse avx2 avx512f", "sse avx2") != ours


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_compiler_describes_the_gpu() -> None:
    environment = compiler(InductorEngine(), torch.device("cuda")).environment
    assert {"device", "cuda", "architecture", "multiprocessors", "cudnn"} <= set(environment)


@pytest.mark.parametrize(
    ("name", "patch"),
    [
        ("os", lambda monkeypatch: monkeypatch.setattr(platform, "system", lambda: "Windows")),
        ("machine", lambda monkeypatch: monkeypatch.setattr(platform, "machine", lambda: "arm64")),
    ],
)
def test_another_machine_is_another_environment(
    name: str, patch: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compiler(EagerEngine(), CPU).environment
    patch(monkeypatch)
    after = compiler(EagerEngine(), CPU).environment
    assert {entry for entry in before if before[entry] != after[entry]} == {name}


@pytest.mark.parametrize("name", ["tf32", "cudnn", "reduced_precision", "deterministic"])
def test_torchs_numeric_settings_are_in_the_environment(name: str) -> None:
    before = compiler(EagerEngine(), CPU)
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    reduced = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    try:
        if name == "tf32":
            torch.set_float32_matmul_precision("high")
        elif name == "cudnn":
            torch.backends.cudnn.allow_tf32 = not cudnn
        elif name == "reduced_precision":
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = not reduced
        else:
            torch.use_deterministic_algorithms(True)
        assert compiler(EagerEngine(), CPU) != before
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = reduced
        torch.use_deterministic_algorithms(False)
    assert compiler(EagerEngine(), CPU) == before


@pytest.mark.parametrize("place", ["", "cuda.matmul", "cudnn.conv"])
def test_settings_by_their_newer_names_are_in_the_environment_and_are_taken_over(place: str) -> None:
    """After one of them PyTorch raises where it is asked by the older names."""
    script = f"""
import functools, torch
from onediff_comfy.cache import numeric_settings
if not hasattr(torch.backends, "fp32_precision"):
    print("older")
    raise SystemExit
before = numeric_settings.described()
place = functools.reduce(getattr, filter(None, {place!r}.split(".")), torch.backends)
place.fp32_precision = "ieee" if place.fp32_precision == "tf32" else "tf32"
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
torch.use_deterministic_algorithms(True)
now, values = numeric_settings.described(), numeric_settings.values()
assert {{name for name in now if now[name] != before[name]}} == set(now), (before, now)
place.fp32_precision = "none"
torch.backends.cuda.enable_flash_sdp(True)
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
torch.use_deterministic_algorithms(False)
numeric_settings.apply(values)
assert numeric_settings.described() == now, (now, numeric_settings.described())
print("same")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() in ("same", "older"), done.stderr


def test_which_attention_kernels_are_allowed_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture names cuDNN's kernel where eager would take it; whoever switches that off must not be given it."""
    before = compiler(EagerEngine(), CPU)
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(not allowed)
        assert compiler(EagerEngine(), CPU) != before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)
    assert compiler(EagerEngine(), CPU) == before
    monkeypatch.setenv("TORCH_CUDNN_SDPA_PREFERRED", "0")
    assert compiler(EagerEngine(), CPU) != before


def test_an_engines_own_options_and_versions_are_in_the_key() -> None:
    class Tuned(EagerEngine):
        def options(self) -> Mapping[str, str]:
            return {"level": "3"}

        def versions(self, device: torch.device) -> Mapping[str, str]:
            return {"compiler": "9"}

    described = compiler(Tuned(), CPU)
    assert described.options == {"level": "3"}
    assert described.environment["compiler"] == "9"


def test_engines_have_names_of_their_own() -> None:
    engines: list[Engine] = [EagerEngine(), InductorEngine(), CudaGraphEngine()]
    assert len({GraphKey("c", compiler(engine, CPU)).digest for engine in engines}) == 3

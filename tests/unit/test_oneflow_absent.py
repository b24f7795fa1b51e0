"""The OneFlow engine where there is no OneFlow, and the environment that its tests are given."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dev import oneflow_environment
from dev.cuda_stubs import make_stand_ins
from onediff_comfy.engines import choose
from onediff_comfy.engines.base import EngineError


@pytest.mark.usefixtures("no_oneflow")
def test_without_oneflow_the_message_says_how_to_install_it_and_in_which_python() -> None:
    with pytest.raises(EngineError) as refusal:
        choose("oneflow", torch.device("cpu"))
    for words in ("not installed in this Python", "onediff-comfy[oneflow]", "Python 3.10 or older", "inductor"):
        assert words in str(refusal.value)


def test_a_machine_without_the_right_python_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEFLOW_BASE_PYTHON", "/nonexistent/python")
    monkeypatch.setattr(oneflow_environment.sys, "platform", "linux")
    monkeypatch.setattr(oneflow_environment.platform, "machine", lambda: "x86_64")
    reason = oneflow_environment.impossible()
    assert reason is not None and "no Python 3.10" in reason and "ONEFLOW_BASE_PYTHON" in reason


@pytest.mark.skipif(
    sys.platform != "linux" or any(shutil.which(tool) is None for tool in ("gcc", "nm", "readelf")),
    reason="stand-ins are made with gcc, nm and readelf, for Linux",
)
def test_a_stand_in_satisfies_the_loader_and_answers_that_there_is_no_device(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere" / "libcudart.so.99"
    real.parent.mkdir()
    (tmp_path / "real.c").write_text("int cudaGetDeviceCount(void) { return 0; }\n")
    (tmp_path / "real.map").write_text("libcudart.so.99 { cudaGetDeviceCount; };\n")
    (tmp_path / "user.c").write_text(
        "int cudaGetDeviceCount(void);\nint devices(void) { return cudaGetDeviceCount(); }\n"
    )
    build = ["gcc", "-shared", "-fPIC", "-o"]
    version = f"-Wl,-soname,{real.name},--version-script={tmp_path / 'real.map'}"
    subprocess.run([*build, str(real), str(tmp_path / "real.c"), version], check=True)
    user = tmp_path / "libuser.so"
    subprocess.run([*build, str(user), str(tmp_path / "user.c"), str(real), "-Wl,-rpath,$ORIGIN"], check=True)
    with pytest.raises(OSError, match=r"libcudart\.so\.99"):
        ctypes.CDLL(str(user))
    assert make_stand_ins([user], tmp_path) == ["libcudart.so.99"]
    assert ctypes.CDLL(str(user)).devices() == 100

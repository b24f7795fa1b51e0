"""The OneFlow engine on a card that it has no kernels for (Hopper, Blackwell), where a launch would end the process.

Needs such a card, and no OneFlow: what pip would install is known. Where one is on the path its kernels are read off
its library, and it is not imported either.
"""

from __future__ import annotations

import sys

import pytest
import torch
from pictures import FAMILIES, Counters, assert_same_picture, assert_untouched, latent_of

from dev.host import ComfyServer
from onediff_comfy.engines import choose
from onediff_comfy.engines.base import EngineError
from onediff_comfy.engines.oneflow.architectures import OF_THE_RELEASE, runs_on


def _has_such_a_card() -> bool:
    if not torch.cuda.is_available() or torch.version.hip:
        return False
    capability = torch.cuda.get_device_capability()
    return not any(runs_on(kernels, capability) for kernels in OF_THE_RELEASE)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _has_such_a_card(), reason="needs an NVIDIA GPU that OneFlow has no kernels for"),
]


def assert_explained(reason: str) -> None:
    """It says which card this is, what OneFlow has kernels for, and which engine to take."""
    major, minor = torch.cuda.get_device_capability()
    assert f"this GPU is sm_{major}{minor}" in reason
    assert all(str(kernels) in reason for kernels in OF_THE_RELEASE)
    assert reason.endswith("inductor is the engine for this card")


def test_the_card_is_refused_without_a_look_into_oneflow() -> None:
    with pytest.raises(EngineError) as refusal:
        choose("oneflow", torch.device("cuda"))
    assert_explained(str(refusal.value))
    assert "oneflow" not in sys.modules


def test_a_model_runs_as_comfyui_runs_it_and_fast_with_the_engine_that_was_named(server: ComfyServer) -> None:
    family = FAMILIES["sd15"]
    plain = latent_of(server.run(family.workflow(1)))
    counters, said_before = Counters(server), len(server.log_text())
    result = server.run(family.workflow(1, "oneflow"))
    assert_untouched(latent_of(result), plain)
    ((reason, times),) = counters.fallbacks.items()
    assert_explained(reason)
    assert times == family.steps
    assert (counters.captured, counters.compiled, counters.served) == (0, 0, 0)
    assert ("speedup", f"not accelerated: {reason}") in result.texts
    log = server.log_text()[said_before:].splitlines()
    assert len([line for line in log if reason in line and "WARNING" in line]) == 1  # once, not once a step
    counters = Counters(server)
    assert_same_picture(latent_of(server.run(family.workflow(1, "inductor"))), plain)
    assert (counters.served, counters.fallbacks) == (family.steps, {})

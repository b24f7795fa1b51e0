"""Models on two GPUs: ComfyUI's MultiGPU CFG Split, which calls a model in a thread for each, and its choice of one."""

from __future__ import annotations

import pytest
import torch
from pictures import FAMILIES, Counters, TinyFamily, assert_same_picture, compiled_twice, latent_of

from dev.host import ComfyServer
from tools.workflows import Workflow

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

# Where the node that chooses GPUs is: "behind" the speedup node, as ComfyUI advises, or "before" it.
SPLIT, CHOICE = ("MultiGPU_WorkUnits", {"max_gpus": 2}), ("SelectModelDevice", {"device": "gpu:1"})


def workflow_with(
    node: tuple[str, dict[str, object]], family: TinyFamily, seed: int, engine: str | None, place: str
) -> Workflow:
    """Text to image with another node before or behind OneDiff Model Speedup, or alone."""
    workflow = family.workflow(seed, engine, size=256)
    class_type, inputs = node
    workflow["other"] = {"class_type": class_type, "inputs": {"model": ["loader", 0], **inputs}}
    first, last = ("other", "speedup") if place == "before" else ("speedup", "other")
    if engine is None:
        first = last = "other"
    else:
        workflow[last]["inputs"]["model"] = [first, 0]
    workflow["sampler"]["inputs"]["model"] = [last, 0]
    return workflow


@pytest.mark.parametrize("place", ["behind", "before"])
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_cfg_split_over_two_gpus_is_served_on_both(server: ComfyServer, name: str, place: str) -> None:
    """The first image compiles for each GPU, others use both graphs at the same time, the last one after a reload."""
    family = FAMILIES[name]
    logged_before = len(server.log_text())
    expected = {seed: latent_of(server.run(family.workflow(seed, size=256))) for seed in (1, 2, 3, 4, 5)}
    split = latent_of(server.run(workflow_with(SPLIT, family, 1, None, place)))
    assert_same_picture(split, expected[1])  # or the host's own split is another picture, and proves nothing of ours
    counters = Counters(server)
    for seed in (1, 2, 3):  # a workflow that was run before is answered from the server's own cache
        assert_same_picture(
            latent_of(server.run(workflow_with(SPLIT, family, seed, "inductor", place))), expected[seed]
        )
    assert counters.fallbacks == {}
    assert counters.served == 3 * 2 * family.steps  # each step asks both GPUs
    assert compiled_twice(server) == []
    server.free()
    again = Counters(server)
    for seed in (4, 5):  # launched, and recorded for both GPUs when it is over; replayed
        assert_same_picture(
            latent_of(server.run(workflow_with(SPLIT, family, seed, "inductor", place))), expected[seed]
        )
        assert again.recorded == 2
    assert (again.compiled, again.captured, again.fallbacks) == (0, 0, {})
    assert "Traceback" not in server.log_text()[logged_before:]


@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_model_on_the_second_gpu_is_served_there(server: ComfyServer, place: str) -> None:
    family = FAMILIES["sd15"]
    expected = latent_of(server.run(workflow_with(CHOICE, family, 3, None, place)))
    counters = Counters(server)
    for _ in range(2):
        server.free()
        assert_same_picture(latent_of(server.run(workflow_with(CHOICE, family, 3, "inductor", place))), expected)
    assert counters.fallbacks == {}
    assert counters.served == 2 * family.steps

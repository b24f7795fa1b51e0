"""The gateway speaks ComfyUI's API, loses no prompt, and runs none to two results."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from fleets import Fleet, held, new_id, nothing, picture
from PIL import Image

from dev.environment import repository
from dev.host import HostError, PromptRejected
from dev.running_server import RunningServer

MOST_MILLISECONDS = 15
"""That the gateway may add to a prompt that does nothing."""

ROUNDS = 6

PACED = frozenset({"status", "progress", "progress_state"})
"""Of which ComfyUI sends fewer if they come fast: of the steps between the first and the last, one in 0.1 seconds."""

SECONDS_BETWEEN_ROUNDS = 10


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """The file that lets a test's held prompts go on; at its end it is there in any case."""
    file = tmp_path / "go"
    yield file
    file.touch()


def _pictures(server: RunningServer, entry: dict[str, Any]) -> list[bytes]:
    assert entry["status"]["status_str"] == "success", entry["status"]
    return [server.content(shown) for output in entry["outputs"].values() for shown in output.get("images", ())]


def _pixels(content: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(content)))


def test_a_client_of_comfyui_needs_no_change(fleet: Fleet) -> None:
    """The project's own: WebSocket, /prompt, /history and /view, here and at a worker."""
    through = fleet.gateway.run(picture(1))
    made_by = _tag_of({"outputs": through.outputs}).partition(".")[2]
    other = next(worker for worker in fleet.ready() if worker["run"] != made_by)  # which has nothing of it in its cache
    direct = fleet.worker(other).run(picture(1))
    assert through.status == direct.status == "success"
    assert np.array_equal(_pixels(through.images[0][1]), _pixels(direct.images[0][1]))
    kinds, expected = (Counter(kind for kind, _ in result.events if kind not in PACED) for result in (through, direct))
    assert kinds == expected
    assert {"execution_start", "executed", "execution_success"} <= kinds.keys()
    for result in (through, direct):
        steps = [data["value"] for kind, data in result.events if kind == "progress"]
        assert (steps[0], steps[-1]) == (1, 3) and "progress_state" in dict(result.events)


def test_what_comfyui_refuses_is_refused_with_its_own_words(fleet: Fleet) -> None:
    wrong = picture(2)
    wrong["loader"]["inputs"]["ckpt_name"] = "absent.safetensors"
    worker = fleet.worker(fleet.ready()[0])
    said = []
    for server in (fleet.gateway, worker):
        with pytest.raises(PromptRejected) as raised:
            server.run(wrong)
        said.append(raised.value.body)
    assert said[0] == said[1]
    assert "loader" in said[0]["node_errors"]
    for body in ({}, {"prompt": nothing("a"), "prompt_id": "no UUID"}):
        assert _refusal(fleet.gateway, body)["error"]["type"] == _refusal(worker, body)["error"]["type"]


def _refusal(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{server.url}/prompt", json.dumps(body).encode())
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request)
    assert raised.value.code == 400
    return dict(json.loads(raised.value.read()))


def test_a_prompt_that_has_to_wait_is_checked_at_once(fleet: Fleet, go: Path) -> None:
    """Both workers have as much as they may have."""
    long = [fleet.gateway.hand_in(held(seed, go)) for seed in range(10, 16)]
    fleet.wait_for("two that run", lambda: len(fleet.gateway.get_json("/queue")["queue_running"]) == 2)
    assert fleet.status()["queue"]["waiting"] == 2
    wrong = picture(2)
    wrong["loader"]["inputs"]["ckpt_name"] = "absent.safetensors"
    with pytest.raises(PromptRejected) as raised:
        fleet.gateway.run(wrong)
    assert "loader" in raised.value.body["node_errors"]
    running = fleet.gateway.get_json("/queue")
    assert sorted(item[1] for item in running["queue_running"] + running["queue_pending"]) == sorted(long)
    fleet.gateway.post("/queue", {"delete": [long[-1]]})  # waits in the gateway
    fleet.gateway.post("/queue", {"clear": True})
    left = fleet.gateway.get_json("/queue")
    assert (len(left["queue_running"]), left["queue_pending"]) == (2, [])
    fleet.gateway.post("/interrupt")
    for prompt in (item[1] for item in left["queue_running"]):
        assert fleet.gateway.result(prompt)["status"]["status_str"] == "error"
    fleet.wait_for("empty journal", lambda: not fleet.journal("prompts"))


def test_weights_stay_where_they_are(fleet: Fleet) -> None:
    """Two checkpoints in turn: each has its worker."""
    workers: dict[str, set[str]] = {"sd15_min": set(), "sdxl_min": set()}
    for seed in range(3):
        for checkpoint, seen in workers.items():
            prompt = fleet.gateway.hand_in(picture(20 + seed, checkpoint))
            fleet.gateway.result(prompt)
            seen.add(fleet.journal("results")[prompt]["worker"])
    if len(workers["sd15_min"]) == 2:  # both workers had these weights from earlier tests
        pytest.fail(f"weights wander: {workers}")
    assert [len(seen) for seen in workers.values()] == [1, 1]
    assert workers["sd15_min"] != workers["sdxl_min"]


def test_a_prompt_that_is_handed_in_twice_runs_once(fleet: Fleet) -> None:
    """A client whose connection broke before the answer cannot know better."""
    name = new_id()
    for _ in range(2):
        assert fleet.gateway.hand_in(picture(30), prompt_id=name) == name
    first = fleet.gateway.result(name)
    assert fleet.gateway.hand_in(picture(31), prompt_id=name) == name
    assert fleet.gateway.result(name) == first
    assert sum(name in fleet.worker(worker).get_json("/history") for worker in fleet.ready()) == 1


def test_secrets_are_not_written_down(fleet: Fleet, go: Path) -> None:
    secrets = {"api_key_comfy_org": "secret-of-a-person", "kept": "for everybody"}
    prompt = fleet.gateway.hand_in(held(32, go), extra_data=secrets)
    written = fleet.journal("prompts")[prompt]["body"]["extra_data"]
    assert (written.get("kept"), written.get("api_key_comfy_org")) == ("for everybody", None)
    go.touch()
    fleet.gateway.result(prompt)
    files = [path for path in (fleet.folder / "fleet" / "journal").rglob("*") if path.is_file()]
    assert files
    assert not any(b"secret-of-a-person" in path.read_bytes() for path in files)


def test_an_uploaded_picture_is_there_for_every_worker(fleet: Fleet) -> None:
    content = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 30)).save(content, "PNG")
    name = _upload(fleet.gateway, content.getvalue())
    workflow = {
        "load": {"class_type": "LoadImage", "inputs": {"image": name}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["load", 0], "filename_prefix": "red"}},
    }
    for worker in fleet.ready():
        assert fleet.worker(worker).run(workflow).status == "success"
    (made,) = fleet.gateway.run(workflow).images
    assert _pixels(made[1])[0, 0].tolist() == [200, 30, 30]


def _upload(server: RunningServer, content: bytes) -> str:
    async def upload() -> str:
        form = aiohttp.FormData()
        form.add_field("image", content, filename="red.png", content_type="image/png")
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.url}/api/upload/image", data=form) as answer,
        ):
            return str((await answer.json())["name"])

    return asyncio.run(upload())


def test_another_sites_page_hands_in_nothing(fleet: Fleet) -> None:
    async def status(headers: dict[str, str]) -> int:
        body = {"prompt": nothing("from elsewhere")}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{fleet.gateway.url}/prompt", json=body, headers=headers) as answer,
        ):
            return answer.status

    assert asyncio.run(status({"Origin": "http://elsewhere.example"})) == 403
    assert asyncio.run(status({"Sec-Fetch-Site": "cross-site"})) == 403
    assert asyncio.run(status({"Origin": fleet.gateway.url})) == 200


def test_the_gateway_adds_little(fleet: Fleet, tally: Callable[[str], None]) -> None:
    """Measure both prompt by prompt: other tests run beside this one, and prompts to which they leave time count."""
    direct = fleet.worker(fleet.ready()[0])
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(_quickest(direct, fleet.gateway))
        if _added(rounds[-1]) < MOST_MILLISECONDS:
            break
        time.sleep(SECONDS_BETWEEN_ROUNDS)
    quietest = min(rounds, key=_added)
    tally(f"an empty prompt: {quietest[0]:.1f} ms direct, {quietest[1]:.1f} ms through the gateway")
    assert _added(quietest) < MOST_MILLISECONDS, rounds


def _added(measured: list[float]) -> float:
    """Return the milliseconds that the second has more than the first."""
    return measured[1] - measured[0]


def _quickest(*servers: RunningServer) -> list[float]:
    """Return the milliseconds that the quickest of 20 prompts takes with each server, in turn with the others."""

    async def measure() -> list[float]:
        seconds: list[list[float]] = [[] for _ in servers]
        client = new_id()
        async with aiohttp.ClientSession() as session, contextlib.AsyncExitStack() as stack:
            sockets = [
                await stack.enter_async_context(session.ws_connect(f"{server.url}/ws?clientId={client}"))
                for server in servers
            ]
            for number in range(20):
                for server, socket, measured in zip(servers, sockets, seconds, strict=True):
                    begun = time.perf_counter()
                    body = {"prompt": nothing(f"{server.url} {client} {number}"), "client_id": client}
                    async with session.post(f"{server.url}/prompt", json=body) as answer:
                        prompt = (await answer.json())["prompt_id"]
                    while (told := (await socket.receive_json()))["type"] != "executing" or told["data"][
                        "node"
                    ] is not None:
                        pass
                    async with session.get(f"{server.url}/history/{prompt}") as answer:
                        assert prompt in await answer.json()
                    measured.append(time.perf_counter() - begun)
        return [min(measured) * 1000 for measured in seconds]

    return asyncio.run(measure())


def test_the_projects_command_works_through_it(fleet: Fleet, tmp_path: Path) -> None:
    """``warmup`` hands in a part of a workflow, and prints what nodes say while they run."""
    workflow = picture(40, engine="eager", buckets="64x64")
    inputs = {"model": ["speedup", 0], "buckets": ["shape", 0]}
    inputs |= {name: [name, 0] for name in ("positive", "negative")}
    workflow["warm"] = {"class_type": "OneDiffWarmUp", "inputs": inputs}
    file = tmp_path / "warm.json"
    file.write_text(json.dumps(workflow))
    command = [sys.executable, "-m", "onediff_comfy", "warmup", "--workflow", str(file), "--server", fleet.gateway.url]
    done = subprocess.run(command, cwd=repository(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split("  ")[0] for line in done.stdout.splitlines()] == ["64×64 b1"]
    assert "1 of 1: 64×64 b1 …" in done.stderr.splitlines()


# -- deaths: the last of this file, as workers are missing for a while after them -------------------


def test_a_worker_is_killed_with_four_prompts_open(fleet: Fleet, go: Path) -> None:
    before = fleet.status()["counts"]
    prompts = [fleet.gateway.hand_in(held(seed, go)) for seed in range(50, 54)]
    fleet.wait_for("two prompts with each worker", lambda: [len(w["prompts"]) for w in fleet.ready()] == [2, 2])
    victim = fleet.ready()[0]
    fleet.kill(victim["pid"])
    go.touch()
    results = {prompt: fleet.gateway.result(prompt) for prompt in prompts}
    assert [len(_pictures(fleet.gateway, entry)) for entry in results.values()] == [1] * 4
    counts = fleet.status()["counts"]
    assert counts["retried"] - before["retried"] == 2
    assert counts["success"] - before["success"] == 4
    kept = fleet.journal("results")
    assert sorted(kept[prompt]["attempts"] for prompt in prompts) == [1, 1, 2, 2]
    assert len({_tag_of(results[prompt]) for prompt in prompts}) == 4
    fleet.wait_for("new worker", lambda: len(fleet.ready()) == 2)
    assert victim["run"] not in {worker["run"] for worker in fleet.ready()}


def _tag_of(entry: dict[str, Any]) -> str:
    (shown,) = (shown for output in entry["outputs"].values() for shown in output.get("images", ()))
    return str(shown["subfolder"])


def test_pictures_of_a_worker_that_is_gone_are_still_there(fleet: Fleet) -> None:
    """The one that was killed above had made some: those of results that were written."""
    running = {worker["run"] for worker in fleet.ready()}
    entries = [result["entry"] for result in fleet.journal("results").values()]
    shown = [s for entry in entries for output in entry["outputs"].values() for s in output.get("images", ())]
    orphans = [one for one in shown if one["subfolder"].partition(".")[2] not in running]
    assert orphans
    assert all(fleet.gateway.content(one).startswith(b"\x89PNG") for one in orphans)


def test_the_gateway_is_killed_with_three_prompts_open(fleet: Fleet, go: Path) -> None:
    prompts = [fleet.gateway.hand_in(held(seed, go), client_id="gone") for seed in range(60, 63)]
    dead = fleet.status()["gateway"]["pid"]
    fleet.kill(dead)
    go.touch()
    results = {prompt: fleet.gateway.result(prompt) for prompt in prompts}
    assert [len(_pictures(fleet.gateway, entry)) for entry in results.values()] == [1] * 3
    status = fleet.status()
    assert status["gateway"]["pid"] != dead
    assert status["counts"]["recovered"] == 3
    fleet.wait_for("empty journal", lambda: not fleet.journal("prompts"))
    made = [prompt for worker in fleet.ready() for prompt in fleet.worker(worker).get_json("/history")]
    assert sorted(made.count(prompt) for prompt in prompts) == [1, 1, 1], "a prompt ran twice"


def test_history_outlives_the_gateway(fleet: Fleet) -> None:
    """It was killed above. What it knew of earlier prompts is in the journal."""
    assert fleet.gateway.get_json("/history").keys() == fleet.journal("results").keys()
    with contextlib.suppress(HostError):
        fleet.gateway.post("/history", {"clear": True})
    assert fleet.gateway.get_json("/history") == {}
    assert fleet.journal("results") == {}

"""The commands around a fleet: what is wrong is said in a person's words, status and metrics tell what goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleets import Fleet, picture
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dev.environment import comfyui_path, repository, venv_python
from dev.fleet_environment import ensure, fleet_lock, fleet_requirements
from onediff_comfy.fleet import worker as worker_module
from onediff_comfy.fleet.cluster import replicas_wanted
from onediff_comfy.fleet.fleet_options import FleetOptions
from onediff_comfy.fleet.worker import Place, Worker, environment

DEPLOY = repository() / "deploy"


def _command(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "onediff_comfy", "fleet", *arguments]
    return subprocess.run(command, cwd=repository(), capture_output=True, text=True, timeout=120)


def test_without_ray_it_is_said_what_to_install() -> None:
    done = _command("serve", "--comfyui", str(comfyui_path()))
    assert done.returncode == 1
    assert "fleet serve needs ray" in done.stderr and "onediff-comfy[fleet-gateway]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--comfyui", "/nowhere"], "/nowhere has no main.py"),
        (["--comfyui", str(comfyui_path()), "--python", "/nowhere/python"], "interpreter is not at /nowhere/python"),
        (["--comfyui", str(comfyui_path()), "--python", sys.executable], "no NVIDIA GPU here"),
        (
            ["--comfyui", str(comfyui_path()), "--python", sys.executable, "--cpu", "--warm-up", "/nowhere"],
            "there is no folder /nowhere",
        ),
    ],
)
def test_what_cannot_be_served_is_said(arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = _command("serve", *arguments, python=str(ensure()))
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_status_of_nothing_is_said() -> None:
    done = _command("status", "--gateway", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "no fleet answers at http://127.0.0.1:9" in done.stderr


def test_status_tells_of_workers(fleet: Fleet) -> None:
    table = _command("status", "--gateway", fleet.gateway.url)
    assert table.returncode == 0
    names = [worker["name"] for worker in fleet.ready()]
    assert len(names) == 2 and all(name in table.stdout for name in names)
    told = json.loads(_command("status", "--gateway", fleet.gateway.url, "--json").stdout)
    assert [worker["name"] for worker in told["workers"]] == names
    assert {worker["state"] for worker in told["workers"]} == {"ready"}


def test_prometheus_reads_the_gateways_and_the_workers_numbers(fleet: Fleet) -> None:
    before = _metrics(fleet)
    prompt = fleet.gateway.hand_in(picture(80))
    fleet.gateway.result(prompt)
    after = _metrics(fleet)
    assert after["onediff_fleet_success_total"] == before["onediff_fleet_success_total"] + 1
    assert after["onediff_fleet_prompt_seconds_count"] == before["onediff_fleet_prompt_seconds_count"] + 1
    assert after['onediff_fleet_workers{state="ready"}'] == 2
    assert sum(name.startswith("onediff_worker_compiled{worker=") for name in after) == 2


def _metrics(fleet: Fleet) -> dict[str, float]:
    text = fleet.gateway._request("GET", "/metrics").decode()
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


# -- workers ---------------------------------------------------------------------------------------


def test_a_worker_prepares_a_folder_of_workflows_and_says_what_it_could_not(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ComfyUI that runs already; that this comes before the first prompt is the order in ``Replica``."""
    wrong = picture(81)
    wrong["loader"]["inputs"]["ckpt_name"] = "absent.safetensors"
    for name, workflow in (("good", picture(82)), ("wrong", wrong)):
        (tmp_path / f"{name}.json").write_text(json.dumps(workflow))
    options = FleetOptions(
        str(comfyui_path()), str(venv_python()), folder=str(tmp_path / "fleet"), warm_up=str(tmp_path)
    )
    prepared = Worker(options, "127.0.0.1")
    running = fleet.ready()[0]
    prepared.port = int(running["url"].rpartition(":")[2])
    monkeypatch.setattr(prepared, "check", lambda: None)
    before = len(fleet.worker(running).get_json("/history"))
    said: list[str] = []
    (problem,) = prepared.warm_up(said.append)
    assert said == ["good.json", "wrong.json"]
    assert problem.startswith("wrong.json: ComfyUI answered 400") and "absent.safetensors" in problem
    assert len(fleet.worker(running).get_json("/history")) == before + 1
    prepared.place.release()


def test_places_are_taken_by_one_worker_each_and_free_again(tmp_path: Path) -> None:
    first, second = Place(tmp_path), Place(tmp_path)
    assert [first.number, second.number] == [0, 1]
    first.release()
    third = Place(tmp_path)
    assert third.number == 0
    for place in (second, third):
        place.release()


def test_workers_know_of_the_store_and_of_the_gpu_that_ray_chose() -> None:
    options = FleetOptions("c", "p", store="s3://bucket", store_role="worker")
    around = {"CUDA_VISIBLE_DEVICES": "3", "PYTHONPATH": "/ray", "OMP_NUM_THREADS": "1", "HOME": "/home"}
    made = environment(options, around)
    assert (made["ONEDIFF_STORE_URL"], made["ONEDIFF_STORE_ROLE"]) == ("s3://bucket", "worker")
    assert made["CUDA_VISIBLE_DEVICES"] == "3" and made["HOME"] == "/home"
    assert not {"PYTHONPATH", "OMP_NUM_THREADS"} & made.keys()
    assert not {"ONEDIFF_STORE_URL", "ONEDIFF_STORE_ROLE"} & environment(FleetOptions("c", "p"), around).keys()
    assert worker_module.__name__ == "onediff_comfy.fleet.worker"


@pytest.mark.parametrize(("unfinished", "wanted"), [(0, 2), (4, 2), (5, 3), (7, 4), (100, 6)])
def test_more_prompts_mean_more_workers_within_bounds(unfinished: int, wanted: int) -> None:
    context = SimpleNamespace(
        aggregated_metrics={"open": {"replica a": float(unfinished), "replica b": float(unfinished)}},
        capacity_adjusted_min_replicas=2,
        capacity_adjusted_max_replicas=6,
        policy_state={},
    )
    assert replicas_wanted(context) == (wanted, {})


# -- files for clusters ----------------------------------------------------------------------------

_BUILD = """
import json, sys, yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema
from onediff_comfy.fleet.cluster import application, deployment_options
from onediff_comfy.fleet.fleet_options import FleetOptions
cluster = yaml.safe_load(open(sys.argv[1]))
validate_config(prepare_config(cluster))
service = yaml.safe_load(open(sys.argv[2]))
config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
(app,) = config.applications
assert app.import_path == f"{application.__module__}:{application.__name__}", app.import_path
options = FleetOptions.of(app.args)
from ray import serve
from onediff_comfy.fleet.cluster import Replica
made = serve.deployment(**deployment_options(options))(Replica)
print(json.dumps({"policy": made._deployment_config.autoscaling_config.policy.policy_function, "port": options.port}))
"""


def test_the_lock_has_all_that_ray_needs() -> None:
    """It is installed without dependencies. After a change: ``python -m dev.lock``."""
    done = subprocess.run([str(ensure()), "-m", "pip", "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    asked = [Requirement(line) for line in fleet_requirements().read_text().splitlines() if not line.startswith("#")]
    pins = [f"{canonicalize_name(requirement.name)}{requirement.specifier}" for requirement in asked]
    assert len(pins) > 3
    assert [pin for pin in pins if f"\n{pin} " not in fleet_lock().read_text()] == []


def test_the_files_for_clusters_are_what_ray_takes(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ensure()), "-c", _BUILD, str(DEPLOY / "cluster.yaml"), str(DEPLOY / "rayservice.yaml")],
        cwd=repository(),
        env={**os.environ, "PYTHONPATH": str(repository())},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "replicas_wanted" in str(made["policy"])
    assert made["port"] == 8188

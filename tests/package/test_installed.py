"""A wheel, installed with pip where ComfyUI's packages are, put into a real ComfyUI, and taken out again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from environments import Environment
from node_ids import NODE_IDS

from dev.browser import NO_BROWSER, find_browser
from dev.editor import editor
from dev.environment import comfyui_path, repository
from dev.host import PACK_NAME, ComfyServer, PromptRejected
from tools.templates import TITLES
from tools.workflow_files import workflows


def _packages(environment: Environment) -> dict[str, str]:
    done = environment.run("python", "-m", "pip", "list", "--format", "json", "--disable-pip-version-check")
    return {package["name"]: package["version"] for package in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def environment(make_environment: Callable[[], Environment], distributions: Path) -> Environment:
    """With the wheel installed by pip, which may look nowhere for anything else."""
    environment = make_environment()
    before = _packages(environment)
    (wheel,) = distributions.glob("*.whl")
    done = environment.run("python", "-m", "pip", "install", "--no-index", str(wheel))
    assert done.returncode == 0, done.stderr
    after = _packages(environment)
    assert {"torch", "numpy"} <= before.keys()
    assert after.pop("onediff-comfy")
    assert after == before, "an installed package changed"
    return environment


def _serve(base: Path, environment: Environment) -> ComfyServer:
    return ComfyServer(
        comfyui_path(), base, cpu=not torch.cuda.is_available(), python=environment.python, install_pack=False
    )


def _assert_it_is_not_in_the_way(server: ComfyServer) -> None:
    """A workflow without our nodes leaves its picture and nothing of ours; the log has the host's line on the pack."""
    picture = {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0}}
    saved = {"class_type": "SaveImage", "inputs": {"images": ["picture", 0], "filename_prefix": "plain"}}
    before = set(server.base_dir.rglob("*"))
    assert server.run({"picture": picture, "save": saved}).status == "success"
    assert [path.name for path in set(server.base_dir.rglob("*")) - before] == ["plain_00001_.png"]
    assert not list(server.base_dir.glob("onediff-*"))
    (line,) = (line for line in server.log_text().splitlines() if "onediff" in line.lower())
    assert line.endswith(PACK_NAME), "ComfyUI's own, of how long each pack took"


@pytest.fixture(scope="module")
def base(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ComfyUI in which the wheel was told to install the pack."""
    base = tmp_path_factory.mktemp("ComfyUI")
    pack = base / "custom_nodes" / PACK_NAME
    pack.parent.mkdir()
    done = environment.run("onediff-comfy", "install", "--comfyui", str(base))
    assert (done.returncode, done.stdout) == (0, f"{pack} is in place; restart ComfyUI\n"), done.stderr
    return base


@pytest.fixture(scope="module")
def without_it(base: Path, environment: Environment) -> Iterator[ComfyServer]:
    """The same ComfyUI, after it was told to take the pack out again."""
    pack = base / "custom_nodes" / PACK_NAME
    done = environment.run("onediff-comfy", "uninstall", "--comfyui", str(base))
    assert (done.returncode, done.stdout) == (0, f"{pack} is removed; restart ComfyUI\n"), done.stderr
    assert not pack.exists()
    with _serve(base, environment) as server:
        yield server


def test_a_person_installs_the_wheel(base: Path, environment: Environment) -> None:
    with _serve(base, environment) as server:
        offered = {
            name: node["python_module"]
            for name, node in server.get_json("/object_info").items()
            if name.startswith("OneDiff")
        }
        assert offered == dict.fromkeys(NODE_IDS, f"custom_nodes.{PACK_NAME}")
        assert set(server.get_json("/workflow_templates")[PACK_NAME]) == {TITLES[name] for name in workflows()}
        _assert_it_is_not_in_the_way(server)
    assert not any(path.name.startswith(f"{PACK_NAME}-new") for path in (base / "custom_nodes").iterdir())


def test_a_person_takes_it_out_again(without_it: ComfyServer) -> None:
    workflow = json.loads((repository() / "workflows" / "api" / "text_to_image.json").read_text())
    assert not set(NODE_IDS) & without_it.get_json("/object_info").keys()
    with pytest.raises(PromptRejected) as refused:
        without_it.run(workflow)
    error = refused.value.body["error"]
    assert error["type"] == "missing_node_type"
    assert "OneDiffModelSpeedup" in error["message"]


@pytest.mark.skipif(find_browser() is None, reason=NO_BROWSER)
def test_without_the_pack_the_editor_says_which_pack_is_missing(without_it: ComfyServer) -> None:
    workflow = json.loads((repository() / "workflows" / f"{TITLES['text_to_image']}.json").read_text())
    with editor(without_it) as page:
        from playwright.sync_api import TimeoutError as PlaywrightTimeout  # here, for not everybody has it

        details, missing = page.get_by_role("button", name="View details"), page.get_by_text("Missing Node Packs")
        for _ in range(6):  # the editor may show the button before it minds it, and a click takes it away
            page.evaluate("workflow => app.loadGraphData(workflow)", workflow)
            with contextlib.suppress(PlaywrightTimeout):
                details.click(timeout=20_000)
                missing.wait_for(timeout=5_000)
                break
        else:
            pytest.fail("the editor does not say what is missing")
        page.get_by_text(PACK_NAME).wait_for(timeout=60_000)


def test_a_second_install_takes_the_place_of_the_first(environment: Environment, tmp_path: Path) -> None:
    pack = tmp_path / "custom_nodes" / PACK_NAME
    pack.parent.mkdir()
    for _ in range(2):
        assert environment.run("onediff-comfy", "install", "--comfyui", str(tmp_path)).returncode == 0
        assert not (pack / "left over").exists()
        (pack / "left over").touch()
    assert {path.name for path in pack.parent.iterdir()} == {PACK_NAME}

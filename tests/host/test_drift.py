"""Other versions of the host: what is relied on is there, or its absence is said and images come out eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pictures import FAMILIES, Counters, assert_same_picture, assert_untouched, latent_of
from scripts import checkpoint_of, printed_by

from dev.environment import OTHER_COMFYUI, comfyui_path, other_comfyui_path, repository
from dev.host import ComfyServer

SD15, FLUX = FAMILIES["sd15"], FAMILIES["flux"]
CHECKPOINTS = repository() / ".cache" / "checkpoints"


@pytest.fixture(scope="module")
def broken_host() -> dict[str, Any]:
    """What tests/host/broken_host.py found, of this host."""
    found: dict[str, Any] = printed_by("broken_host.py", comfyui_path(), checkpoint_of(FLUX.checkpoint))
    return found


def test_this_host_has_everything(broken_host: dict[str, Any]) -> None:
    assert broken_host["intact"] == []
    assert broken_host["accelerated"], "if the node never accelerates here, the tests below prove nothing"


def test_whatever_changes_is_named_once_and_its_node_hands_on_what_it_gets(broken_host: dict[str, Any]) -> None:
    assert len(broken_host["broken"]) > 60
    for case in broken_host["broken"]:
        name = f"{case['use']} ({case['how']})"
        assert case["reason"] is not None, f"{name} went unnoticed"
        assert case["use"] in case["reason"], name
        assert "update onediff-comfy" in case["reason"], name
        assert case["handed_on"], name
        assert case["reason"] in case["shown"] or case["kind"] == "files", name
        assert sum(case["use"] in text for text in case["warnings"]) == 1, (name, case["warnings"])


def test_what_only_one_kind_needs_leaves_the_others_alone(broken_host: dict[str, Any]) -> None:
    """A change of ControlNets must not cost anybody the acceleration of their model."""
    of_controls = [case for case in broken_host["broken"] if case["kind"] == "CONTROL_NET"]
    assert of_controls
    assert {len(case["warnings"]) for case in of_controls if case["use"].startswith("comfy.controlnet")} == {1}


@pytest.fixture
def start_version(
    start_server: Callable[..., ComfyServer], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., ComfyServer]:
    """Makes a server of another version, or of a changed copy, of the host."""

    def make(comfy: Path, base: Path | None = None) -> ComfyServer:
        other = start_server(base, comfy=comfy)
        other.log_file = tmp_path_factory.mktemp("log") / "server.log"
        return other

    return make


def test_a_host_that_has_renamed_something_makes_the_image_without_us(
    start_version: Callable[..., ComfyServer], tmp_path: Path
) -> None:
    """The whole way, in a server of a host that works by itself: only the name that we use is another."""
    comfy = _copy_with(tmp_path / "ComfyUI", "new_class_executor", "new_bound_executor")
    with start_version(comfy) as server:
        plain = latent_of(server.run(FLUX.workflow(1)))
        workflow = FLUX.workflow(1, "eager")
        workflow["report"] = {
            "class_type": "OneDiffReport",
            "inputs": {"model": ["speedup", 0], "after": ["decode", 0]},
        }
        result = server.run(workflow)
        assert_untouched(latent_of(result), plain)
        answer = server.get_json("/onediff/report")
        log = server.log_text()
    (problem,) = answer["problems"]
    assert "comfy.patcher_extension.WrapperExecutor.new_class_executor" in problem
    assert ("speedup", f"not accelerated: {problem}") in result.texts
    assert (answer["served"], answer["fallbacks"]) == (0, {problem: 1})
    assert problem in result.outputs["report"]["text"][0]
    assert [line.count(problem) for line in log.splitlines() if problem in line and "WARNING" in line] == [1]
    assert "Traceback" not in log.replace("IMPORT FAILED", "")


def _copy_with(destination: Path, name: str, other: str) -> Path:
    """A host with all of this one's files, in which a name is another one."""
    source = comfyui_path()
    destination.mkdir()
    for entry in source.iterdir():
        if entry.name != "comfy":
            (destination / entry.name).symlink_to(entry)
    for path in (source / "comfy").rglob("*.py"):
        copied = destination / path.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(path.read_text().replace(name, other))
    for path in (source / "comfy").rglob("*"):
        copied = destination / path.relative_to(source)
        if path.is_file() and path.suffix not in (".py", ".pyc") and not copied.exists():
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.symlink_to(path)
    main = destination / "main.py"  # a host finds its modules beside the file that was started
    main.unlink()
    main.write_text((source / "main.py").read_text())
    return destination


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of somebody who updates ComfyUI and keeps everything else."""
    return tmp_path_factory.mktemp("installation")


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHER_COMFYUI)
def test_another_version_of_the_host_is_accelerated(
    start_version: Callable[..., ComfyServer], installation: Path, version: str
) -> None:
    with start_version(other_comfyui_path(version), installation) as other:
        assert other.get_json("/onediff/report")["problems"] == []
        plain = latent_of(other.run(SD15.workflow(1)))
        for engine in ("eager", "inductor"):
            counters = Counters(other)
            actual = latent_of(other.run(SD15.workflow(1, engine)))
            assert_same_picture(actual, plain)
            assert (counters.served, counters.fallbacks) == (SD15.steps, {})
            # Compiled under one version it serves under others that compute the same: from disk, if it is kept there.
            assert [graph["engine"] for graph in counters.graphs] == [engine]
        # Off again: nothing is left.
        assert_untouched(latent_of(other.run(SD15.workflow(1))), plain)

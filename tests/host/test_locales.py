"""What people read, in their language: the nodes' texts in the editor, and messages on nodes and in errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pictures import FAMILIES, latent_of

from dev.host import ComfyServer, PromptRejected
from tools.locales import FOLDER, as_text, english

FLUX = FAMILIES["flux"]


@pytest.fixture
def chinese(server: ComfyServer) -> Iterator[ComfyServer]:
    """The shared server while its person has chosen Chinese in the settings."""
    server.post("/settings", {"Comfy.Locale": "zh"})
    try:
        yield server
    finally:
        server.post("/settings", {"Comfy.Locale": "en"})


def test_the_english_texts_are_what_the_nodes_say(server: ComfyServer) -> None:
    """Run ``python -m tools.locales --write`` after a change, and translate what is new."""
    definitions = english(server.get_json("/object_info"))
    assert len(definitions) == 16
    assert (FOLDER / "en" / "nodeDefs.json").read_text(encoding="utf-8") == as_text(definitions)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_host_hands_them_to_the_editor(server: ComfyServer, language: str) -> None:
    ours = json.loads((FOLDER / language / "nodeDefs.json").read_text(encoding="utf-8"))
    theirs = server.get_json("/i18n")[language]["nodeDefs"]
    assert {name: theirs[name] for name in ours} == ours


# Choices that are names of files and of model families.
_NAMES = ("file", "preset", "ckpt_name", "unet_name", "control_net_name")


def _choices(server: ComfyServer) -> Iterator[tuple[str, str, list[str]]]:
    """Node, input and what can be chosen there, of every list that we make ourselves."""
    node_types = server.get_json("/object_info")
    for name in json.loads((FOLDER / "en" / "nodeDefs.json").read_text(encoding="utf-8")):
        inputs = node_types[name]["input"]
        for field, (kind, *options) in {**inputs.get("required", {}), **inputs.get("optional", {})}.items():
            if kind == "COMBO" and field not in _NAMES:
                yield name, field, options[0]["options"]


@pytest.mark.parametrize(("language", "colon"), [("en", ": "), ("zh", "：")])
def test_every_choice_is_explained_in_the_tooltip(server: ComfyServer, language: str, colon: str) -> None:
    """The editor has no translations for choices."""
    definitions = json.loads((FOLDER / language / "nodeDefs.json").read_text(encoding="utf-8"))
    found = list(_choices(server))
    assert len(found) == 12  # engine and compile of four nodes; mismatch, precision, vae_speedup and goal of one each
    for name, field, options in found:
        for option in options:
            assert f"{option}{colon}" in definitions[name]["inputs"][field]["tooltip"], (name, field, option)


def test_a_node_speaks_chinese_and_the_log_and_json_stay_english(chinese: ComfyServer) -> None:
    said_before = len(chinese.log_text())
    workflow = FLUX.workflow(81, "oneflow")  # not in the developer environment
    workflow["report"] = {"class_type": "OneDiffReport", "inputs": {"model": ["speedup", 0], "after": ["decode", 0]}}
    result = chinese.run(workflow)
    latent_of(result)
    (shown,) = {text for node, text in result.texts if node == "speedup" and "未加速" in text}  # at once and at the end
    assert shown.startswith("未加速：oneflow 引擎不可用：")
    (text,) = result.outputs["report"]["text"]
    assert f"MODEL：{FLUX.steps} 次调用中有 0 次由编译图执行" in text
    assert f"{FLUX.steps} 次以 eager 执行：oneflow 引擎不可用：" in text
    (found,) = result.outputs["report"]["report"]
    (reason,) = found["objects"][0]["fallbacks"]
    assert reason.startswith("the oneflow engine is not available: ")
    ours = [line for line in chinese.log_text()[said_before:].splitlines() if "OneDiff" in line]
    assert any(reason in line for line in ours)
    assert not any("引擎" in line for line in ours)


def _bucket(**inputs: Any) -> dict[str, Any]:
    shape = {"preset": "custom", "buckets": "64x64", "width": 64, "height": 64, "batch_size": 1, "snap": False}
    return {
        "shape": {"class_type": "OneDiffShapeBucket", "inputs": {**shape, **inputs}},
        "show": {"class_type": "PreviewAny", "inputs": {"source": ["shape", 1]}},
    }


def test_an_input_that_is_refused_is_refused_in_chinese(chinese: ComfyServer) -> None:
    with pytest.raises(PromptRejected) as refusal:
        chinese.run(_bucket(buckets="64x64\n100x64"))
    errors = refusal.value.body["node_errors"]["shape"]["errors"]
    assert errors and all("第 2 行“100x64”：100 不是 8 的倍数；请写 96 或 104" in error["details"] for error in errors)


def test_a_result_and_an_error_of_a_node_are_chinese(chinese: ComfyServer) -> None:
    result = chinese.run(_bucket(width=72, height=71))
    said = "72×71 b1 不在任何尺寸桶中；它使用通用图运行\n71 不是模型所需的 8 的倍数；会被填充或裁切"
    assert result.outputs["shape"]["text"] == [said]
    assert ("shape", said) in result.texts
    save = {"class_type": "OneDiffSaveCompiledGraph", "inputs": {"model": ["loader", 0], "filename": "never"}}
    failed = chinese.run({"loader": FLUX.workflow(1)["loader"], "save": save})
    assert failed.error is not None
    assert failed.error["exception_message"].strip() == "此 MODEL 未加速：请连接“OneDiff 模型加速”的输出。"
    assert failed.error["exception_type"] == "ValueError"

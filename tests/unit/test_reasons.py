"""Reasons as people read them: what they added to a model, and which node did, with the host's modules faked."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_comfy.capture.call import NotCovered, split
from onediff_comfy.capture.handed_over import source_of
from onediff_comfy.messages import message


class FreeU_V2:
    def patch(self) -> Callable[..., Any]:
        return lambda h, hsp, options: (h, hsp)


class Perturb:
    def __call__(self, *_: Any) -> None:
        """As IP-Adapter's patches are objects of a class that is no node."""


@pytest.fixture
def reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module under test, in a host with one node of this file and one pack."""
    folder_paths, nodes, pack = (types.ModuleType(name) for name in ("folder_paths", "nodes", "a pack"))
    folder_paths.get_folder_paths = lambda _kind: [str(tmp_path)]  # type: ignore[attr-defined]
    nodes.NODE_CLASS_MAPPINGS = {"FreeU_V2": FreeU_V2, "Other": Path}  # type: ignore[attr-defined]
    nodes.NODE_DISPLAY_NAME_MAPPINGS = {"FreeU_V2": "FreeU V2"}  # type: ignore[attr-defined]
    pack.__file__ = str(tmp_path / "ComfyUI_IPAdapter_plus" / "src" / "patches.py")
    for module in (folder_paths, nodes, pack):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    names = ("onediff_comfy.host.report.owners", "onediff_comfy.host.report.reasons")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(names[1])
    for name in names:
        sys.modules.pop(name, None)


def _refusal(patches: Any) -> str:
    """What the core says of a call with such options."""
    with pytest.raises(NotCovered) as refusal:
        split(
            {"x": torch.ones(1), "transformer_options": patches},
            options_name="transformer_options",
            options_read=["patches", "patches_replace", "optimized_attention_override", "mine"],
        )
    return refusal.value.reason


def test_the_node_whose_class_holds_the_code_is_named(reasons: Any) -> None:
    said = _refusal({"patches": {"output_block_patch": [FreeU_V2().patch()]}})
    assert (
        said == "argument transformer_options.patches.output_block_patch[0] holds a function, which no graph can take"
    )
    assert reasons.in_their_words(message("not accelerated: {reason}", reason=said)) == (
        "not accelerated: FreeU V2 adds code to the model (a patch of the model's blocks, as FreeU's), which no graph "
        "can take"
    )


def test_otherwise_the_pack_in_whose_folder_it_lies(reasons: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Perturb, "__module__", "a pack")
    said = _refusal({"patches_replace": {"attn2": {("input", 1): Perturb()}}})
    assert reasons.in_their_words(said) == (
        "ComfyUI_IPAdapter_plus adds code to the model (attention in place of the model's, as IP-Adapter's or PAG's), "
        "which no graph can take"
    )


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"patches": {"attn1_output_patch": [len]}}, "a patch of what attention gives, as PAG's"),
        (
            {"patches": {"attn2_patch": [len]}},
            "a patch of what goes into attention, as a hypernetwork's or HyperTile's",
        ),
        ({"patches_replace": {"dit": {("double_block", 0): len}}}, "blocks in place of the model's"),
        ({"optimized_attention_override": len}, "another attention for the whole model, as SageAttention"),
        ({"mine": len}, "an option for the model"),
    ],
)
def test_what_was_added_is_told_by_where_it_stands(reasons: Any, options: Any, what: str) -> None:
    said = reasons.in_their_words(_refusal(options))
    assert said == f"another node adds code to the model ({what}), which no graph can take"


def test_every_template_that_is_worded_otherwise_exists(reasons: Any, root: Path) -> None:
    folders = (root / "onediff_comfy" / folder for folder in ("capture", "serving"))
    sources = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    for template in reasons.WORDS:
        assert f'"{template}"' in sources


def test_code_is_found_behind_partial_and_bound_functions() -> None:
    import functools

    assert source_of(functools.partial(FreeU_V2.patch)) == f"{__name__}:FreeU_V2.patch"
    assert source_of(FreeU_V2().patch) == f"{__name__}:FreeU_V2.patch"
    assert source_of(Perturb()) == f"{__name__}:Perturb"


@pytest.mark.parametrize(
    ("call", "pixels", "said"),
    [
        ("float16[2x4x64x96]@cuda:0", 8, "768×512 b2"),
        ("bfloat16[1x16x21x60x104]@cuda:0", 8, "832×480 b1 f21"),
        ("float32[1x77x768]@cpu", 8, "float32[1x77x768]@cpu"),
        ("float32[1x3x64x64]@cpu", 0, "float32[1x3x64x64]@cpu"),
    ],
)
def test_a_call_is_told_by_the_size_of_its_image(reasons: Any, call: str, pixels: int, said: str) -> None:
    assert reasons.size_in_their_words(call, pixels) == said

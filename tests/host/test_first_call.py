"""The first call of a node's model is not made twice, and not on copies."""

from __future__ import annotations

from scripts import path_of_host, printed_by


def test_code_that_counts_its_calls_counts_as_with_comfyui_alone() -> None:
    found = printed_by("first_call.py", path_of_host("this one"), "sd3", "hunyuan_dit")
    for name, row in found.items():
        with_comfyui_alone, with_ours = row["calls"]
        assert with_ours == with_comfyui_alone > 2, name
        assert row["off"] <= 1e-5, name

"""Every workflow has the picture that the template browser asks for, drawn from the workflow as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from dev.environment import repository
from tools.thumbnails import MAXIMUM_BYTES, SIDE, made_from

FOLDER = repository() / "workflows"


@pytest.mark.parametrize("workflow", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_thumbnail_is_of_this_workflow(workflow: Path) -> None:
    """After a change of a workflow: ``python -m tools.thumbnails``."""
    file = workflow.with_suffix(".jpg")
    assert file.stat().st_size <= MAXIMUM_BYTES
    with Image.open(file) as picture:
        assert picture.size == (SIDE, SIDE)
        assert picture.info["comment"].decode() == made_from(workflow)


def test_there_is_no_thumbnail_without_a_workflow() -> None:
    assert {path.stem for path in FOLDER.glob("*.jpg")} == {path.stem for path in FOLDER.glob("*.json")}

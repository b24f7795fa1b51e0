"""What a release says of itself: addresses, icon and banner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tools.emblem import BANNER, FOLDER, ICON, emblems
from tools.release import with_addresses

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brings it")

PAGE = "https://github.com/somebody/onediff-comfy"


@pytest.fixture
def text(root: Path) -> str:
    return (root / "pyproject.toml").read_text(encoding="utf-8")


def test_a_release_has_the_addresses_of_the_repository_that_makes_it(root: Path, text: str) -> None:
    before, after = tomllib.loads(text), tomllib.loads(with_addresses(text, PAGE, "v1.2.3"))
    urls = after["project"].pop("urls")
    assert urls["Repository"] == PAGE and urls["Changelog"] == f"{PAGE}/blob/v1.2.3/CHANGELOG.md"
    assert all(address.startswith(PAGE) for address in urls.values())
    for field, name in (("Icon", "icon.png"), ("Banner", "banner.png")):
        address = after["tool"]["comfy"].pop(field)
        assert address == f"https://raw.githubusercontent.com/somebody/onediff-comfy/v1.2.3/docs/images/{name}"
        assert (root / address.partition("/v1.2.3/")[2]).is_file()
        del before["tool"]["comfy"][field]
    assert after == before, "and nothing else"


@pytest.mark.parametrize(
    "page", ["", "github.com/somebody/onediff", "https://github.com/somebody", "https://a.example/b/c"]
)
def test_a_page_of_another_kind_is_refused(text: str, page: str) -> None:
    with pytest.raises(ValueError, match="is no page of a repository"):
        with_addresses(text, page, "v1.2.3")


def test_it_is_written_once(text: str) -> None:
    with pytest.raises(ValueError, match="already"):
        with_addresses(with_addresses(text, PAGE, "v1"), PAGE, "v1")


def test_the_release_writes_them_before_anything_is_packed(root: Path) -> None:
    workflow = (root / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")
    command = 'python3 -m tools.release "https://github.com/$GITHUB_REPOSITORY" "$GITHUB_REF_NAME"'
    registry, release = workflow.partition("  registry:")[2].split("\n  release:")
    assert registry.index(command) < registry.index("publish-node-action")
    assert release.index(command) < release.index("python -m build")


def test_icon_and_banner_are_as_they_are_drawn() -> None:
    """After a change: ``python -m tools.emblem``."""
    for name, picture in emblems().items():
        with Image.open(FOLDER / name) as kept:
            assert kept.size == picture.size
            off = np.abs(np.asarray(kept.convert("RGB"), np.int16) - np.asarray(picture, np.int16))
            assert off.mean() < 1, name  # another Pillow draws edges a little differently
    assert max(ICON) <= 400 and BANNER[0] * 9 == BANNER[1] * 21

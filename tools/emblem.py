"""The pack's icon and banner, as ComfyUI's registry and the READMEs show them.

python -m tools.emblem     # writes docs/images/icon.png and docs/images/banner.png
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from PIL import Image, ImageDraw, ImageFont

from dev.environment import repository

FOLDER = repository() / "docs" / "images"

ICON, BANNER = (400, 400), (1260, 540)
"""Width and height in pixels: at most 400x400, and 21:9, are what the registry asks for."""

_PAPER, _INK, _GREY, _GREEN = (23, 27, 33), (255, 255, 255), (138, 143, 152), (126, 200, 80)
_BOLT = ((0.58, 0.08), (0.22, 0.56), (0.46, 0.56), (0.40, 0.92), (0.78, 0.42), (0.53, 0.42))  # corners, in its square
_FINER = 4  # drawn at so many times the size, for smooth edges


def emblems() -> Mapping[str, Image.Image]:
    """Each picture by the name of its file."""
    icon = Image.new("RGB", ICON, _PAPER)
    _bolt(icon, (0, 0), ICON[0])
    banner = Image.new("RGB", BANNER, _PAPER)
    _bolt(banner, (40, 95), 350)
    draw = ImageDraw.Draw(banner)
    draw.text((400, 150), "OneDiff", fill=_INK, font=ImageFont.load_default(size=130))
    draw.text((406, 310), "for ComfyUI: compiled once, kept,", fill=_GREY, font=ImageFont.load_default(size=44))
    draw.text((406, 366), "checked against ComfyUI's own pictures", fill=_GREY, font=ImageFont.load_default(size=44))
    return {"icon.png": icon, "banner.png": banner}


def _bolt(picture: Image.Image, corner: tuple[int, int], side: int) -> None:
    large = Image.new("L", (side * _FINER, side * _FINER), 0)
    ImageDraw.Draw(large).polygon([(x * large.width, y * large.height) for x, y in _BOLT], fill=255)
    picture.paste(_GREEN, corner, large.resize((side, side), Image.Resampling.LANCZOS))


def main() -> int:
    """Draw both."""
    for name, picture in emblems().items():
        picture.save(FOLDER / name, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

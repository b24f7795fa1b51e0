"""Addresses in pyproject.toml: where a release comes from is known when it is made, by whoever makes it.

python -m tools.release https://github.com/OWNER/NAME v1.2.3     # writes [project.urls], icon and banner
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from dev.environment import repository

_GITHUB = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)/?")
_BEFORE = "[project.scripts]\n"
_PICTURES = {"Icon": "icon.png", "Banner": "banner.png"}


def with_addresses(text: str, page: str, tag: str) -> str:
    """Return pyproject.toml with the addresses of a release in it.

    Args:
        text: of the file, which has none.
        page: of the repository, at GitHub.
        tag: of the release, whose pictures are shown.

    Raises:
        ValueError: the page is none of GitHub's, or the file has addresses.
    """
    found = _GITHUB.fullmatch(page)
    if found is None:
        raise ValueError(f"{page} is no page of a repository like https://github.com/OWNER/NAME")
    if "\n[project.urls]\n" in text:
        raise ValueError("pyproject.toml has addresses already")
    base = f"https://github.com/{found[1]}"
    urls = {
        "Repository": base,
        "Documentation": f"{base}/tree/{tag}/docs",
        "Issues": f"{base}/issues",
        "Changelog": f"{base}/blob/{tag}/CHANGELOG.md",
    }
    table = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    text = text.replace(_BEFORE, f"[project.urls]\n{table}\n{_BEFORE}", 1)
    for field, file in _PICTURES.items():
        address = f"https://raw.githubusercontent.com/{found[1]}/{tag}/docs/images/{file}"
        text = text.replace(f'{field} = ""\n', f'{field} = "{address}"\n', 1)
    return text


def main(arguments: Sequence[str]) -> int:
    """Write the file of this checkout."""
    if len(arguments) != 2:
        print(__doc__)
        return 2
    path: Path = repository() / "pyproject.toml"
    path.write_text(with_addresses(path.read_text(encoding="utf-8"), *arguments), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Tables that a command writes into a page, between two marks that are named like the table."""

from __future__ import annotations

import re


def with_table(text: str, name: str, table: str) -> str:
    """Return a page with what is between the marks ``<!-- NAME: COMMAND -->`` and ``<!-- /NAME -->`` replaced.

    Raises:
        ValueError: it has no place for such a table, or several.
    """
    marks = re.compile(rf"(<!-- {re.escape(name)}: [^\n]* -->\n).*?(<!-- /{re.escape(name)} -->)", re.DOTALL)
    changed, places = marks.subn(lambda match: match[1] + table + match[2], text)
    if places != 1:
        raise ValueError(f"the page has {places} places for the table of {name}")
    return changed

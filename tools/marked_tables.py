"""Tables that a command writes into a page, between two marks that are named like the table."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.files import Report, read, results_folder
from dev.environment import repository


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


@dataclass(frozen=True)
class ResultsTable:
    """A table in a page of docs/, of figures from one file of results: nobody types one.

    Attributes:
        page: file name of the page.
        name: of the table, in its marks.
        results: file name of the results.
        lines: makes the table, and what is said below it, of the results.
        command: that writes it.
    """

    page: str
    name: str
    results: str
    lines: Callable[[Report], list[str]]
    command: str

    @property
    def path(self) -> Path:
        """Return where the page is."""
        return repository() / "docs" / self.page

    def written(self) -> str:
        """Return the page's text as it is if the table is what the file says."""
        source = f"Source: [{self.results}](../benchmarks/results/{self.results})."
        table = [*self.lines(read(results_folder() / self.results)), source]
        return with_table(self.path.read_text(encoding="utf-8"), self.name, "\n".join(table) + "\n")

    def main(self, arguments: Sequence[str]) -> int:
        """Return 0 if the page is what the file says, or was written so (``--write``)."""
        text = self.written()
        if "--write" in arguments:
            self.path.write_text(text, encoding="utf-8")
            return 0
        if text != self.path.read_text(encoding="utf-8"):
            print(f"{self.page} is not what {self.results} says: {self.command}")
            return 1
        return 0

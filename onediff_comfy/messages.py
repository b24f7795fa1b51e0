"""Texts for people that can be shown in their language.

A message is its English text: it is logged, compared, counted and written as JSON like any other string. It also
remembers what it was made from, so that whoever shows it can make it again from a translated template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping


class Message(str):
    """An English text, with the template and the values that it was made from.

    Attributes:
        template: as of ``str.format``, with named fields only.
        values: what is put into it; texts among them may be messages themselves.
    """

    template: str
    values: Mapping[str, str | int | float]

    def __str__(self) -> str:
        """Return the message itself, so that ``str(error)`` of an error that was raised with one is a message still."""
        return self


def message(template: str, /, **values: object) -> Message:
    """Return a text made from a template and values.

    Args:
        template: written out where this is called: translations are found by it (``locales/*/messages.json``).
        values: texts and numbers are kept as they are, of everything else what ``str`` makes of it. ``source``, where
            the code is from that it is about, need not be in the template: who words it otherwise may want to know.
    """
    kept = {name: value if isinstance(value, (str, int, float)) else str(value) for name, value in values.items()}
    return _made(template, kept)


def joined(separator: str, parts: Iterable[str]) -> Message:
    """Return messages and other texts in a row, each to be translated by itself."""
    values = {f"part{number}": part for number, part in enumerate(parts)}
    return _made(separator.join(f"{{{name}}}" for name in values), values)


def _made(template: str, values: Mapping[str, str | int | float]) -> Message:
    made = Message(template.format(**values))
    made.template, made.values = template, values
    return made


def translated(text: str, catalogue: Mapping[str, str]) -> str:
    """Return a message in another language, in English where a template has no translation; other strings as they are.

    Args:
        text: a message, or any string.
        catalogue: translated templates, by the English ones.
    """
    if not isinstance(text, Message):
        return text
    values = {
        name: translated(value, catalogue) if isinstance(value, str) else value for name, value in text.values.items()
    }
    return catalogue.get(text.template, text.template).format(**values)


def reworded(text: str, reword: Callable[[Message], Message]) -> str:
    """Return a message with each message in it, and then itself, put through ``reword``; other strings as they are."""
    if not isinstance(text, Message):
        return text
    values = {name: reworded(value, reword) if isinstance(value, str) else value for name, value in text.values.items()}
    return reword(_made(text.template, values))


def first_line(error: BaseException) -> str:
    """Return what an exception says, in one line; of one that was raised with a message, the message."""
    text = str(error)
    return text if isinstance(text, Message) else (text.strip().splitlines() or [message("no message")])[0]


def printable(text: str) -> str:
    """Return a text from a file with what a terminal would act on, or cannot show, written as escapes."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )

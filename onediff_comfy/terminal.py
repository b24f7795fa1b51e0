"""What the commands print, and how a person types them."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

from .messages import printable

_PLAIN = re.compile(r"[\w.:/\\+-]+")


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line. What a file says may hold anything, and a terminal obeys some of it.

    Args:
        stream: standard output unless given.
    """
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(printable(text).encode(encoding, "backslashreplace").decode(encoding), file=stream)


def say_json(value: Any) -> None:
    """Print a value as JSON, in ASCII: what a terminal acts on is escaped."""
    for line in json.dumps(value, indent=1).splitlines():
        say(line)


def counted(number: int, thing: str) -> str:
    """Return ``1 graph``, ``2 graphs``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def number(text: str) -> float:
    """Return a number of a command line.

    Raises:
        argparse.ArgumentTypeError: it is below zero, without end, or no number.
    """
    try:
        given = float(text)
    except ValueError:
        given = math.nan
    if not 0 <= given < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 on")
    return given


def whole_number(text: str) -> int:
    """Return a number of a command line that has no fraction.

    Raises:
        argparse.ArgumentTypeError: it is below zero, without end, or no whole number.
    """
    given = number(text)
    if not given.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is no whole number")
    return int(given)


def own_command() -> str:
    """Return what runs the pack's commands with this Python, from any folder."""
    return f"{quoted(sys.executable)} {quoted(Path(__file__).resolve().parent)}"


def quoted(text: str | Path) -> str:
    """Return one argument of a command as a shell takes it: every command that is offered to a person is made so."""
    if os.name != "nt":
        return shlex.quote(str(text))
    argument = subprocess.list2cmdline([str(text)])  # quotes what has spaces, and cmd.exe acts on more than these
    return argument if argument.startswith('"') or _PLAIN.fullmatch(argument) else f'"{argument}"'

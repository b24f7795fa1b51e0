"""Conditions on sizes: Python expressions that can compute with small numbers and do nothing else.

They come out of PyTorch's tracing, and out of files that anybody may have written.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..messages import message
from .call import NotCovered

# What the conditions of a range may consist of: arithmetic and comparisons of sizes, nothing that
# could run anything else.
_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult,
    ast.FloorDiv, ast.Div, ast.Mod, ast.Pow, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Name,
    ast.Load, ast.Constant, ast.Call,
)  # fmt: skip
_FUNCTIONS: Mapping[str, Any] = {"max": max, "min": min}


_LARGEST_POWER = 8
_LARGEST_NUMBER = 1 << 64
"""Compilers for GPUs ask whether sums of sizes are less than 2**63."""
_LONGEST_CONDITION = 20_000
_DEEPEST_CONDITION = 100
"""Levels of an expression. Python compiles no expression of any depth."""
_SHOWN = 200
_OR_EQUAL: Mapping[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.Gt: ast.GtE}


def _small_number(node: ast.AST) -> bool:
    """Return True if the node is no constant, or one that sizes are compared with: no text to be multiplied."""
    return not isinstance(node, ast.Constant) or (
        isinstance(node.value, (int, float)) and abs(node.value) < _LARGEST_NUMBER
    )


def _small_power(node: ast.AST) -> bool:
    """Return True if the node is no power, or a small one of something without powers."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)):
        return True
    exponent = node.right.value if isinstance(node.right, ast.Constant) else None
    nested = any(isinstance(inner, ast.Pow) for inner in ast.walk(node.left))
    return not nested and isinstance(exponent, int) and 0 <= exponent <= _LARGEST_POWER


def _parsed(text: str) -> ast.Expression:
    """Return a condition's syntax, of which no part can do more than compute with small numbers.

    Raises:
        NotCovered: it is more than arithmetic on sizes.
    """
    try:
        tree = ast.parse(text if len(text) <= _LONGEST_CONDITION else "", mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotCovered(message("a condition on sizes cannot be read ({text})", text=text[:_SHOWN])) from error
    level: list[ast.AST] = [tree]
    for _ in range(_DEEPEST_CONDITION):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise NotCovered(message("a condition on sizes cannot be read ({text})", text=text[:_SHOWN]))
    for node in ast.walk(tree):
        named = isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS)
        if not isinstance(node, _ALLOWED) or named or not _small_power(node) or not _small_number(node):
            raise NotCovered(message("a condition on sizes is more than arithmetic ({text})", text=text[:_SHOWN]))
    return tree


def names_in(text: str) -> set[str]:
    """Return the symbols that a condition is about.

    Raises:
        NotCovered: it is more than arithmetic on sizes.
    """
    return {node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name)} - _FUNCTIONS.keys()


@functools.lru_cache(maxsize=4096)
def compiled(text: str, ties: bool = False) -> Callable[[Mapping[str, int]], bool]:
    """A condition as a function of the symbols' values.

    Args:
        text: a Python expression.
        ties: whether a comparison for less or greater also holds between equals.

    Raises:
        NotCovered: it is more than arithmetic on sizes.
    """
    tree = _parsed(text)
    comparison = tree.body
    if ties and isinstance(comparison, ast.Compare):
        comparison.ops = [_OR_EQUAL.get(type(op), type(op))() for op in comparison.ops]
    code = compile(tree, "<condition>", "eval")

    def holds(values: Mapping[str, int]) -> bool:
        try:
            return bool(eval(code, {"__builtins__": {}, **_FUNCTIONS}, dict(values)))
        except (ArithmeticError, TypeError):  # where it divides by nothing, or compares what is no number, it holds not
            return False

    return holds

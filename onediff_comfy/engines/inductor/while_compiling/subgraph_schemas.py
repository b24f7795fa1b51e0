"""What PyTorch has to know of a subgraph to call it, found once for all of its calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_ONE_AT_A_TIME = threading.RLock()  # or one that ends would bring back what another has put there


@contextlib.contextmanager
def schemas_found_once() -> Iterator[None]:
    """While this thread is inside, PyTorch traces a subgraph once to see what it takes and gives, not at each call.

    PyTorch before 2.13 traces it anew for each of SDXL's 70 blocks, and twice over: hosts of H200s compiled it in 80 to
    100 s with that, and take 66 to 84 without (benchmarks/NOTES.md, sections 36 to 38). Later ones note the schema by
    the same key, and nothing is done, as in one that has no schemas.
    """
    try:
        from torch._guards import InvokeSubgraphCache
        from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
    except ImportError:
        yield
        return
    kind: Any = type(invoke_subgraph)
    if hasattr(InvokeSubgraphCache, "get_functionalize_schema_entry") or not hasattr(kind, "gen_schema"):
        yield
        return
    thread, found = threading.get_ident(), dict[Any, tuple[Any, Any]]()
    with _ONE_AT_A_TIME:
        trace = kind.gen_schema

        def gen_schema(operator: Any, subgraph: Any, identifier: Any, *operands: Any) -> Any:
            if threading.get_ident() != thread:
                return trace(operator, subgraph, identifier, *operands)
            key = id(subgraph), identifier, tuple(map(type, operands))
            if key not in found:  # with the subgraph, or another might get its id
                found[key] = subgraph, trace(operator, subgraph, identifier, *operands)
            return found[key][1]

        kind.gen_schema = gen_schema
        try:
            yield
        finally:
            kind.gen_schema = trace

"""engines/inductor/while_compiling/subgraph_schemas.py: a subgraph is traced once to see what it takes and gives."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch._guards import InvokeSubgraphCache
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

from onediff_comfy.engines.inductor.while_compiling.subgraph_schemas import schemas_found_once


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is traced, in a PyTorch that notes nothing of it."""
    found = list[Any]()

    def gen_schema(_operator: Any, subgraph: Any, identifier: str, *operands: Any) -> Any:
        found.append((subgraph, identifier, operands))
        return object()

    monkeypatch.setattr(torch._guards, "InvokeSubgraphCache", object)
    monkeypatch.setattr(type(invoke_subgraph), "gen_schema", gen_schema)
    return found


def test_a_subgraph_is_traced_once_whatever_calls_it(traced: list[Any]) -> None:
    subgraph, other, x = torch.nn.Identity(), torch.nn.Identity(), torch.ones(1)
    with schemas_found_once():
        schemas = [invoke_subgraph.gen_schema(each, "a", x) for each in (subgraph, subgraph, other, subgraph)]
        assert schemas[0] is schemas[1] is schemas[3] is not schemas[2] and len(traced) == 2
        assert invoke_subgraph.gen_schema(subgraph, "b", x) is not schemas[0]
        assert invoke_subgraph.gen_schema(subgraph, "a", 1) is not schemas[0]
        before = len(traced)
        thread = threading.Thread(target=invoke_subgraph.gen_schema, args=(subgraph, "a", x))
        thread.start()
        thread.join()
        assert len(traced) == before + 1  # another's own
    invoke_subgraph.gen_schema(subgraph, "a", x)
    assert len(traced) == before + 2


def test_a_pytorch_without_schemas_is_left_alone(traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._guards, "InvokeSubgraphCache")
    before = type(invoke_subgraph).gen_schema
    with schemas_found_once():
        assert type(invoke_subgraph).gen_schema is before


def test_nothing_is_changed_where_pytorch_notes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InvokeSubgraphCache, "get_functionalize_schema_entry", lambda *_: None, raising=False)
    before = type(invoke_subgraph).gen_schema
    with schemas_found_once():
        assert type(invoke_subgraph).gen_schema is before

"""A proof is of what asks: two modules may have one graph, and not be the same where a trace has opened its range."""

from __future__ import annotations

from typing import Any

import torch
from test_general import Served, process
from torch import nn


class Doubled(nn.Module):
    """``alone`` takes the place of the factor where there is one sample, which no trace for all sizes sees."""

    def __init__(self, alone: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.alone = nn.Linear(4, 4), alone

    def factor(self, x: torch.Tensor, _options: dict[str, Any]) -> float:
        return 2.0

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, transformer_options: Any = {}) -> torch.Tensor:  # noqa: B006
        output: torch.Tensor = self.linear(x) * timestep[:, None, None] * self.factor(x, transformer_options)
        return output


class OtherAlone(Doubled):
    def factor(self, x: torch.Tensor, _options: dict[str, Any]) -> float:
        return self.alone if x.shape[0] == 1 else 2.0


class OtherWithOption(Doubled):
    def factor(self, x: torch.Tensor, options: dict[str, Any]) -> float:
        return 7.0 if options.get("guided") and x.shape[0] == 1 else 2.0


def calls(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 16, 4), torch.rand(batch) + 0.5


def right(served: Served, batch: int, **options: Any) -> bool:
    args, kwargs = calls(batch), {"transformer_options": options}
    with torch.no_grad():
        actual = served.dispatcher(served.module, served.module.forward, args, kwargs)
        return torch.allclose(actual, served.module(*args, **kwargs), rtol=1e-4, atol=1e-5)


def test_another_modules_proof_says_nothing() -> None:
    library = process()
    first = Served(library, Doubled())
    assert all(right(first, batch) for batch in (2, 1, 1))
    other = Served(library, OtherAlone(7.0))
    assert all(right(other, batch) for batch in (2, 1, 1))
    assert all(right(first, batch) for batch in (2, 1))
    assert library.metrics.snapshot()["retired"] == 0  # nor does one model's error retire what is right for another
    assert "right for another model" in next(iter(other.fallbacks))


def test_nor_does_that_of_a_call_without_an_option() -> None:
    served = Served(process(), OtherWithOption())
    assert all(right(served, batch) for batch in (2, 1))
    assert all(right(served, batch, guided=True) for batch in (1, 2, 1))


def test_nor_does_that_of_what_the_module_was_before() -> None:
    served = Served(process(), OtherAlone(2.0))
    assert all(right(served, batch) for batch in (2, 1))
    served.module.alone = 7.0
    served.dispatcher.begin_run()
    assert all(right(served, batch) for batch in (1, 1, 2))


def test_the_same_module_with_other_weights_is_believed() -> None:
    library = process()
    first = Served(library, Doubled())
    assert right(first, 2)
    other = Served(library, Doubled())
    nn.init.normal_(other.module.linear.weight)
    assert right(other, 2)
    assert (library.metrics.snapshot()["proved"], library.metrics.snapshot()["compiled"]) == (1, 1)

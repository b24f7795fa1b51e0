"""small_weights.py: copies that stay where they are, and follow what is written to the weights and where these go."""

from __future__ import annotations

import torch

from onediff_comfy.host.weights.small_weights import Place, SmallWeights

CPU = torch.device("cpu")


def shown(small: SmallWeights, weight: torch.Tensor, device: torch.device = CPU) -> torch.Tensor:
    image: dict[str, torch.Tensor] = {"weight": weight}
    small.stand_in([Place(image, "weight", torch.float32, device)])
    small.refresh()
    return image["weight"]


def test_a_copy_stays_where_it_is_and_has_what_the_weight_has_now() -> None:
    small, weight = SmallWeights(), torch.ones(4, dtype=torch.float16)
    copy = shown(small, weight)
    assert (copy.dtype, copy.tolist()) == (torch.float32, [1.0] * 4)
    weight.fill_(2)
    small.refresh()
    assert copy.tolist() == [2.0] * 4
    assert shown(small, torch.full((4,), 3.0)) is copy and copy.tolist() == [3.0] * 4
    assert shown(small, torch.zeros(5)) is not copy, "of another size"


def test_it_is_where_it_is_wanted_though_the_weight_was_taken_away() -> None:
    """As the host does with a model's small weights in the middle of a run when it needs memory."""
    assert shown(SmallWeights(), torch.ones(4), torch.device("meta")).device.type == "meta"

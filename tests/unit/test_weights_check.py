"""weights_check.py: what a module's image computes is compared with the host, once as it is and once with a LoRA."""

from __future__ import annotations

import torch

from onediff_comfy.host.adapters.part import DiffusionModel
from onediff_comfy.host.adapters.weights_check import WeightsCheck
from onediff_comfy.host.weights.layer_images import are_changed, is_changed


class Told:
    """In the place of a dispatcher: what it was told of calls that are left to the host."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def passed_by(self, _module: torch.nn.Module, reason: str) -> None:
        self.reasons.append(reason)


class Model:
    """The host's, as far as it is asked."""

    device = torch.device("cpu")

    def get_dtype_inference(self) -> torch.dtype:
        return torch.bfloat16


MODEL = Model()
ONES = torch.ones(8)


def test_a_verdict_is_kept_for_all_dispatchers_and_a_lora_asks_for_another() -> None:
    module, told = torch.nn.Sequential(torch.nn.Linear(2, 2)), Told()
    check, other = (
        WeightsCheck(DiffusionModel(MODEL), told, whole=True),
        WeightsCheck(DiffusionModel(MODEL), told, whole=True),
    )
    in_blocks = WeightsCheck(DiffusionModel(MODEL), told, whole=False)
    assert check.is_due(module, changed=False) and not check.is_wrong(module)
    assert check.agree(module, False, ONES, ONES)
    assert not other.is_due(module, changed=False) and in_blocks.is_due(module, changed=False)
    for name, function in (("weight_lowvram_function", abs), ("weight_function", [abs])):
        setattr(module[0], name, function)
        assert is_changed(module)
        assert other.is_due(module, changed=True) == (name == "weight_lowvram_function")
        if other.is_due(module, changed=True):
            assert not other.agree(module, True, ONES, 2 * ONES)
        assert check.is_wrong(module)
        delattr(module[0], name)
    assert not check.is_wrong(module) and told.reasons == [check.reason]


def test_another_function_in_the_place_of_a_method_is_compared_anew() -> None:
    """It has the same name, and need not use the same weights. What is known of the one before stays."""

    class Layer(torch.nn.Linear):
        pass

    module, check = Layer(2, 2), WeightsCheck(DiffusionModel(MODEL), Told(), whole=True)
    own = Layer.forward
    assert check.agree(module, False, ONES, ONES)

    def forward(self: Layer, x: torch.Tensor) -> torch.Tensor:
        return own(self, x) + 1

    Layer.forward = forward  # type: ignore[method-assign]
    assert check.is_due(module, False) and not check.is_due(module, False, own)
    assert not check.agree(module, False, ONES, 2 * ONES) and check.is_wrong(module)
    Layer.forward = own  # type: ignore[method-assign]
    assert not check.is_wrong(module) and not check.is_due(module, False)


def test_what_rounding_explains_is_no_difference_and_another_structure_is() -> None:
    check = WeightsCheck(DiffusionModel(MODEL), Told(), whole=True)
    assert check.agree(torch.nn.Linear(2, 2), False, ONES * (1 + 2**-12), ONES)
    assert not check.agree(torch.nn.Linear(2, 2), False, (ONES,), ONES)
    assert check.agree(torch.nn.Linear(2, 2), False, (ONES, None), (ONES, None)), "None is no tensor"


def test_a_layer_without_weights_computes_with_no_others() -> None:
    """Whoever asks of a module and whoever asks of its layers have to be told the same, or a verdict is not found."""
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    layers[1].weight_function = [torch.neg]
    assert not is_changed(layers) and not any(are_changed(tuple(layers.modules())))
    layers[0].weight_function = [torch.neg]
    assert is_changed(layers) and are_changed(tuple(layers.modules())) == [False, True, False]

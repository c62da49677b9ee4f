"""Parameters that partitions cannot hold, and changes after the partitions are fixed."""

from collections.abc import Callable

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_shard.zero.guards import RequiresGradWatch, check_optimizer_parameters, check_parameters


def module(dtype: torch.dtype, trainable: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].odd = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=trainable)
    return model


@pytest.mark.parametrize(
    ("dtype", "trainable", "precision", "fits"),
    [
        (torch.float32, True, "32-true", True),
        (torch.float32, True, "bf16-mixed", True),
        (torch.bfloat16, True, "bf16-true", True),
        (torch.bfloat16, True, "bf16-mixed", True),
        (torch.bfloat16, True, "32-true", False),
        (torch.bfloat16, False, "32-true", False),
        (torch.float16, True, "32-true", False),
        (torch.float64, True, "32-true", False),
        (torch.float64, True, "bf16-mixed", False),
        (torch.float64, False, "32-true", False),
        (torch.complex64, True, "32-true", False),
        (torch.complex64, False, "bf16-mixed", False),
        (torch.complex128, False, "32-true", False),
        (torch.int64, False, "32-true", True),
        (torch.uint8, False, "bf16-true", True),
    ],
)
def test_dtypes(dtype: torch.dtype, trainable: bool, precision: str, fits: bool) -> None:
    model = module(dtype, trainable)
    if fits:
        check_parameters(model, precision)
        return
    with pytest.raises(MisconfigurationException) as caught:
        check_parameters(model, precision)
    message = str(caught.value)
    assert "'1.odd'" in message and str(dtype) in message and precision in message


def test_an_optimizer_over_the_modules_parameters_passes() -> None:
    model = module(torch.float32)
    model[0].weight.requires_grad_(False)
    check_optimizer_parameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    check_optimizer_parameters(model, torch.optim.SGD([model[0].bias], lr=0.1))


def test_a_strange_parameter_is_named_by_its_place() -> None:
    model = module(torch.float32)
    groups = [{"params": [model[0].weight]}, {"params": [model[0].bias, nn.Parameter(torch.zeros(4, 5))]}]
    with pytest.raises(MisconfigurationException, match=r"parameter 1 of group 1 \(shape \(4, 5\)\).*Register it"):
        check_optimizer_parameters(model, torch.optim.SGD(groups, lr=0.1))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_twice_is_named() -> None:
    model = module(torch.float32)
    optimizer = torch.optim.SGD([model[0].weight, model[0].bias, model[0].weight], lr=0.1)
    with pytest.raises(
        MisconfigurationException, match=r"'0\.weight' is in the optimizer twice: as parameter 0.*param"
    ):
        check_optimizer_parameters(model, optimizer)


def test_nothing_to_train_is_refused() -> None:
    model = module(torch.float32).requires_grad_(False)
    with pytest.raises(MisconfigurationException, match="No parameter in the optimizer of Sequential requires a grad"):
        check_optimizer_parameters(model, torch.optim.SGD(model.parameters(), lr=0.1))


def unfreeze(model: nn.Module) -> None:
    model[0].weight.requires_grad_(True)


def freeze(model: nn.Module) -> None:
    model[0].bias.requires_grad_(False)


def add(model: nn.Module) -> None:
    model[1].more = nn.Parameter(torch.zeros(1))


def replace(model: nn.Module) -> None:
    model[1].odd = nn.Parameter(torch.zeros(3))


def remove(model: nn.Module) -> None:
    del model[1].odd


def tie(model: nn.Module) -> None:
    model[1].odd = model[0].bias


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfreeze, "'0.weight' was unfrozen"),
        (freeze, "'0.bias' was frozen"),
        (add, "'1.more' was added"),
        (replace, "'1.odd' was added"),
        (remove, "was removed"),
        (tie, "was removed"),
    ],
)
def test_a_change_after_the_start_is_named(change: Callable[[nn.Module], None], words: str) -> None:
    model = module(torch.float32)
    model[0].weight.requires_grad_(False)
    watch = RequiresGradWatch(model)
    watch.check()
    change(model)
    with pytest.raises(MisconfigurationException, match=r"Make .* before `fit`") as caught:
        watch.check()
    assert words in str(caught.value)


def test_a_change_that_is_taken_back_passes() -> None:
    model = module(torch.float32)
    watch = RequiresGradWatch(model)
    freeze(model)
    model[0].bias.requires_grad_(True)
    model[0].weight.data = torch.ones(2, 2)
    model[0].weight.grad = torch.ones(2, 2)
    watch.check()

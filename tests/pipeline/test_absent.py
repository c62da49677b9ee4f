"""Tensors of other stages: they have shapes, and every use of their values is an error that names where they are."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from lightning_shard.pipeline.absent import (
    AbsentError,
    AbsentTensor,
    absent_like,
    absent_of,
    absent_parameter,
    is_absent,
)

CPU = torch.device("cpu")


def absent(*shape: int, dtype: torch.dtype = torch.float32, origin: str = "layers.3") -> AbsentTensor:
    return absent_of(shape, dtype, CPU, origin)


class Double(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + torch.ones(4),
    "reversed": lambda x: 2 - x,
    "compare": lambda x: x > 0,
    "matmul": lambda x: x @ torch.ones(4, 3),
    "linear": lambda x: F.linear(x, torch.ones(5, 4), torch.ones(5)),
    "mean": lambda x: x.mean(),
    "argmax": lambda x: x.argmax(-1),
    "max": lambda x: x.max(-1),
    "chunk": lambda x: x.chunk(2, -1),
    "iterate": lambda x: list(x),
    "unpack": lambda x: [*x.unbind(1)],
    "cat": lambda x: torch.cat([torch.ones(2, 4), x]),
    "stack": lambda x: torch.stack([x, x]),
    "getitem": lambda x: x[:, None, 1:],
    "index": lambda x: torch.ones(7, 3)[x.long()],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "transposed": lambda x: x.mT.contiguous(),
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.T.reshape(-1, 2),
    "expand": lambda x: x[None].expand(3, -1, -1),
    "half": lambda x: x.bfloat16(),
    "to": lambda x: x.to(torch.float64).cpu(),
    "softmax": lambda x: x.softmax(-1),
    "cross entropy": lambda x: F.cross_entropy(x, torch.tensor([1, 2])),
    "loss module": lambda x: nn.MSELoss()(x, torch.ones(2, 4)),
    "embedding": lambda x: F.embedding(x.long(), torch.ones(9, 5)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "norm": lambda x: F.layer_norm(x, (4,)),
    "dropout": lambda x: F.dropout(x, 0.5),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "in place": lambda x: x.clone().mul_(2).relu_(),
    "set item": lambda x: x.clone().__setitem__((slice(None), 0), 1.0),
    "own function": lambda x: Double.apply(x),
    "detach": lambda x: x.detach(),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2),
    "convolution": lambda x: F.conv1d(x[None], torch.ones(3, 2, 1)),
    "lstm": lambda x: nn.LSTM(4, 3)(x)[1][0],
    "one hot": lambda x: F.one_hot(x.long(), 5),
    "sort": lambda x: x.sort(-1),
    "quantile": lambda x: x.quantile(torch.tensor([0.5, 0.9])),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "float16 pad": lambda x: F.pad(x.half(), (1, 1)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_give_the_shape_and_dtype_of_the_real_thing(name: str) -> None:
    run = OPERATORS[name]
    real, found = run(torch.ones(2, 4)), run(absent(2, 4))
    real, found = ([each] if isinstance(each, Tensor) else list(each or []) for each in (real, found))
    assert len(real) == len(found)
    for one, other in zip(real, found, strict=True):
        assert is_absent(other)
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        assert one.stride() == other.stride()


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.item(),
    "float": lambda x: float(x),
    "int": lambda x: int(x),
    "bool": lambda x: bool(x),
    "branch": lambda x: 1 if x > 0 else 2,
    "range": lambda x: range(x.long()),
    "math": lambda x: math.sqrt(x),
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "numpy of detached": lambda x: x.detach().cpu().numpy(),
    "forced numpy": lambda x: x.numpy(force=True),
    "array": lambda x: np.asarray(x),
    "format": lambda x: f"{x:.3f}",
    "percent": lambda x: "%.3f" % x,  # noqa: UP031
    "equal": lambda x: torch.equal(x, torch.zeros(())),
    "allclose": lambda x: torch.allclose(x, torch.zeros(())),
    "contains": lambda x: 3.0 in x[None],
    "largest of a list": lambda x: max([x, x + 1]),
    "nonzero": lambda x: x[None].nonzero(),
    "boolean index": lambda x: torch.ones(1)[x[None] > 0],
    "unique": lambda x: x[None].unique(),
    "number of an index": lambda x: [1, 2, 3][x.long()],
    "pickle": lambda x: pickle.dumps(x),
    "save": lambda x: torch.save({"x": x}, io.BytesIO()),
    "repeat": lambda x: torch.ones(1).repeat_interleave(x.long()[None]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_use_of_the_value_is_an_error_that_names_its_origin_and_the_remedies(name: str) -> None:
    with pytest.raises(AbsentError) as caught:
        VALUES[name](absent(origin="layers.3"))
    text = str(caught.value)
    assert "It comes from layers.3" in text
    assert "after the last module call" in text and "has_last_stage" in text and "broadcast_from_last" in text


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy": lambda here, x: here.copy_(x),
    "add": lambda here, x: here.add_(x),
    "set item": lambda here, x: here.__setitem__(0, x[0]),
    "out": lambda here, x: torch.add(x, x, out=here),
    "scatter": lambda here, x: here.scatter_(0, torch.zeros(2, 4, dtype=torch.long), x),
    "at places": lambda here, x: here.index_put_((x.long()[:, 0] * 0,), torch.ones(4)),
    "fill": lambda here, x: here.fill_(x.mean()),
    "for each": lambda here, x: torch._foreach_add_([here], [x]),
    "masked": lambda here, x: here.masked_fill_(x > 0, 1.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_nothing_absent_is_written_into_a_tensor_that_is_here(name: str) -> None:
    here = torch.ones(2, 4)
    with pytest.raises(AbsentError, match=r"written into a tensor of shape \(.*4,?\) that is here.*layers\.3"):
        WRITES[name](here, absent(2, 4))
    assert torch.equal(here, torch.ones(2, 4))


def test_an_augmented_sum_of_numbers_becomes_absent() -> None:
    total: Any = 0.0
    total += absent()
    assert is_absent(total)
    running = torch.zeros(())
    with pytest.raises(AbsentError):
        running += absent()


def test_changing_an_absent_tensor_in_place_keeps_the_object() -> None:
    x = absent(2, 4)
    same = x
    x += 1
    x.mul_(torch.ones(4)).relu_()
    x[:, 0] = 5.0
    assert x is same
    assert F.relu(x, inplace=True) is x


def test_what_only_copies_a_shape_is_real() -> None:
    x = absent(2, 4, dtype=torch.bfloat16)
    made = [torch.zeros_like(x), x.new_zeros(3), torch.ones_like(x, dtype=torch.float32), torch.full_like(x, 2.0)]
    assert not any(is_absent(each) for each in made)
    assert [tuple(each.shape) for each in made] == [(2, 4), (3,), (2, 4), (2, 4)]
    assert [each.dtype for each in made] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]
    assert made[3].unique().tolist() == [2.0]
    assert not is_absent(torch.rand_like(x)) and not is_absent(x.new_tensor([1.0]))
    assert not is_absent(torch.arange(x.shape[0])) and len(x) == 2 and x.numel() == 8 and x.dim() == 2


def test_results_name_all_absent_arguments_origins() -> None:
    both = absent(2, origin="a") + absent(2, origin="b")
    assert both.origin in ("a", "b")
    with pytest.raises(AbsentError, match="It comes from a, b"):
        torch.equal(absent(2, origin="b"), absent(2, origin="a"))


def test_it_can_be_shown() -> None:
    text = repr(absent(2, 4))
    assert "(2, 4)" in text and "layers.3" in text
    assert f"{absent(2, 4)}" == text == str(absent(2, 4))


def test_a_wrong_shape_is_an_error() -> None:
    with pytest.raises(AbsentError) as caught:
        absent(2, 4) @ torch.ones(3, 3)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_strides_are_those_of_the_original() -> None:
    original = torch.ones(4, 6).T[::2]
    assert absent_like(original, CPU, "x").stride() == original.stride()


def test_an_absent_parameter_is_a_parameter_that_optimizers_skip() -> None:
    real = nn.Parameter(torch.ones(3))
    stand_in = absent_parameter(nn.Parameter(torch.ones(1000, 1000)), CPU, "far.weight")
    frozen = absent_parameter(nn.Parameter(torch.ones(2), requires_grad=False), CPU, "frozen")
    assert isinstance(stand_in, nn.Parameter) and is_absent(stand_in)
    assert stand_in.requires_grad and not frozen.requires_grad
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor):
        optimizer = kind([real, stand_in, frozen], lr=0.1)
        real.sum().backward()
        nn.utils.clip_grad_norm_([real, stand_in], 1.0)
        optimizer.step()
        assert stand_in.grad is None and list(optimizer.state) in ([real], [])
    assert not real.equal(torch.ones(3))


def test_a_module_with_absent_parameters_computes_absent_values_and_can_be_copied() -> None:
    module = nn.Linear(4, 3)
    module.weight = absent_parameter(module.weight, CPU, "far.weight")
    result = module(torch.ones(2, 4))
    assert is_absent(result) and result.shape == (2, 3)
    twin = copy.deepcopy(module)
    assert is_absent(twin.weight) and isinstance(twin.weight, nn.Parameter) and twin.weight is not module.weight
    with pytest.raises(AbsentError, match=r"far\.weight"):
        torch.save(module.state_dict(), io.BytesIO())
    with pytest.raises(AbsentError, match=r"far\.weight"):
        float(result.detach().sum())


def test_no_real_gradient_comes_out_of_an_absent_loss() -> None:
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * absent(4)).sum()
    assert is_absent(loss)
    loss.backward()
    assert is_absent(weight.grad)


def test_a_list_of_absent_numbers_makes_no_tensor() -> None:
    assert is_absent(torch.as_tensor(absent()))
    for make in (torch.tensor, torch.as_tensor):
        with pytest.raises(RuntimeError):
            make([absent(), absent()])

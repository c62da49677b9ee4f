"""A tensor that is on another stage: shape, dtype and device without data.

Any operator on one gives another. What would need the data (a number, a branch, a copy into a tensor that is here)
raises `AbsentError`, so that a missing value is never taken for a real one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

_aten = torch.ops.aten

_SHAPE_ONLY = frozenset(
    "zeros_like ones_like full_like empty_like rand_like randn_like randint_like"
    " new_zeros new_ones new_full new_empty new_empty_strided".split()
)
"""Operators that take from their first argument nothing but its shape, dtype and device."""


class AbsentError(RuntimeError):
    """The value of a tensor was needed on a rank that does not have it."""


class AbsentTensor(Tensor):
    """A tensor without data.

    Attributes:
        origin: What made it, for messages: a module's name, or a parameter's.

    """

    _like: Tensor
    origin: str

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, origin: str) -> Self:
        """A stand-in for a tensor like ``like``, which is on the meta device, on ``device``."""
        made: Self = Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )
        made._like = like
        made.origin = origin
        return made

    def __init__(self, like: Tensor, device: torch.device, origin: str) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without contents: there are none."""
        return f"AbsentTensor(shape={tuple(self.shape)}, dtype={self.dtype}, from {self.origin})"

    def __format__(self, spec: str) -> str:
        """As `repr`; with a format, a number is wanted."""
        if spec:
            raise AbsentError(_message(f"a format ({spec!r}) needs its value", [self]))
        return repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise: a file with stand-ins in it would look like one with weights."""
        raise AbsentError(_message("it would be saved or sent; `trainer.save_checkpoint` saves all stages", [self]))

    def tolist(self) -> Any:
        """Raise: there are no values."""
        raise AbsentError(_message("its values are needed in Python (tolist)", [self]))

    def numpy(self, *, force: bool = False) -> Any:
        """Raise: there are no values."""
        raise AbsentError(_message("its values are needed in numpy", [self]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Another one, as a parameter if this is one."""
        copied: Any = absent_like(self, self.device, self.origin)
        if isinstance(self, nn.Parameter):
            copied = absent_parameter(self, self.device, self.origin)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator on shapes alone."""
        kwargs = kwargs or {}
        absent = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, AbsentTensor)]
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            raise AbsentError(_message("a Python number or a branch needs its value", absent))
        first = args[0] if args else None
        if name == "equal" and all(isinstance(value, nn.Parameter) for value in args[:2]):
            return args[0] is args[1]  # finetuning callbacks ask so whether an optimizer has a parameter already
        if name in _SHAPE_ONLY and isinstance(first, AbsentTensor) and not isinstance(first, nn.Parameter):
            return _made_here(func, first, args, kwargs)
        _refuse_writes(func, args, kwargs, absent)
        device = absent[0].device if not isinstance(kwargs.get("device"), torch.device) else kwargs["device"]
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            shapes = _map_tensors((args, kwargs), _shape_of)
            result = func(*shapes[0], **shapes[1])
        except AbsentError:
            raise
        except Exception as error:
            raise AbsentError(_message(f"{func} cannot do without its values", absent)) from error
        if _in_place(func) and isinstance(first, AbsentTensor):
            return first
        return _map_tensors(result, lambda tensor: cls(tensor, device, absent[0].origin))


def absent_like(tensor: Tensor, device: torch.device, origin: str) -> AbsentTensor:
    """A stand-in for ``tensor``."""
    like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return AbsentTensor(like, device, origin)


def absent_of(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, origin: str, requires_grad: bool = False
) -> AbsentTensor:
    """A stand-in for a contiguous tensor."""
    made = AbsentTensor(torch.empty(tuple(shape), dtype=dtype, device="meta"), device, origin)
    if requires_grad and torch.is_grad_enabled():
        # No leaf: like the result of a module it may be changed in place.
        return made.requires_grad_().clone()  # type: ignore[return-value]
    return made


def absent_parameter(parameter: Tensor, device: torch.device, name: str) -> nn.Parameter:
    """A stand-in for a parameter of another stage: it never has a gradient, so optimizers skip it."""
    stand_in = nn.Parameter(absent_like(parameter, device, name), requires_grad=parameter.requires_grad)
    vars(stand_in).update(_like=absent_like(parameter, device, name)._like, origin=name)
    return stand_in


def is_absent(value: Any) -> bool:
    """Whether ``value`` is a tensor of another stage."""
    return isinstance(value, AbsentTensor)


def _leaves(value: Any) -> Iterator[Any]:
    """The arguments of an operator, out of their lists and dicts."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    return value


def _shape_of(tensor: Tensor) -> Tensor:
    if isinstance(tensor, AbsentTensor):
        return tensor._like
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _made_here(func: Any, first: AbsentTensor, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """What only copies a shape has values of its own, here as anywhere."""
    like = torch.empty(0, dtype=first.dtype, device=first.device).expand(0)
    name = func.overloadpacket.__name__
    if name.endswith("_like"):
        like = torch.empty((), dtype=first.dtype, device=first.device).expand(first.size())
        kwargs = {"memory_format": torch.contiguous_format, **kwargs}
    result: Tensor = func(like, *args[1:], **kwargs)
    return result


def _in_place(func: Any) -> bool:
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)


def _refuse_writes(func: Any, args: Any, kwargs: dict[str, Any], absent: list[AbsentTensor]) -> None:
    """An absent value must not be written into a tensor that is here: nobody would know that its contents are old."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[position] if position < len(args) else kwargs.get(argument.name)
        for target in _leaves(written):
            if isinstance(target, Tensor) and not isinstance(target, AbsentTensor):
                raise AbsentError(
                    _message(f"it would be written into a tensor of shape {tuple(target.shape)} that is here", absent)
                )


def _message(what: str, absent: list[AbsentTensor]) -> str:
    origins = sorted({tensor.origin for tensor in absent})
    if any(isinstance(tensor, nn.Parameter) for tensor in absent):
        return (
            f"A parameter of another pipeline stage is used on this rank: {what}. It is {', '.join(origins)}, which"
            " another rank keeps. `trainer.strategy.full_state_dict()`, called on all ranks, gives all of them."
        )
    return (
        f"A value of another pipeline stage is used on this rank: {what}. It comes from {', '.join(origins)}, which"
        " another stage computes. Inside a step, compute with it after the last module call (the last stage has"
        " everything), or let it be an output of a module; in a hook, guard the code with"
        " `trainer.strategy.has_last_stage`, or take the value with `trainer.strategy.broadcast_from_last(value)`."
    )

"""What a file of `torch.save` holds, without running any of its code and without reading its tensors.

torch itself either refuses what is no plain data, or runs it. For a look at a checkpoint of unknown origin neither
helps. The pickle in the file is read here with inert stand-ins for all classes and functions, but for those few by
which torch puts tensors together; their names are private.
"""

import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import IO, Any

import torch


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A tensor without values."""

    shape: tuple[int, ...]
    """Its shape."""

    dtype: torch.dtype
    """Its dtype."""

    place: tuple[str, int]
    """The memory that it lies in, and its first element there: tied tensors have the same."""


class Unknown:
    """Stands for an object of a class that the file names; takes everything, and does nothing."""

    name = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> "Unknown":
        return super().__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> "Unknown":
        return self

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update({key: value for key, value in state.items() if isinstance(key, str)})

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None:
        """Take an item of a list."""

    def extend(self, values: Any) -> None:
        """Take items of a list."""

    def add(self, value: Any) -> None:
        """Take an item of a set."""


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype


def _tensor(storage: _Storage, offset: int, size: Any, stride: Any, *rest: Any) -> Outline:
    return Outline(shape=tuple(size), dtype=storage.dtype, place=(storage.key, offset))


def _tensor_of(
    storage: _Storage, offset: int, size: Any, stride: Any, grad: Any, hooks: Any, dtype: torch.dtype, *rest: Any
) -> Outline:
    return Outline(shape=tuple(size), dtype=dtype, place=(storage.key, offset))


def _same(value: Any, *rest: Any) -> Any:
    return value


def _subclass(function: Any, kind: Any, args: Any, state: Any) -> Any:
    return function(*args)


_KNOWN = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of,
    ("torch._utils", "_rebuild_parameter"): _same,
    ("torch._utils", "_rebuild_parameter_with_state"): _same,
    ("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("lightning.fabric.utilities.data", "AttributeDict"): dict,
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, complex, bytearray, slice, range)},
}


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
"""Classes that files name for the dtype of a tensor's memory; to ask the classes themselves is deprecated."""


class _Outliner(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module in ("torch", "torch.storage"):
            value = getattr(torch, name, None)
            if isinstance(value, (torch.dtype, torch.layout)):
                return value
            if name.endswith("Storage"):
                return _STORAGES.get(name, torch.uint8)
        return type(name, (Unknown,), {"name": f"{module}.{name}"})

    def persistent_load(self, identity: Any) -> _Storage:
        _, dtype, key, *_ = identity
        return _Storage(key=str(key), dtype=dtype)


def outline(file: IO[bytes]) -> Any:
    """The contents of a file with an `Outline` in place of each tensor, and `Unknown` objects.

    Raises:
        ValueError: If the file is none of `torch.save`'s present form, or is damaged.

    """
    try:
        with zipfile.ZipFile(file) as members:
            name = next(name for name in members.namelist() if name.endswith("data.pkl"))
            with members.open(name) as content:
                return _Outliner(content).load()
    except Exception as error:  # whatever a damaged pickle does
        raise ValueError(f"it cannot be read: {type(error).__name__}: {error}") from error

"""Tensors inside of objects that are no plain data, in a file of which shapes alone were read."""

import io
import pickle
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_shard._compat.dcp import is_fake
from lightning_shard.checkpoint.plain import put_back, split_plain


def with_values(value: Any, real: Callable[[Tensor], Tensor]) -> Any:
    """A nested value of a trusted file, whose objects have their tensors' values.

    Args:
        value: Nested dicts, lists and tuples with objects of whatever classes in them.
        real: Gives a tensor of the file with its values.

    """
    plain, apart = split_plain(value)
    return put_back(plain, {path: _copy(each, real) for path, each in apart.items()})


def _copy(value: Any, real: Callable[[Tensor], Tensor]) -> Any:
    class Pickler(pickle.Pickler):
        def reducer_override(self, each: Any) -> Any:
            if not is_fake(each):
                return NotImplemented
            return real(each).__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return pickle.loads(buffer.getvalue())

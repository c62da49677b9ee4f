"""A batch into microbatches by rows, and the microbatches' outputs into what the whole batch would have given.

Rows are the first dimension of tensors and numpy arrays. What has no rows (None, strings, numbers, 0-dim tensors,
objects of other kinds) reaches every microbatch as it is. A list with one item a row is split too.
"""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, NoReturn, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_shard.pipeline.containers import arrays, is_array, like_list, open_container, refuse_without_rows


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A part of a batch."""

    batch: Any
    """Containers of the same types as the batch's; tensors are views of the batch's."""

    rows: int
    """How many of the batch's rows are in it."""


def count_rows(batch: Any) -> int:
    """The size of dimension 0 that all tensors of a batch have in common.

    Args:
        batch: Any batch.

    Raises:
        MisconfigurationException: If two differ, there is none, or it is 0; with the paths in the batch.

    """
    found = list(arrays(batch, "batch"))
    if not found:
        raise MisconfigurationException(
            f"The batch, a {type(batch).__name__}, holds no tensor with rows, so it cannot be split into microbatches."
            " Let the DataLoader's collate_fn return tensors whose first dimension is the batch."
        )
    (path, first), *others = found
    rows = len(first)
    for other, array in others:
        if len(array) != rows:
            raise MisconfigurationException(
                f"A batch is split into microbatches along dimension 0, but {path} has {_rows(rows)} and {other} has"
                f" {_rows(len(array))}. What is the same for every row, give as a 0-dim tensor or a number, or keep"
                " it as a buffer of the module; all other tensors need one row for each of the batch's."
            )
    if rows == 0:
        raise MisconfigurationException(
            f"{path} has 0 rows, so there is nothing to split into microbatches. Leave empty batches out in the"
            " DataLoader (its sampler or collate_fn)."
        )
    return rows


def split_batch(batch: Any, microbatches: int) -> list[Microbatch]:
    """Split a batch into microbatches of equal size, or sizes that differ by 1, the larger first.

    Lists with an item per row (ids, file names) are split too, as are tuples of strings, which the default
    ``collate_fn`` makes of them; a list that holds tensors with rows, such as ``[x, y]``, is a container.

    Args:
        batch: Tensors, numpy arrays and containers of them, however nested.
        microbatches: How many are wanted, 1 or more.

    Returns:
        As many microbatches, or one for each row if there are fewer rows.

    Raises:
        MisconfigurationException: If the batch cannot be split.

    """
    assert microbatches >= 1, microbatches
    rows = count_rows(batch)
    size, larger = divmod(rows, min(microbatches, rows))
    sizes = [size + (i < larger) for i in range(min(microbatches, rows))]
    ends = itertools.accumulate(sizes)
    return [
        Microbatch(batch=_cut(batch, end - size, end, rows), rows=size) for size, end in zip(sizes, ends, strict=True)
    ]


def signature(value: Any) -> Hashable:
    """What a trace of the step depends on: structure, shapes and dtypes, but no values.

    Args:
        value: A batch, or anything in one.

    Returns:
        Equal for two values of the same types, keys, lengths, shapes and dtypes. None differs from a tensor; of a list
        of strings only the length counts.

    """
    if isinstance(value, Tensor | np.ndarray):
        return type(value), tuple(value.shape), str(value.dtype)
    kind = cast(Hashable, type(value))  # classes are hashable, but mypy does not see it
    container = open_container(value)
    if container is None:
        return kind
    return kind, tuple((accessor, signature(item)) for accessor, item in container.items)


def join_outputs(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    """Join what a step returned for each microbatch into what it would have returned for the batch.

    Tensors with a row for each of the microbatch's, and lists with an item for each, are concatenated. Numbers and
    0-dim tensors become their mean weighted by rows, which is the batch's where they are means over rows. What is
    equal in all, stays. Containers are joined part by part and keep their types.

    Args:
        outputs: One per microbatch, in order.
        rows: Rows of each microbatch.

    Raises:
        MisconfigurationException: If the outputs have no common form; with the path in the output.

    """
    assert len(outputs) == len(rows) > 0, (len(outputs), len(rows))
    return outputs[0] if len(outputs) == 1 else _join(outputs, rows, "output")


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


# --- split -----------------------------------------------------------------------------------------------------------


def _cut(value: Any, start: int, end: int, rows: int) -> Any:
    if is_array(value):
        return value[start:end]
    if isinstance(value, list) and len(value) == rows and not any(True for _ in arrays(value, "")):
        return like_list(value, value[start:end])
    if _is_row_of_strings(value, rows):
        return value[start:end]
    if (container := open_container(value)) is None:
        return value
    return container.rebuild([_cut(item, start, end, rows) for _, item in container.items])


def _is_row_of_strings(value: Any, rows: int) -> bool:
    return type(value) is tuple and len(value) == rows and all(isinstance(item, str | bytes) for item in value)


# --- join ------------------------------------------------------------------------------------------------------------


def _join(values: Sequence[Any], rows: Sequence[int], path: str) -> Any:
    for value in values:
        refuse_without_rows(value, path)
    first = values[0]
    if all(is_array(value) for value in values):
        return _join_arrays(values, rows, path)
    if all(_is_scalar(value) for value in values):
        return _mean(values, rows)
    different = next((value for value in values if type(value) is not type(first)), first)
    if different is not first:
        _refuse(path, f"is a {_kind(first)} for one and a {_kind(different)} for another")
    if _are_rows(values, rows, path):
        joined = list(itertools.chain.from_iterable(values))
        return like_list(first, joined) if isinstance(first, list) else tuple(joined)
    opened = [container for value in values if (container := open_container(value)) is not None]
    if not opened:
        return first if _all_equal(values) else _refuse(path, "is an object that differs between them")
    parts = [[accessor for accessor, _ in container.items] for container in opened]
    other = next((names for names in parts if names != parts[0]), None)
    if other is not None:
        _refuse(path, f"has the parts {', '.join(parts[0])} for one and {', '.join(other)} for another")
    groups = zip(*(container.items for container in opened), strict=True)
    return opened[0].rebuild([_join([item for _, item in group], rows, path + group[0][0]) for group in groups])


def _join_arrays(values: Sequence[Any], rows: Sequence[int], path: str) -> Any:
    if any(len(value) != count for value, count in zip(values, rows, strict=True)):
        if _all_equal(values):
            return values[0]
        value, count = next((v, n) for v, n in zip(values, rows, strict=True) if len(v) != n)
        _refuse(path, f"differs between them and has {_rows(len(value))} for a microbatch of {_rows(count)}")
    if (other := next((value for value in values if value.shape[1:] != values[0].shape[1:]), None)) is not None:
        shapes = f"{tuple(values[0].shape)} and {tuple(other.shape)}"
        _refuse(path, f"has the shapes {shapes}, which differ beyond the rows; pad them to one size in the step")
    if all(isinstance(value, Tensor) for value in values):
        return torch.cat(list(values))
    return np.concatenate(values)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, Tensor | np.ndarray) and value.ndim == 0)


def _mean(values: Sequence[Any], rows: Sequence[int]) -> Any:
    tensors = isinstance(values[0], Tensor)
    differentiable = tensors and values[0].is_floating_point()
    if not differentiable and _all_equal(values):
        return values[0]  # a count or a flag, also as its own type
    total = sum(rows)
    if not tensors:
        return sum(value * count for value, count in zip(values, rows, strict=True)) / total
    dtype = values[0].dtype if differentiable else torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)  # sums of half precision would lose what the mean must keep
    return (sum(value.to(wide) * count for value, count in zip(values, rows, strict=True)) / total).to(dtype)


def _are_rows(values: Sequence[Any], rows: Sequence[int], path: str) -> bool:
    """Whether each value is a list with an item per row; a list of tensors that have the rows themselves is none."""
    if all(_is_row_of_strings(value, count) for value, count in zip(values, rows, strict=True)):
        return True
    if not all(isinstance(value, list) and len(value) == n for value, n in zip(values, rows, strict=True)):
        return False
    sizes = [(len(array), n) for value, n in zip(values, rows, strict=True) for _, array in arrays(value, path)]
    if not sizes or any(size != n for size, n in sizes):
        return True
    # With one row each, one dict of one-row tensors is a row's, and one bare tensor is the output itself.
    return max(rows) == 1 and not any(is_array(value[0]) for value in values)


def _all_equal(values: Sequence[Any]) -> bool:
    return all(_equal(values[0], value) for value in values[1:])


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    try:
        return bool(one == other)
    except Exception:  # an object that cannot tell is not known to be equal
        return False


def _kind(value: Any) -> str:
    return f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _refuse(path: str, reason: str) -> NoReturn:
    raise MisconfigurationException(
        f"The outputs of the microbatches cannot be joined: {path} {reason}. Return tensors with one row for each of"
        " the batch's, lists with one item for each, or values that are the same for every microbatch."
    )

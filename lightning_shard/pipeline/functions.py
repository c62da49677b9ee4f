"""Which calls of torch functions count as operations of a step: the same in its trace and in its replay."""

from typing import Any

from lightning_shard.units.watch import DESCRIPTIONS, VALUES_OF

METRIC = "a metric"
"""What takes values as an operation does, but is none: torchmetrics."""

READING = frozenset(
    "item tolist numpy __array__ __bool__ __int__ __float__ __index__ __format__ __contains__ is_nonzero equal"
    " allclose".split()
) | {METRIC}
"""Names of operations that need the values of tensors and give something that is no tensor."""


def operation_name(func: Any) -> str | None:
    """The name of an operation, or ``None`` for what only describes a tensor.

    Args:
        func: What ``__torch_function__`` got; for an attribute its descriptor's method.

    """
    if getattr(func, "namespace", "") == "prim":  # questions that modes ask of fake tensors
        return None
    name = str(getattr(func, "__name__", ""))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = str(getattr(func.__self__, "__name__", ""))
        counts = attribute == "data" or (name == "__get__" and attribute in VALUES_OF)
        return f"{name}.{attribute}" if counts else None
    return None if name in DESCRIPTIONS and name != "grad" else name

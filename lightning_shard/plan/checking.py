"""Refusals of numbers that make no sense."""

import math
from typing import Any


def whole_number(name: str, value: Any, *, least: int = 1, most: float = math.inf) -> int:
    """A whole number within bounds.

    Raises:
        ValueError: If it is not one; with the name, the number and the bound.

    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be a whole number.")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}.")
    if value > most:
        raise ValueError(f"{name}={value} must be at most {most:,.0f}.")
    return value


def parameter_count(name: str, value: Any, *, least: int = 1, most: float = 1e16) -> int:
    """A number of parameters: whole, though it may be written as ``7e9``.

    Raises:
        ValueError: If it is not one; with the name, the number and the bound.

    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a number of parameters, like 7e9.")
    if value != int(value):
        raise ValueError(f"{name}={value!r} must be a whole number of parameters.")
    if not least <= value <= most:
        raise ValueError(f"{name}={value:g} must be at least {least} and at most {most:g}.")
    return int(value)

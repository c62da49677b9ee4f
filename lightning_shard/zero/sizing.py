"""Bucket sizes that fit the model.

The engine's own defaults (buckets of 5e8 elements, every parameter below 1e5 elements kept whole) are made for models
of billions of parameters; on smaller ones the buckets outweigh the model and most parameters stay unpartitioned.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

_SMALLEST_USEFUL_BUCKET = 500_000
_LARGEST_BUCKET = 200_000_000
_LARGEST_PREFETCH = 50_000_000
_LARGEST_PERSISTENT = 100_000
_ENGINE_DISTANCE = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The engine's size knobs, all in elements."""

    bucket: int
    """Gradients reduced, and parameters gathered, at once: a sixteenth of the model, so that the bucket stays small
    beside a rank's share of the gradients, but large enough to use the link (5e5, or the whole model if it is smaller)
    and at most 2e8. Even, as the engine asks."""

    prefetch: int
    """Parameters that stage 3 gathers ahead of their use: a tenth of the model, at most 5e7."""

    persistence: int
    """Stage 3 keeps parameters up to this size whole on every rank, since gathering them costs more than holding them:
    a thousandth of the model, at most 1e5."""

    all_live: int
    """A count that no model reaches within one step, so that nothing is released between forward and backward; for
    models that it suits, the engine's own default."""


def sizes_for(elements: int) -> Sizes:
    """Sizes for a model of ``elements`` parameters.

    Args:
        elements: Ψ, the number of parameter elements of the model, tied ones counted once.

    """
    bucket = min(max(elements // 16, _SMALLEST_USEFUL_BUCKET), max(elements, 2), _LARGEST_BUCKET)
    return Sizes(
        bucket=bucket + bucket % 2,
        prefetch=min(elements // 10, _LARGEST_PREFETCH),
        persistence=min(elements // 1000, _LARGEST_PERSISTENT),
        all_live=max(100 * elements, _ENGINE_DISTANCE),
    )


def count_elements(parameters: Iterable[nn.Parameter]) -> int:
    """Ψ of ``parameters``: whole elements, also of parameters that stage 3 has partitioned already."""
    unique = {id(parameter): parameter for parameter in parameters}
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in unique.values())

"""Repeated blocks: a model of many equal blocks is simulated with few of them, and the rest is added up.

Between two blocks, memory grows or shrinks by the same amount at each of them, so what is held at a moment inside a
block is a linear function of the block's number and of the number of blocks. The largest of such values lies at the
first or the last blocks. Two short models give the slopes, for every moment by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import lightning.pytorch as pl
from torch import nn

from lightning_shard.plan.ledger import Moments
from lightning_shard.plan.results import Memory

SHORT = (4, 5)
"""Blocks of the two short models: the two first and the two last blocks, which differ from those between (the next
one's gather, the last one's head), must all be there."""


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Equal blocks, one after the other."""

    container: str
    """Name of the list that holds them and nothing else."""

    names: tuple[str, ...]
    """Their names, in order."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.names)


def find_repeats(module: nn.Module) -> Repeats | None:
    """The longest list of equal blocks, if it is long enough to gain from it: same class, and parameters alike."""
    best: Repeats | None = None
    for name, each in module.named_modules():
        if not isinstance(each, nn.ModuleList | nn.Sequential) or len(each) <= SHORT[-1] + 1:
            continue
        if len({_outline(child) for child in each}) > 1 or not any(True for _ in each.parameters()):
            continue
        if best is None or len(each) > best.count:
            names = tuple(f"{name}.{key}" if name else key for key, _ in each.named_children())
            best = Repeats(container=name, names=names)
    return best


def _outline(module: nn.Module) -> tuple[object, ...]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return (type(module), *((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors))


def shorten(clone: "pl.LightningModule", repeats: Repeats, blocks: int) -> None:
    """Leave only the first blocks of a copy."""
    container = clone.get_submodule(repeats.container)
    assert isinstance(container, nn.ModuleList | nn.Sequential)
    del container[blocks:]


def extend(few: Mapping[str, Moments], more: Mapping[str, Moments], blocks: int) -> dict[str, Moments]:
    """The moments of a model with ``blocks`` blocks, from those of two short ones; without the blocks in the middle.

    A segment makes the same changes in both, so each of its moments is followed by itself; where their number grows
    with the blocks (gradients that are freed, an optimizer's loop), only its peak is.

    Args:
        few: Of the shorter one, with ``SHORT[0]`` blocks.
        more: Of the longer one, with ``SHORT[1]`` blocks.
        blocks: How many blocks there are.

    Raises:
        ValueError: If the two have different segments: their steps do not only differ by a block.

    """
    aligned = {_from_ends(segment, SHORT[0]): moments for segment, moments in few.items()}
    longer = {_from_ends(segment, SHORT[1]): moments for segment, moments in more.items()}
    extra = {segment for segment in longer if segment not in aligned}
    if set(aligned) - set(longer) or any(not segment.endswith("between") for segment in extra):
        raise ValueError(
            f"the step of a model with {SHORT[1]} blocks is not that of one with {SHORT[0]} and a block more"
        )
    steps = blocks - SHORT[0]
    return {segment: _extended(moments, longer[segment], steps) for segment, moments in aligned.items()}


def _extended(few: Moments, more: Moments, steps: int) -> Moments:
    if len(few) != len(more):
        few, more = [max(few, key=sum)], [max(more, key=sum)]
    return [
        tuple(one + (other - one) * steps for one, other in zip(first, second, strict=True))
        for first, second in zip(few, more, strict=True)
    ]


def line(few: Memory, more: Memory, steps: int) -> Memory:
    """What lies on the line through two sizes, so many steps beyond the first."""
    values = {each.name: (getattr(few, each.name), getattr(more, each.name)) for each in fields(Memory)}
    return Memory(**{name: one + (other - one) * steps for name, (one, other) in values.items()})


def _from_ends(segment: str, blocks: int) -> str:
    """The segment's name with its block counted from the nearer end."""
    kind, _, number = segment.partition(" ")
    if not number:
        return segment
    index = int(number)
    if index < 2:
        return segment
    return f"{kind} last-{blocks - 1 - index}" if index >= blocks - 2 else f"{kind} between"

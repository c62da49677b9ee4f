"""What a step logs, microbatch by microbatch, as if it had logged once for the whole batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_shard._compat.recording import unwatched
from lightning_shard.pipeline.absent import AbsentTensor


@dataclass(frozen=True, kw_only=True)
class MetricValue:
    """A metric that was logged itself."""

    name: str
    """Its name in the LightningModule."""

    batch_value: Any
    """What it gave for the batch, if it was called."""


@dataclass(kw_only=True)
class Entry:
    """One ``self.log`` call of a step, for all microbatches."""

    name: str
    """The logged name."""

    kwargs: dict[str, Any]
    """Its further arguments."""

    values: dict[int, Any] = field(default_factory=dict)
    """By microbatch what was logged."""

    sizes: dict[int, int] = field(default_factory=dict)
    """By microbatch the ``batch_size`` that was given with it, if one was."""


class LogRecorder:
    """Records ``self.log`` while a stage replays a step.

    Args:
        module: The LightningModule.

    """

    def __init__(self, module: "pl.LightningModule") -> None:
        self._module = module
        self._log: Callable[..., None] = module.log
        self._entries: list[Entry] = []
        self._microbatch = 0
        self._place = 0
        self._names = {id(each): name for name, each in module.named_modules() if isinstance(each, Metric)}
        self.muted = False
        self._constant: dict[str, bool] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record instead of logging, for one batch."""
        self._entries = []
        shadowed = vars(self._module).get("log")
        vars(self._module)["log"] = self._record
        try:
            yield
        finally:
            if shadowed is None:
                del vars(self._module)["log"]
            else:
                vars(self._module)["log"] = shadowed

    def begin(self, microbatch: int) -> None:
        """The calls that follow are those of a microbatch."""
        self._microbatch = microbatch
        self._place = 0

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self.muted:
            return
        if args:
            names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        place = self._place
        self._place += 1
        if place == len(self._entries):
            self._entries.append(Entry(name=name, kwargs=kwargs))
        entry = self._entries[place]
        size = kwargs.get("batch_size")
        if size is not None:
            entry.sizes[self._microbatch] = int(size)
        if entry.name != name:
            raise RuntimeError(
                f"The step logged {entry.name!r} for one microbatch and {name!r} for another at the same place. Log the"
                " same names in the same order for every microbatch."
            )
        if isinstance(value, Metric):
            value = MetricValue(name=self._names[id(value)], batch_value=getattr(value, "_forward_cache", None))
        elif isinstance(value, Tensor):
            with unwatched():
                value = value.detach()
        known = entry.values.get(self._microbatch)
        if known is None or not isinstance(value, AbsentTensor):
            entry.values[self._microbatch] = value

    def merged(self, weights: Sequence[float], rows: Sequence[int]) -> list[tuple[str, Any, dict[str, Any]]]:
        """Name, value for the whole batch and arguments of every call; a value of another stage is left absent."""
        merged = []
        for entry in self._entries:
            kwargs = entry.kwargs
            if entry.sizes and entry.sizes.keys() == entry.values.keys():
                kwargs = {**kwargs, "batch_size": self._whole_size(entry, rows)}
            merged.append((entry.name, _merge(entry, weights), kwargs))
        return merged

    def _whole_size(self, entry: Entry, rows: Sequence[int]) -> int:
        """The ``batch_size`` of the batch: a sum of rows, or a number that is the same for every microbatch."""
        sizes = [entry.sizes[number] for number in sorted(entry.sizes)]
        own_rows = [rows[number] for number in sorted(entry.sizes)]
        if len(set(sizes)) > 1 or sizes != own_rows or set(own_rows) != {1}:
            # Rows of 1 each look like both; other batches have told.
            self._constant[entry.name] = len(set(sizes)) == 1 and sizes != own_rows
        return sizes[0] if self._constant.get(entry.name, False) else sum(sizes)

    def log(self, entries: Sequence[tuple[str, Any, dict[str, Any]]], rows: int) -> None:
        """Log merged entries once, for a batch of ``rows`` rows."""
        modules = dict(self._module.named_modules())
        for name, value, kwargs in entries:
            if isinstance(value, MetricValue):
                metric: Any = modules[value.name]
                metric._forward_cache = value.batch_value
                value = metric
            self._log(name, value, **{"batch_size": rows, **kwargs})


def _merge(entry: Entry, weights: Sequence[float]) -> Any:
    values = [entry.values[number] for number in sorted(entry.values)]
    sizes = set(entry.sizes.values())
    given = entry.sizes.keys() == entry.values.keys() and len(sizes) > 1 and min(sizes) >= 0
    shares = [float(entry.sizes[number]) if given else weights[number] for number in sorted(entry.values)]
    if any(isinstance(value, AbsentTensor) for value in values):
        return next(value for value in values if isinstance(value, AbsentTensor))
    if isinstance(values[-1], MetricValue):
        caches = [value.batch_value for value in values]
        return MetricValue(name=values[-1].name, batch_value=_mean(caches, shares, entry.kwargs.get("reduce_fx")))
    return _mean(values, shares, entry.kwargs.get("reduce_fx"))


def _mean(values: Sequence[Any], shares: Sequence[float], reduce_fx: Any) -> Any:
    """The value for the whole batch: the mean weighted as the loss is, or what the call asks for."""
    if any(value is None for value in values):
        return None
    if isinstance(values[0], dict):
        return {key: _mean([value[key] for value in values], shares, reduce_fx) for key in values[0]}
    numbers = torch.stack([torch.as_tensor(value).detach().to(torch.float64) for value in values])
    dtype = values[0].dtype if isinstance(values[0], Tensor) else torch.get_default_dtype()
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    match name:
        case "sum":
            result = numbers.sum(0)
        case "max" | "amax":
            result = numbers.amax(0)
        case "min" | "amin":
            result = numbers.amin(0)
        case _:
            weight = torch.tensor(list(shares), dtype=torch.float64, device=numbers.device)
            weight = weight / weight.sum()
            result = (numbers * weight.view(-1, *[1] * (numbers.dim() - 1))).sum(0)
    return result.to(dtype)


def fetch_elsewhere(
    on_last: list[tuple[str, Any, dict[str, Any]]],
    here: list[tuple[str, Any, dict[str, Any]]],
    missing: Sequence[int],
    group: "dist.ProcessGroup | None",
    device: torch.device,
) -> list[tuple[str, Any, dict[str, Any]]]:
    """Fill in the values that the last stage has not, from the stages that do. Collective in a pipeline.

    Args:
        on_last: The entries of the last stage.
        here: This rank's own, a prefix of them.
        missing: Places of the entries whose value the last stage has not.
        group: The pipeline's ranks.
        device: Of messages.

    """
    if not missing:
        return on_last
    message = torch.zeros(2, len(missing), dtype=torch.float64, device=device)
    for column, place in enumerate(missing):
        value = here[place][1] if place < len(here) else None
        if value is not None and not isinstance(value, AbsentTensor | MetricValue | dict):
            message[0, column] = torch.as_tensor(value).to(torch.float64)
            message[1, column] = 1
    dist.all_reduce(message, group=group)
    filled = list(on_last)
    for column, place in enumerate(missing):
        name, _, kwargs = on_last[place]
        if not message[1, column]:
            raise RuntimeError(f"The step logs {name!r}, whose value no stage of the pipeline has.")
        filled[place] = (name, (message[0, column] / message[1, column]).to(torch.get_default_dtype()), kwargs)
    return filled

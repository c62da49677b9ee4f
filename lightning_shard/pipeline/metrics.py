"""torchmetrics in a pipeline: the last stage counts, and before a value is computed the other ranks take its counts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torchmetrics import Metric

from lightning_shard._compat.recording import unwatched
from lightning_shard.pipeline.exchange import Exchange


class MetricSync:
    """Lets every rank of a pipeline compute a metric from the states of the last stage.

    Args:
        module: The LightningModule that holds the metrics.
        exchange: Broadcasts from the last stage.
        replicas: The ranks that run the same stages on other rows, over which states are reduced; ``None`` for none.

    """

    def __init__(self, module: "pl.LightningModule", exchange: Exchange, replicas: Any) -> None:
        self._exchange = exchange
        self._undo: list[Callable[[], None]] = []
        self._in_step = False
        for name, metric in module.named_modules():
            if isinstance(metric, Metric):
                self._watch(name, metric, replicas)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Inside a step a metric is computed from what this rank has."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def _watch(self, name: str, metric: Metric, replicas: Any) -> None:
        compute = metric.compute
        group, available = metric.process_group, metric.distributed_available_fn

        update = metric.update

        def from_last_stage() -> Any:
            if not self._in_step and not metric._is_synced:
                self._take(name, metric)
            with unwatched():
                return compute()

        def unwatched_update(*args: Any, **kwargs: Any) -> None:
            with unwatched():
                update(*args, **kwargs)

        vars(metric).update(compute=from_last_stage, update=unwatched_update)
        if group is None:
            metric.process_group = replicas
            if replicas is None:
                metric.distributed_available_fn = _never

        def undo() -> None:
            vars(metric).update(compute=compute, update=update)
            metric.process_group = group
            metric.distributed_available_fn = available

        self._undo.append(undo)

    def _take(self, name: str, metric: Metric) -> None:
        states = {key: getattr(metric, key) for key in metric._defaults}
        count, states = self._exchange.broadcast(f"metric {name}", (metric._update_count, states))
        metric._update_count = count
        metric._computed = None
        for key, value in states.items():
            own = getattr(metric, key)
            device = metric.device
            value = [item.to(device) for item in value] if isinstance(value, list) else value.to(device)
            if isinstance(own, list):
                own[:] = value
            else:
                setattr(metric, key, value)

    def stop(self) -> None:
        """Let the metrics be as they were."""
        for undo in self._undo:
            undo()
        self._undo.clear()


def _never() -> bool:
    return False


def replica_group(group: "dist.ProcessGroup | None") -> Any:
    """The group for `MetricSync`, ``None`` if it is one rank."""
    return group if group is not None and dist.get_world_size(group) > 1 else None

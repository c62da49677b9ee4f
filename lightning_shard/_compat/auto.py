"""Private API behind a strategy that becomes another one while the Trainer starts.

The Trainer's strategy has no public setter. It, its precision plugin, and how both are picked and equipped, are the
business of the Trainer's accelerator connector; everything else asks the connector each time.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy

AFTER_SETUP = "post_setup"
"""The name of the barrier that the Trainer waits at when `setup` of datamodule, callbacks and module is done, right
before `configure_model`. Of a strategy's hooks it is the only one that is called there in every run."""


def sync_batchnorm(trainer: "pl.Trainer") -> bool:
    """Whether the Trainer was told to synchronise batch normalisation."""
    return trainer._accelerator_connector._layer_sync is not None


def train_loader(trainer: "pl.Trainer") -> Any | None:
    """What the user gives as train loader, asked for once more and untouched; ``None`` if nothing is given.

    `fit_loop.setup_data` would put in samplers for the number of replicas of a strategy that is not chosen yet, and
    start iterators.
    """
    source = trainer.fit_loop._data_source
    return source.dataloader() if source.is_defined() else None


def precision_for(trainer: "pl.Trainer", strategy: Strategy) -> Precision:
    """The precision plugin that the Trainer would have made if it had been given ``strategy``.

    Raises:
        Exception: The Trainer's own, if the two do not go together.

    """
    connector = trainer._accelerator_connector
    before = connector.strategy, connector._strategy_flag, connector._precision_flag
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # what it says of the precision is said when the strategy is chosen
    try:
        connector.strategy, connector._strategy_flag = strategy, strategy
        return connector._check_and_init_precision()
    finally:
        connector.strategy, connector._strategy_flag, connector._precision_flag = before
        logging.disable(level)


def is_compiled(module: "pl.LightningModule") -> bool:
    """Whether the module as a whole comes from ``torch.compile``, of which the Trainer keeps a private note."""
    return module._compiler_ctx is not None


def replace_strategy(trainer: "pl.Trainer", strategy: Strategy) -> None:
    """Give the Trainer another strategy, as if it had been constructed with it.

    The launcher stays: it holds the processes that it started, to end them on an interrupt.
    """
    connector = trainer._accelerator_connector
    launcher = connector.strategy.launcher
    connector.strategy, connector._strategy_flag = strategy, strategy
    connector.precision_plugin = connector._check_and_init_precision()
    connector._lazy_init_strategy()
    strategy._launcher = launcher
    # A loader that a `setup` hook has asked the Trainer for has samplers for every rank; a pipeline's ranks share one.
    trainer.fit_loop._combined_loader = None


@contextmanager
def loaders_left_alone(trainer: "pl.Trainer") -> Iterator[None]:
    """Inside, `trainer.estimated_stepping_batches` makes no loader: it would begin to draw from it, on one rank only.

    Schedulers ask for it in `configure_optimizers`, where only their states' sizes matter for a plan: any number does.
    """
    loop = trainer.fit_loop
    before = loop.max_batches
    vars(loop)["setup_data"] = lambda: setattr(loop, "max_batches", 1000)
    try:
        yield
    finally:
        del vars(loop)["setup_data"]
        loop.max_batches = before

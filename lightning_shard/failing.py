"""A rank that fails must not meet the others in a collective that they are not in."""

import sys

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_shard._compat.lightning import attached_trainer


def fails_alone(module: "pl.LightningModule | None") -> bool:
    """Whether this rank is on its way out with an error, so that the others will not meet it in a collective."""
    trainer = attached_trainer(module)
    return trainer is not None and trainer.interrupted and not isinstance(sys.exc_info()[1], SIGTERMException)

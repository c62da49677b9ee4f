"""Private attributes of Lightning's averaging callback."""

from lightning.pytorch.callbacks import WeightAveraging
from torch import nn


def averaged_module(callback: WeightAveraging) -> nn.Module | None:
    """The copy of the LightningModule that holds the averages; made in the callback's ``setup``, before sharding."""
    average = callback._average_model
    return None if average is None else average.module

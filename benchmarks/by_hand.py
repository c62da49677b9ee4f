"""A pipeline as one writes it without a Trainer, on torch.distributed.pipelining alone."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from lightning_shard.pipeline.schedule import SCHEDULES, ScheduleName


def hand_written(
    schedule: ScheduleName,
    mine: Mapping[int, nn.Module],
    stages: int,
    microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor], None]:
    """A forward and backward of all microbatches, as a function of a batch.

    Args:
        schedule: The order of forwards and backwards.
        mine: This rank's stages by number.
        stages: Stages of the pipeline.
        microbatches: Into how many a batch is split.
        loss: Makes a microbatch's loss of the last stage's output and its part of the batch.

    """
    made = [PipelineStage(module, number, stages, torch.device("cpu")) for number, module in sorted(mine.items())]
    kind = getattr(pipelining, f"Schedule{SCHEDULES[schedule].torch_name}")
    single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    driver = kind(made[0] if single else made, microbatches, loss_fn=loss)

    def step(batch: Tensor) -> None:
        inputs = [batch] if 0 in mine else []
        if stages - 1 in mine:
            driver.step(*inputs, target=batch, losses=[], return_outputs=False)
        else:
            driver.step(*inputs)

    return step

"""A number that tells whether ranks of a pipeline have the same batch."""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.pipeline.structure import tensors_in

_SAMPLES = 4096


def batch_digest(batch: object, device: torch.device) -> Tensor:
    """A 0-dim fp64 tensor that differs for batches that differ; of large tensors a part is looked at.

    Args:
        batch: Any batch.
        device: Where the number is wanted.

    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for place, tensor in enumerate(tensors_in(batch)):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)]
        if not sample.numel() or sample.dtype.is_complex:
            continue
        numbers = sample.to(torch.float64).nan_to_num(nan=-1.0, posinf=1e30, neginf=-1e30)
        weights = torch.arange(1, len(numbers) + 1, dtype=torch.float64, device=numbers.device) % 997 + place
        total = total + (numbers * weights).sum().to(device)
    return total


def check_same_batch(step: str, mine: Tensor, theirs: Tensor) -> None:
    """Compare this rank's digest with that of the last stage: the first see the inputs, the last one the targets.

    Raises:
        RuntimeError: If they differ.

    """
    if not torch.allclose(mine, theirs.to(mine), rtol=1e-9, atol=1e-9):
        raise RuntimeError(
            f"The ranks of a pipeline have different batches in {step}: digest {float(mine):.10g} on rank"
            f" {dist.get_rank()}, {float(theirs):.10g} on the last stage's. Every rank of a pipeline must read the same"
            " rows in the same order: seed shuffling and augmentation alike (`seed_everything(..., workers=True)`),"
            " leave `use_distributed_sampler=True`, and give iterable datasets the data-parallel rank and size"
            " (`trainer.distributed_sampler_kwargs`), not the global rank."
        )

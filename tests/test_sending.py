"""Messages of every dtype."""

import pytest
import torch

from lightning_shard.sending import sendable
from lightning_shard.testing import run_distributed

DTYPES = [
    value
    for name in ("bool", "int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "complex64", "float64")
    if (value := getattr(torch, name, None)) is not None
]


def sent() -> list[list[float]]:
    """Rank 0's values, as every rank has them in the end."""
    torch.distributed.init_process_group("gloo")
    found = []
    try:
        for dtype in DTYPES:
            for shape in ((3,), ()):
                value = 1 if torch.distributed.get_rank() == 0 else 0
                tensor = torch.full(shape, value, dtype=torch.float32).to(dtype)
                torch.distributed.broadcast(sendable(tensor), src=0)
                found.append(tensor.to(torch.complex128).real.reshape(-1).tolist())
    finally:
        torch.distributed.destroy_process_group()
    return found


@pytest.mark.ranks
def test_every_dtype_arrives() -> None:
    assert run_distributed(sent, 2) == [[[1.0] * 3, [1.0]] * len(DTYPES)] * 2


def test_common_dtypes_are_sent_as_they_are() -> None:
    tensor = torch.zeros(2)
    assert sendable(tensor) is tensor

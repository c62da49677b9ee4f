"""What the last stage knows reaches the other ranks as it is, in one message where nothing new is in it."""

from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.pipeline.effects import Effects
from lightning_shard.pipeline.exchange import Exchange
from lightning_shard.pipeline.seeds import run_seed
from lightning_shard.testing import run_distributed
from tests.pipeline.replaying import CPU, alone

Pair = namedtuple("Pair", ["x", "y"])


def structures() -> list[Any]:
    """Values as steps, logs and metrics give them, in the order in which they are sent."""
    return [
        None,
        1.25,
        {"loss": torch.tensor(0.5), "n": 3, "name": "a"},
        {"loss": torch.tensor(0.75), "n": 3, "name": "a"},
        {"loss": torch.tensor(0.75), "n": 4, "name": "a"},
        torch.tensor(7),
        torch.tensor(2**53 + 1),
        torch.tensor(True),
        torch.tensor([[True, False], [False, True]]),
        torch.arange(6).view(2, 3).T,
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.tensor(1e-3, dtype=torch.bfloat16),
        torch.tensor(float("nan")),
        torch.tensor(float("inf"), dtype=torch.float64),
        torch.empty(0, 3),
        torch.ones(0, dtype=torch.bool),
        [Pair(x=torch.ones(1), y=torch.tensor(2.0)), (torch.zeros(3, dtype=torch.uint8),)],
        torch.tensor(1 + 2j),
        torch.ones(2, dtype=torch.complex64),
        {"text": "ü" * 1000},
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(3, requires_grad=True) * 2,
        torch.tensor(0.1, dtype=torch.float64),
        [torch.tensor(float(number)) for number in range(50)],
    ]


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().to(torch.complex128 if value.is_complex() else value.dtype).reshape(-1).tolist(),
        )
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return (type(value).__name__, [plain(item) for item in value])
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_alone_a_value_is_handed_back() -> None:
    with alone():
        value = {"x": torch.ones(2)}
        assert Exchange(None, 0, CPU).broadcast("a", value) is value


@pytest.mark.ranks
def test_every_value_arrives_as_it_was_and_what_was_known_needs_one_message() -> None:
    def run() -> dict[str, Any]:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        messages = [0]
        broadcast = dist.broadcast

        def counted(*args: Any, **kwargs: Any) -> Any:
            messages[0] += 1
            return broadcast(*args, **kwargs)

        dist.broadcast = counted
        exchange = Exchange(dist.group.WORLD, 1, CPU)
        found: dict[str, Any] = {"values": [], "messages": []}
        for value in structures():
            before = messages[0]
            got = exchange.broadcast("values", value if rank == 1 else "ignored")
            found["values"].append(plain(got))
            found["messages"].append(messages[0] - before)
        found["gradient"] = exchange.broadcast("g", torch.ones(2, requires_grad=True) * 2).requires_grad
        before = messages[0]
        for number in range(3):
            exchange.broadcast(
                "logs", {"loss": torch.tensor(float(number)), "acc": torch.tensor(number, dtype=torch.int32)}
            )
            exchange.broadcast("user", [number])
        found["channels"] = messages[0] - before
        found["last"] = plain(
            exchange.broadcast("logs", {"loss": torch.tensor(9.0), "acc": torch.tensor(9, dtype=torch.int32)})
        )

        torch.manual_seed(rank)
        found["seed"] = run_seed(CPU)

        import lightning.pytorch as pl

        module = pl.LightningModule()
        module.outputs = [1]
        effects = Effects(module, CPU)
        effects.begin()
        if rank == 1:
            module.outputs.append({"loss": torch.tensor(2.0)})
            module.best = torch.ones(2)
        changes = exchange.broadcast("effects", effects.changed())
        if rank != 1:
            effects.apply(changes)
        found["effects"] = plain(module.outputs), plain(module.best)
        return found

    other, last = run_distributed(run, 2)
    expected = [plain(value) for value in structures()]
    for place, (found, value) in enumerate(zip(other["values"], expected, strict=True)):
        assert repr(found) == repr(value), place
    assert repr(last["values"]) == repr(expected)
    assert not other["gradient"]
    assert other["messages"] == last["messages"]
    assert other["messages"][3] == 1, "the same structure with other numbers"
    assert other["messages"][4] > 1, "another plain number is another structure"
    # A structure for the first time takes three messages; what holds other plain numbers is another one each time.
    assert other["channels"] == 3 + 1 + 1 + 3 * 3
    assert (
        other["last"] == last["last"] == plain({"loss": torch.tensor(9.0), "acc": torch.tensor(9, dtype=torch.int32)})
    )
    assert other["seed"] == last["seed"] == 0
    assert other["effects"] == last["effects"]

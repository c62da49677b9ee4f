"""Every collective, counted by what it moves; the expected numbers are written out by hand."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_shard.telemetry.traffic import Collective, Traffic, count_traffic
from lightning_shard.testing import run_distributed

Calls = dict[tuple[str, int, torch.dtype, int], int]


def calls_of(traffic: Traffic) -> Calls:
    return {(call.operation, call.elements, call.dtype, call.ranks): n for call, n in traffic.calls.items()}


def every_collective() -> Calls:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, part = torch.ones(12), torch.ones(12 // ranks)
    parts = [torch.empty(12 // ranks) for _ in range(ranks)]
    with count_traffic() as counter:
        dist.all_reduce(torch.ones(5))
        dist.all_reduce(torch.ones(5))
        dist.all_reduce(torch.ones(5, dtype=torch.bfloat16))
        dist.all_gather(parts, part)
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.broadcast(torch.ones(7), 0)
        dist.reduce(torch.ones(9), 1)
        dist.all_to_all_single(torch.empty(4 * ranks), torch.ones(4 * ranks))
        dist.gather(torch.ones(3), [torch.empty(3) for _ in range(ranks)] if rank == 0 else None)
        dist.scatter(torch.empty(2), [torch.ones(2) for _ in range(ranks)] if rank == 0 else None)
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(11), 1)
        elif rank == 1:
            dist.recv(torch.empty(11), 0)
    dist.all_reduce(torch.ones(100))  # the counter is not there any more
    return calls_of(counter.traffic)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective(ranks: int) -> None:
    fp32 = torch.float32
    expected: Calls = {
        ("all_reduce", 5, fp32, ranks): 2,
        ("all_reduce", 5, torch.bfloat16, ranks): 1,
        ("all_gather", 12, fp32, ranks): 2,
        ("reduce_scatter", 12, fp32, ranks): 1,
        ("broadcast", 7, fp32, ranks): 1,
        ("reduce", 9, fp32, ranks): 1,
        ("all_to_all", 4 * ranks, fp32, ranks): 1,
        ("gather", 3 * ranks, fp32, ranks): 1,
        ("scatter", 2 * ranks, fp32, ranks): 1,
    }
    first, *others = run_distributed(every_collective, ranks)
    assert first == {**expected, ("send", 11, fp32, ranks): 1}
    assert all(other == expected for other in others)


def functional_collectives() -> Calls:
    mesh = init_device_mesh("cpu", (2,))
    with count_traffic() as counter:
        distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)], src_data_rank=None).full_tensor()
        DTensor.from_local(torch.ones(10), mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        DTensor.from_local(torch.ones(14), mesh, [Partial()], run_check=False).redistribute(placements=[Shard(0)])
    return calls_of(counter.traffic)


@pytest.mark.ranks
def test_functional_collectives() -> None:
    """Those that tensors over a mesh use go through operators of their own, and are counted once."""
    for calls in run_distributed(functional_collectives, 2):
        assert calls == {
            ("all_gather", 24, torch.float32, 2): 1,
            ("all_reduce", 10, torch.float32, 2): 1,
            ("reduce_scatter", 14, torch.float32, 2): 1,
        }


def operators_that_communicate() -> tuple[float, Calls]:
    mesh = init_device_mesh("cpu", (2,))
    parts = [distribute_tensor(torch.full((6, 4), value), mesh, [Shard(0)], src_data_rank=None) for value in (1.0, 2.0)]
    with count_traffic() as counter:
        norm = torch.nn.utils.get_total_norm(parts)
    return norm.item(), calls_of(counter.traffic)


@pytest.mark.ranks
def test_what_an_operator_on_sharded_tensors_moves_inside() -> None:
    """The norms of the parts are summed where they are stacked: one number for each of the two tensors."""
    for norm, calls in run_distributed(operators_that_communicate, 2):
        assert norm == pytest.approx((24 * 1 + 24 * 4) ** 0.5)
        assert calls == {("all_reduce", 2, torch.float32, 2): 1}


def subgroups_and_snapshots() -> tuple[float, int, Calls, Calls]:
    dist.init_process_group("gloo")
    pair = dist.new_subgroups(2)[0]
    weight = torch.ones(6, requires_grad=True)
    weight.register_hook(lambda gradient: dist.all_reduce(gradient, group=pair))
    with count_traffic() as counter:
        dist.broadcast(torch.ones(8), 0)
        forward = counter.traffic
        (weight * 2).sum().backward()
        backward = counter.traffic - forward
    return counter.traffic.sent, counter.traffic.payload, calls_of(forward), calls_of(backward)


@pytest.mark.ranks
def test_subgroups_and_snapshots() -> None:
    for sent, payload, forward, backward in run_distributed(subgroups_and_snapshots, 4):
        assert forward == {("broadcast", 8, torch.float32, 4): 1}
        assert backward == {("all_reduce", 6, torch.float32, 2): 1}
        assert payload == 8 + 2 * 6
        assert sent == 8 * 3 / 4 + 12 * 1 / 2


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Step(pl.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        self.context = count_traffic()
        self.counter = self.context.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.context.__exit__(None, None, None)


def data_parallel_step() -> Calls:
    step = Step()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=3, callbacks=[step], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows = torch.utils.data.TensorDataset(torch.randn(8, 5))
    trainer.fit(Net(), torch.utils.data.DataLoader(rows, batch_size=2))
    gradients = step.counter.traffic.where(lambda call: call.elements > 1)
    assert gradients.payload == 2 * (5 * 7 + 7 + 7 * 3 + 3)  # the 2Ψ of plain data parallelism
    assert gradients.payload_bytes == 4 * gradients.payload
    return calls_of(step.counter.traffic)


@pytest.mark.ranks
def test_data_parallel_step_of_a_trainer() -> None:
    """Collectives that start in C++ (DDP's reducer) are seen too; the logged loss is known by its one element."""
    for calls in run_distributed(data_parallel_step, 2):
        sizes = {(operation, elements): n for (operation, elements, _, _), n in calls.items()}
        assert sizes[("all_reduce", 66)] == 1
        assert set(sizes) - {("all_reduce", 66)} <= {("all_reduce", 1)}
        assert sizes[("all_reduce", 1)] >= 1


def test_arithmetic_of_one_rank() -> None:
    call = Collective(operation="all_reduce", elements=10, dtype=torch.bfloat16, ranks=1)
    traffic = Traffic(calls={call: 3})
    assert (traffic.payload, traffic.payload_bytes, traffic.sent) == (60, 120, 0.0)
    assert traffic.by_operation == {"all_reduce": 60}


def test_a_new_kind_of_communication_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def job() -> str:
        from lightning_shard._compat import collectives

        dist.init_process_group("gloo")
        del collectives._COLLECTIVES["c10d::broadcast_"]
        with pytest.raises(NotImplementedError) as raised, count_traffic():
            dist.broadcast(torch.ones(3), 0)
        return str(raised.value)

    assert "c10d::broadcast_" in run_distributed(job, 1)[0]

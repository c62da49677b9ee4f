"""The harness itself: ranks report, fail, hang and die as promised, and a wrong training is caught."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_shard import ZeROStrategy, _parity
from lightning_shard.config import Offload
from lightning_shard.testing import (
    RankFailed,
    TrainingDiffers,
    assert_same_training,
    preload,
    run_distributed,
    split_rows,
)

pytestmark = pytest.mark.ranks


def me() -> int:
    return int(os.environ["RANK"])


# --- run_distributed: results ---------------------------------------------------------------------------------------


def whereabouts(add: int, *, times: int) -> tuple[int, int, int, int]:
    dist.init_process_group("gloo")
    total = torch.tensor(float(me() + add))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), int(total) * times


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_returns_its_result(world_size: int) -> None:
    total = sum(rank + 10 for rank in range(world_size)) * 3
    results = run_distributed(whereabouts, world_size, 10, times=3)
    assert results == [(rank, world_size, 1, total) for rank in range(world_size)]


def test_what_a_test_defines_inside_itself_travels() -> None:
    offset = torch.tensor([5.0], requires_grad=True)

    def factorial(n: int) -> int:
        return n * factorial(n - 1) if n else 1

    class Base:
        def __init__(self, number: int) -> None:
            self.number = number

    class Derived(Base):
        def __init__(self) -> None:
            super().__init__(7)

        @property
        def doubled(self) -> int:
            return 2 * self.number

        @staticmethod
        def static() -> int:
            return factorial(3)

    results = run_distributed(lambda: (factorial(4), Derived().doubled, Derived.static(), offset + me()), 2)
    assert [result[:3] for result in results] == [(24, 14, 6)] * 2
    assert [result[3].item() for result in results] == [5.0, 6.0]
    assert not results[0][3].requires_grad


def test_closures_share_their_variables() -> None:
    count = 0

    def increase() -> None:
        nonlocal count
        count += 1

    def job() -> int:
        increase()
        increase()
        return count

    assert run_distributed(job, 1) == [2]
    assert count == 0


def test_a_function_of_a_file_that_no_import_path_reaches(tmp_path: Path) -> None:
    folder = tmp_path / "with spaces"
    folder.mkdir()
    source = "LIMIT = 3\ndef above(values):\n    return [v for v in values if v > LIMIT]\n"
    (folder / "unreachable_helper.py").write_text(source)
    sys.path.insert(0, str(folder))
    try:
        import unreachable_helper  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(folder))
    assert run_distributed(unreachable_helper.above, 1, [2, 3, 4, 5]) == [[4, 5]]


def test_caller_environment_and_folder_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_TEST", "seen")
    monkeypatch.chdir(tmp_path)
    assert run_distributed(lambda: (os.environ["HARNESS_TEST"], os.getcwd()), 1) == [
        ("seen", os.path.realpath(tmp_path))
    ]


def test_no_state_reaches_the_next_job() -> None:
    def snapshot() -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "folder": os.getcwd(),
            "environment": {k: v for k, v in os.environ.items() if k != "MASTER_PORT"},
            "dtype": torch.get_default_dtype(),
            "grad": torch.is_grad_enabled(),
            "threads": torch.get_num_threads(),
            "filters": len(warnings.filters),
            "group": dist.is_initialized(),
        }

    def disturb() -> int:
        dist.init_process_group("gloo")
        os.chdir("/")
        os.environ["LEFT_BEHIND"] = "1"
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(2)
        warnings.simplefilter("error")
        return os.getpid()

    before = run_distributed(snapshot, 2)
    disturbed = run_distributed(disturb, 2)
    after = run_distributed(snapshot, 2)
    pids = [rank.pop("pid") for rank in [*before, *after]] + disturbed
    assert len(set(pids)) == 6
    assert before == after


# --- run_distributed: failures --------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def hang_in_collective(folder: Path) -> None:
    (folder / str(me())).write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    if me() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(600)


def fail_beside_a_hung_peer(folder: Path) -> None:
    (folder / str(me())).write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    if me() == 1:
        print("what rank 1 printed")
        raise KeyError("the culprit")
    dist.all_reduce(torch.ones(1))


def test_one_rank_fails_while_the_others_hang(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_distributed(fail_beside_a_hung_peer, 2, tmp_path)
    assert time.monotonic() - start < 15
    assert caught.value.ranks == (1,)
    message = str(caught.value)
    for part in ("Rank 1 of 2 failed:", "KeyError: 'the culprit'", "in fail_beside_a_hung_peer", "what rank 1 printed"):
        assert part in message
    assert not any(alive(int(file.read_text())) for file in tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")
    assert run_distributed(me, 2) == [0, 1]


def test_all_ranks_refuse() -> None:
    def refuse() -> None:
        raise ValueError(f"refused by {me()}")

    with pytest.raises(RankFailed, match=r"failed too\)") as caught:
        run_distributed(refuse, 2)
    assert sorted(caught.value.ranks) == [0, 1]
    assert f"refused by {caught.value.rank}" in str(caught.value)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda: os._exit(7), "exited with code 7"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "killed by SIGSEGV"),
        (lambda: sys.exit("leaving"), "SystemExit: leaving"),
    ],
)
def test_a_rank_that_ends_early_is_reported(end: Callable[[], None], reason: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match=reason) as caught:
        run_distributed(lambda: end() if me() == 1 else time.sleep(600), 2)
    assert caught.value.ranks == (1,)
    assert time.monotonic() - start < 15


def test_time_limit_shows_who_hangs_where(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"Ranks 0, 1 of 2 had not finished after 2 s") as caught:
        run_distributed(hang_in_collective, 2, tmp_path, timeout=2)
    message = str(caught.value)
    assert message.count("in hang_in_collective") == 2
    assert "in all_reduce" in message
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(map(alive, pids))


def test_what_a_rank_started_ends_with_it() -> None:
    def start() -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    (pid,) = run_distributed(start, 1)
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


ROOT = Path(_parity.__file__).parents[1]

CALLER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from lightning_shard.testing import run_distributed

def hang(folder):
    import os, time
    assert "deepspeed" in sys.modules  # The server is warm, wherever it was started.
    (Path(folder) / os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    try:
        run_distributed(hang, 2, sys.argv[1])
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    run_distributed(hang, 2, sys.argv[2])
"""


def pids_in(folder: Path, caller: "subprocess.Popen[str]") -> list[int]:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and caller.poll() is None:
        texts = [file.read_text() for file in folder.iterdir()]
        if len(texts) == 2 and all(texts):
            return list(map(int, texts))
        time.sleep(0.05)
    raise AssertionError(f"no two ranks in {folder}")


def heed_interrupts() -> None:
    """A test run in the background ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A script that starts ranks as it should, and one without a guard; side by side, since each starts a server."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "a caller.py").write_text(CALLER)
    (folder / "unguarded.py").write_text(CALLER.split("if __name__")[0] + "run_distributed(hang, 1, '.')\n")
    for name in ("first", "second"):
        (folder / name).mkdir()
    started = {
        script: subprocess.Popen(
            [sys.executable, script, "first", "second"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            preexec_fn=heed_interrupts,
        )
        for script in ("a caller.py", "unguarded.py")
    }
    yield {"folder": folder, **started}
    for process in started.values():
        process.kill()
        process.communicate()


def test_no_rank_outlives_its_caller(scripts: dict[str, Any]) -> None:
    caller, folder = scripts["a caller.py"], scripts["folder"]
    try:
        interrupted = pids_in(folder / "first", caller)
        caller.send_signal(signal.SIGINT)
        assert caller.stdout.readline() == "interrupted\n"
        assert not any(map(alive, interrupted))
        orphaned = pids_in(folder / "second", caller)
    finally:
        caller.kill()
        caller.communicate()
    deadline = time.monotonic() + 5
    while any(map(alive, orphaned)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, orphaned))


def test_a_script_without_a_guard_is_told_so(scripts: dict[str, Any]) -> None:
    said = scripts["unguarded.py"].communicate(timeout=90)[1]
    assert scripts["unguarded.py"].returncode == 1
    assert "exited with code 1 before it began" in said
    assert "keep what the script does under `if __name__ == '__main__':`" in said


def test_what_cannot_be_sent_is_refused() -> None:
    @dataclass
    class Local:
        value: int

    with pytest.raises(TypeError, match=r"lock"):
        run_distributed(print, 1, threading.Lock())
    with pytest.raises(TypeError, match=r"Local.*top level"):
        run_distributed(lambda: Local(1), 1)
    with pytest.raises(RankFailed, match=r"lock"):
        run_distributed(threading.Lock, 1)


def test_impossible_arguments() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        run_distributed(me, 0)
    with pytest.raises(ValueError, match="timeout=0"):
        run_distributed(me, 1, timeout=0)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        preload("no_such_module")
    run_distributed(me, 1)
    with pytest.raises(RuntimeError, match="before the first job"):
        preload("json")


# --- assert_same_training -------------------------------------------------------------------------------------------


class Net(pl.LightningModule):
    """Odd sizes, a buffer that counts, a choice of optimizer."""

    seen: Tensor

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        loss: Tensor = nn.functional.mse_loss(self.body(batch["x"]), batch["y"])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_batches(count: int = 5, rows: int = 8) -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(rows, 5), "y": torch.randn(rows, 3)} for _ in range(count)]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_ddp_trains_as_one_process(optimizer: str) -> None:
    report = assert_same_training(lambda: Net(optimizer), ["ddp", DDPStrategy(bucket_cap_mb=1)], make_batches)
    assert set(report.strategies) == {"ddp", "DDPStrategy"}
    assert len(report.losses) == 5
    figures = report.strategies["ddp"]
    assert figures.losses == pytest.approx(report.losses, rel=1e-5)
    assert max(figures.loss_difference, figures.weight_difference, figures.optimizer_difference) < 1e-5
    assert str(report).count("\n") == 3


def test_accumulation_and_clipping_pass_through() -> None:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    report = assert_same_training(Net, {"mine": DDPStrategy}, make_batches(4), trainer_kwargs=settings, world_size=4)
    assert len(report.strategies["mine"].losses) == 4


ZERO = {
    "zero1": lambda: ZeROStrategy(stage=1),
    "zero2": lambda: ZeROStrategy(stage=2),
    "zero3": lambda: ZeROStrategy(stage=3),
    "zero2 offload": lambda: ZeROStrategy(stage=2, offload=Offload(optimizer="cpu")),
    "zero3 offload": lambda: ZeROStrategy(stage=3, offload=Offload(optimizer="cpu", parameters="cpu")),
}


def test_zero_trains_as_one_process() -> None:
    assert_same_training(Net, ZERO, make_batches)


class ScaledGradient(Net):
    """Right in one process, wrong by one per mille on several ranks."""

    def on_after_backward(self) -> None:
        if self.trainer.world_size > 1:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1.001)


class DivergesOnRankOne(Net):
    """After its last batch, rank 1 has one wrong weight."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == 1 and batch_idx == 4:
            with torch.no_grad():
                self.get_parameter("body.2.weight")[1, 3] += 1e-3


class WrongOptimizerState(Net):
    """Weights agree, one squared gradient does not."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.world_size > 1 and batch_idx == 4:
            (optimizer,) = self.trainer.optimizers
            optimizer.state[self.get_parameter("body.0.weight")]["exp_avg_sq"].mul_(1.01)


class WrongCounter(Net):
    """The integer buffer is off by one."""

    def on_train_start(self) -> None:
        if self.trainer.world_size > 1:
            self.seen += 1


def differences(module: Callable[[], pl.LightningModule]) -> str:
    with pytest.raises(TrainingDiffers) as caught:
        assert_same_training(module, ["ddp"], make_batches)
    return str(caught.value)


def test_a_scaled_gradient_is_caught() -> None:
    message = differences(lambda: ScaledGradient("sgd"))
    assert "ddp trains otherwise than one process" in message
    assert "loss of step 1: " in message
    assert "loss of step 0: " not in message
    # Adam divides the scale away: only its states tell.
    message = differences(ScaledGradient)
    assert "loss of step" not in message
    assert "optimizer state 'exp_avg' of 'body.0.weight'" in message


def test_a_divergence_on_one_rank_only_is_caught() -> None:
    message = differences(DivergesOnRankOne)
    assert "rank 1: weight 'body.2.weight'[1, 3]: " in message
    assert "difference 0.001, " in message
    assert "1 of 21 elements differ" in message
    assert "rank 0" not in message
    assert "loss of step" not in message


def test_a_wrong_optimizer_state_is_caught() -> None:
    message = differences(WrongOptimizerState)
    assert "rank 0: optimizer state 'exp_avg_sq' of 'body.0.weight'" in message
    assert "weight 'body" not in message
    assert "body.2.weight" not in message


def test_a_wrong_integer_buffer_is_caught() -> None:
    assert "weight 'seen': 6, one process has 5; difference 1, allowed 0; 1 of 1 elements" in differences(WrongCounter)


def test_nothing_to_compare_is_refused() -> None:
    def frozen() -> Net:
        net = Net("sgd")
        net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.0)  # type: ignore[method-assign]
        net.training_step = lambda batch, batch_idx: net.body(batch["x"]).mean()  # type: ignore[method-assign]
        return net

    with pytest.raises(ValueError, match="changes no weight"):
        assert_same_training(frozen, ["ddp"], make_batches)
    with pytest.raises(ValueError, match="not finite"):
        assert_same_training(Net, ["ddp"], [{"x": torch.full((2, 5), float("nan")), "y": torch.zeros(2, 3)}])
    with pytest.raises(ValueError, match="no batches"):
        assert_same_training(Net, ["ddp"], [])
    with pytest.raises(ValueError, match="no strategy"):
        assert_same_training(Net, [], make_batches)
    with pytest.raises(ValueError, match="'devices', which"):
        assert_same_training(Net, ["ddp"], make_batches, trainer_kwargs={"devices": 2})


def test_a_strategy_that_cannot_gather_is_refused() -> None:
    class Bare:
        pass

    class FakeTrainer:
        strategy = Bare()

    with pytest.raises(TypeError, match=r"Bare does not say .*full_state_dict\(\) and full_optimizer_state\(\)"):
        _parity._Recorder().on_train_end(FakeTrainer(), Net())  # type: ignore[arg-type]


def test_rows_are_split_evenly_in_any_container() -> None:
    @dataclass
    class Batch:
        x: Tensor
        note: str

    x = torch.arange(8).reshape(4, 2)
    batch = {"pair": (x, [x + 1]), "own": Batch(x, "kept"), "scale": torch.tensor(2.0), "name": "kept"}
    parts = [split_rows(batch, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), x)
    assert torch.equal(torch.cat([part["pair"][1][0] for part in parts]), x + 1)
    assert torch.equal(torch.cat([part["own"].x for part in parts]), x)
    assert not torch.equal(parts[0]["pair"][0], parts[1]["pair"][0])
    assert parts[1]["own"].note == parts[1]["name"] == "kept"
    assert parts[1]["scale"] == 2.0
    with pytest.raises(ValueError, match="4 rows cannot be divided evenly among 3"):
        split_rows(x, 0, 3)
    with pytest.raises(ValueError, match=r"different numbers of rows: \[2, 4\]"):
        split_rows([x, x[:2]], 0, 2)

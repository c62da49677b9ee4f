"""What goes with weights in a checkpoint: optimizers and schedulers of every kind, states of modules, data and
callbacks, and hyper-parameters."""

import gc
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler
from torchmetrics import CatMetric, MeanMetric

import lightning_shard  # noqa: F401  (folders are read in one process too)
from lightning_shard.testing import run_distributed
from tests.checkpoint.runs import (
    Small,
    assert_same,
    message_of,
    own_rows,
    rows,
    run,
    seeded,
    strategy_of,
    whole_states,
)
from tests.strategies.cases import each
from tests.strategies.zero_runs import trainer

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

FEW = ["zero2", "zero3", "fsdp2", "1f1b"]


# --- other states of a training ---


def scheduled(make: Any, **how: Any) -> Any:
    def configure(module: pl.LightningModule) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), "interval": "step", **how}}

    return configure


def one_optimizer(make: Any, **settings: Any) -> Any:
    return lambda module: make(module.parameters(), **settings)


CONFIGURED: dict[str, Any] = {
    "OneCycleLR": scheduled(lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=8)),
    "LambdaLR": scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))),
    "SequentialLR": scheduled(
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
        )
    ),
    "ReduceLROnPlateau": scheduled(
        lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.9), monitor="loss"
    ),
    "SGD": one_optimizer(torch.optim.SGD, lr=0.1),
    "SGD with momentum": one_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": one_optimizer(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "RMSprop": one_optimizer(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "NAdam": one_optimizer(torch.optim.NAdam, lr=0.01),
    "ASGD": one_optimizer(torch.optim.ASGD, lr=0.1, t0=1.0),
    "lr in a tensor": one_optimizer(torch.optim.AdamW, lr=torch.tensor(0.01)),
    "AMSGrad": one_optimizer(torch.optim.Adam, lr=0.01, amsgrad=True),
}


class Logged(Small):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.detach(), sync_dist=True, reduce_fx="mean")
        return loss


def configured(name: str, key: str, folder: Path, source: str | None = None, save: bool = True) -> Any:
    if save:
        run(name, seeded(Logged, CONFIGURED[key]), rows(3), save=folder / f"{name} {key}")
    path = folder / f"{source or name} {key}"
    again = run(name, seeded(Logged, CONFIGURED[key], seed=9), rows(3), ckpt_path=path, max_epochs=2)
    return again.weights, again.optimizer


def test_every_scheduler_and_optimizer_goes_on(tmp_path: Path) -> None:
    def uninterrupted(key: str) -> Any:
        ran = run("auto", seeded(Logged, CONFIGURED[key]), rows(3), max_epochs=2)
        return ran.weights, ran.optimizer

    (expected,) = run_distributed(each, 1, CONFIGURED, uninterrupted)
    cases = [("fsdp2", key) for key in CONFIGURED]
    cases += [
        ("zero2", key) for key in ("OneCycleLR", "ReduceLROnPlateau", "SGD", "RMSprop", "NAdam", "ASGD", "AMSGrad")
    ]
    cases += [
        ("1f1b", key) for key in ("LambdaLR", "SequentialLR", "SGD with momentum", "Adagrad", "NAdam", "lr in a tensor")
    ]

    def one(case: tuple[str, str]) -> Any:
        try:
            return configured(*case, tmp_path)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    wrong = []
    for number, rank in enumerate(run_distributed(each, 2, cases, one)):
        for case, found in rank.items():
            if isinstance(found, str):
                wrong.append((number, case, found[:400]))
                continue
            for part in (0, 1):
                try:
                    assert_same(found[part], expected[case[1]][part], atol=5e-6)
                except AssertionError as error:
                    wrong.append((number, case, str(error)[:300]))
    assert not wrong, "\n".join(map(str, wrong))


class Stateful(nn.Linear):
    """A layer with state of its own: plain data in one, a tensor in another."""

    def __init__(self, tensor: bool) -> None:
        super().__init__(3, 3)
        self.own: Any = torch.zeros(2) if tensor else {"count": 0}

    def get_extra_state(self) -> Any:
        return self.own + 0 if isinstance(self.own, Tensor) else dict(self.own)

    def set_extra_state(self, state: Any) -> None:
        self.own = state


class WithStates(Small):
    """Extra states, a state dict from which a hook leaves something out, and tensors of its own in checkpoints."""

    def __init__(self, tensor: bool = False) -> None:
        super().__init__()
        self.before = Stateful(tensor)
        self.helper = nn.Linear(3, 3)
        self.helper.requires_grad_(False)
        self.big = torch.zeros(1000)
        self.register_state_dict_post_hook(self._leave_out)

    @staticmethod
    def _leave_out(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in [key for key in state if key.startswith("helper.")]:
            del state[key]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.before(x))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["big"] = {"values": [torch.arange(1000.0)], "half": torch.ones(2, dtype=torch.bfloat16)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.big = checkpoint["big"]["values"][0]
        assert checkpoint["big"]["half"].dtype == torch.bfloat16


class Data(pl.LightningDataModule):
    """Data with a state."""

    def __init__(self, name: str, seen: int = 0) -> None:
        super().__init__()
        self._name, self.seen = name, seen

    def train_dataloader(self) -> Any:
        self.seen += 1
        return own_rows(self._name, rows(2))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"] + 100


@pytest.mark.parametrize("tensor", [False, True], ids=["plain data", "a tensor"])
def test_states_of_modules_and_data_come_back(tensor: bool, tmp_path: Path) -> None:
    def both(name: str) -> Any:
        module = seeded(WithStates, tensor)
        module.before.own = torch.tensor([4.0, 5.0]) if tensor else {"count": 4, "names": ["a"]}
        first = trainer(strategy_of(name))
        first.fit(module, datamodule=Data(name, 3))
        first.save_checkpoint(tmp_path / name)
        again, data = seeded(WithStates, tensor, seed=9), Data(name)
        helper = again.helper.weight.detach().clone()
        resumed = trainer(strategy_of(name), max_epochs=2)
        resumed.fit(again, datamodule=data, ckpt_path=tmp_path / name)
        # what is not saved is not loaded: only here does the rank hold the whole of it
        assert name != "zero2" or torch.equal(again.helper.weight, helper)
        return again.before.own, again.big.sum().item(), data.seen

    for rank in run_distributed(each, 2, ["zero2", "zero3", "fsdp2", "1f1b"], both):
        for name, (own, big, seen) in rank.items():
            if tensor:
                assert own.tolist() == [4.0, 5.0], name
            else:
                assert own == {"count": 4, "names": ["a"]}, name
            assert big == 999 * 500 and seen in (104, 105), (name, seen)


class Copying(Small):
    """Gives copies as its state dict."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in super().state_dict(*args, **kwargs).items()}


class Renaming(Small):
    """Gives its own tensors under other names, as wrappers do that leave their prefix out."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"other.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}


class Cast(Small):
    """Saves its weights in half of the bytes."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        weights["first.weight"] = weights["first.weight"].bfloat16()


def test_copies_in_the_place_of_weights_come_back_or_are_refused(tmp_path: Path) -> None:
    """What must not be is that they are lost without a word."""

    def both(case: tuple[str, Any]) -> Any:
        name, make = case
        path = tmp_path / f"{name} {make.__name__}"
        started = AtStart()
        try:
            saved = run(name, seeded(Small) if make is Small else seeded(make), rows(2), save=path)
            run(name, seeded(make, seed=9), rows(1), ckpt_path=path, max_epochs=2, callbacks=[started])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return saved.weights, started.weights

    for rank in run_distributed(each, 2, [(name, make) for name in FEW for make in (Copying, Renaming, Cast)], both):
        for case, found in rank.items():
            if isinstance(found, str):
                assert found.startswith(("MisconfigurationException", "RuntimeError: Saving failed")), (case, found)
                assert "first." in found or "holds a copy of" in found, (case, found)
            else:
                assert_same(found[1], found[0], atol=5e-3 if case[1] is Cast else 1e-7)


class Measured(Small):
    """Metrics whose states are in the state dict: a tensor, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.all = MeanMetric(), CatMetric()
        self.mean.persistent(True)
        self.all.persistent(True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.mean.update(batch_idx + 1.0)
        self.all.update(batch_idx + 1.0)
        return super().training_step(batch, batch_idx)


def test_states_of_metrics_come_back(tmp_path: Path) -> None:
    def both(name: str) -> Any:
        run(name, seeded(Measured), rows(3), save=tmp_path / name)
        module = seeded(Measured, seed=9)
        run(name, module, rows(1), ckpt_path=tmp_path / name, max_epochs=2)
        return float(module.mean.mean_value), float(module.mean.weight), torch.stack(module.all.value).tolist()

    for rank in run_distributed(each, 2, ["zero2", "zero3", "fsdp2"], both):
        for name, found in rank.items():
            assert found == (7.0, 4.0, [1.0, 2.0, 3.0, 1.0]), name


class AtStart(pl.Callback):
    """Whole weights when training starts."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights = whole_states(trainer, module)[0]


class Heads(Small):
    """Of three layers one never has a gradient, and one has its first in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.never = nn.Linear(3, 5), nn.Linear(2, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first = self.first if self.current_epoch == 0 else self.late
        return (self.last(torch.tanh(first(batch))) - 1).square().mean()


def test_parameters_without_a_state_stay_so(tmp_path: Path) -> None:
    def uninterrupted() -> Any:
        ran = run("auto", seeded(Heads), rows(2), max_epochs=3)
        run("auto", seeded(Heads), rows(2), max_epochs=2, save=tmp_path / "c.ckpt")
        return ran.weights, ran.optimizer

    def resumed() -> Any:
        found = {}
        for epochs in (1, 2):
            run("fsdp2", seeded(Heads), rows(2), max_epochs=epochs, save=tmp_path / f"{epochs}")
        for source in ("1", "2", "c.ckpt"):
            ran = run("fsdp2", seeded(Heads, seed=9), rows(2), ckpt_path=tmp_path / source, max_epochs=3)
            found[source] = (ran.weights, ran.optimizer)
            message = message_of(
                lambda source=source: run("zero2", seeded(Heads), rows(2), ckpt_path=tmp_path / source, max_epochs=3)
            )
            found[f"{source} under zero2"] = message
        return found

    (expected,) = run_distributed(uninterrupted, 1)
    assert "never.weight" not in expected[1] and int(expected[1]["late.bias"]["step"]) == 4
    for found in run_distributed(resumed, 2):
        for source in ("1", "2", "c.ckpt"):
            assert_same(found[source][0], expected[0])
            assert_same(found[source][1], expected[1])
        assert found["1 under zero2"] == "", "one count for all that have one"
        for source in ("2", "c.ckpt"):
            assert "ZeRO counts once for all parameters of a group" in found[f"{source} under zero2"]


class Averages(pl.Callback):
    """Keeps copies of sharded weights in containers of every kind."""

    state: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        own = [parameter.detach().clone() for parameter in module.parameters()]
        self.state = {"list": own[:2], "by number": {0: own[0], 1: own[1]}, "pair": (own[0], {"deep": [own[1]]})}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict
        self.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [whole(each) for each in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_sharded_tensors_of_callbacks_come_back_in_every_container(tmp_path: Path) -> None:
    def both() -> tuple[Any, Any]:
        first, second = Averages(), Averages()
        saved = run("fsdp2", seeded(Small), rows(1), callbacks=[first], save=tmp_path / "c")
        again = run("fsdp2", seeded(Small, seed=9), rows(1), callbacks=[second], ckpt_path=tmp_path / "c", max_epochs=2)
        assert saved.weights.keys() == again.weights.keys()
        return whole(first.state), whole(second.state)

    for first, second in run_distributed(both, 2):
        flat = [second["list"], [second["by number"][0], second["by number"][1]]]
        flat.append([second["pair"][0], second["pair"][1]["deep"][0]])
        for found in flat:
            for tensor, expected in zip(found, first["list"], strict=True):
                assert torch.equal(tensor, expected)
        assert list(second["by number"]) == [0, 1]


class Scored(Small):
    """Its validation loss is what it is told, epoch by epoch."""

    SCORES = (3.0, 1.0, 2.0, 0.5)

    def on_validation_epoch_end(self) -> None:
        self.log("score", self.SCORES[min(self.current_epoch, 3)], sync_dist=True)


def test_early_stopping_and_accumulation_go_on(tmp_path: Path) -> None:
    """A checkpoint in the middle of accumulated batches, and a callback that counts epochs without progress."""

    def stop(name: str, path: Path | None = None) -> tuple[int, int]:
        stopping = EarlyStopping("score", patience=2, mode="max")
        more: dict[str, Any] = {"callbacks": [stopping], "validate": rows(1), "accumulate_grad_batches": 2}
        if path is not None and not path.exists():
            return run(name, seeded(Scored), rows(3), save=path, max_epochs=2, **more).trainer.current_epoch, 0
        ran = run(name, seeded(Scored, seed=9), rows(3), ckpt_path=path, max_epochs=4, **more)
        return ran.trainer.current_epoch, stopping.wait_count

    def both(name: str) -> tuple[int, int]:
        torch.distributed.barrier() if torch.distributed.is_initialized() else None
        stop(name, tmp_path / name)
        return stop(name, tmp_path / name)

    expected = run_distributed(both, 1, "auto")[0]
    for rank in run_distributed(each, 2, FEW, both):
        assert set(rank.values()) == {expected}
    assert expected == (3, 2)


# --- hyper-parameters ---


class Choice:
    """No plain data."""

    def __init__(self, number: int) -> None:
        self.number = number


class Configured(Small):
    def __init__(self, width: int = 5, path: Any = None, choice: Any = None, fn: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_hyper_parameters_that_are_no_plain_data_need_trust(tmp_path: Path) -> None:
    def both(name: str) -> Any:
        path = Path("a") / "b"
        run(name, Configured(6, path), rows(1), save=tmp_path / f"{name} plain")
        run(name, Configured(6, path), rows(1), ckpt_path=tmp_path / f"{name} plain", max_epochs=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(name, Configured(6, path, Choice(3)), rows(1), save=tmp_path / f"{name} class")
        said = [str(warning.message) for warning in caught if "choice" in str(warning.message)]
        again: dict[str, Any] = {"ckpt_path": tmp_path / f"{name} class", "max_epochs": 2}
        refused = message_of(lambda: run(name, Configured(), rows(1), **again))
        run(name, Configured(), rows(1), settings={"trusted": True}, **again)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(name, Configured(6, fn=lambda x: x), rows(1), save=tmp_path / f"{name} lambda")
        dropped = [str(warning.message) for warning in caught if "fn" in str(warning.message)]
        run(name, Configured(), rows(1), ckpt_path=tmp_path / f"{name} lambda", max_epochs=2)
        return refused, said, dropped

    rank, other = run_distributed(each, 2, ["zero3", "fsdp2", "1f1b"], both)
    for name, (refused, said, dropped) in rank.items():
        assert "hyper_parameters.choice" in refused and "trusted=True" in refused, refused
        assert other[name][0] == refused
        assert said, "a warning when it is saved"
        assert dropped, "a warning that it is left out"
    module = Configured.load_from_checkpoint(tmp_path / "fsdp2 plain")
    assert module.hparams["width"] == 6 and module.hparams["path"] == Path("a") / "b"
    loaded = Configured.load_from_checkpoint(tmp_path / "fsdp2 class", weights_only=False)
    assert loaded.hparams["choice"].number == 3


# --- buffers of every dtype ---

DTYPES = (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8, torch.int16, torch.bfloat16, torch.int64)


class Odd(Small):
    """Has buffers of dtypes that back-ends do not know, one without dimensions, one without elements, and none."""

    def __init__(self, value: int = 1) -> None:
        super().__init__()
        for dtype in DTYPES:
            name = f"of_{str(dtype).removeprefix('torch.')}"
            self.register_buffer(name, torch.full((3,), float(value)).to(dtype))
            self.register_buffer(f"{name}_number", torch.full((), float(value)).to(dtype))
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("nothing", None)


def test_buffers_of_every_dtype_come_back(tmp_path: Path) -> None:
    def both(name: str) -> dict[str, list[complex]]:
        run(name, Odd(), rows(1), save=tmp_path / name)
        module = Odd(0)
        run(name, module, rows(1), ckpt_path=tmp_path / name, max_epochs=2)
        return {
            key: value.to(torch.complex128).reshape(-1).tolist()
            for key, value in module.named_buffers()
            if key.startswith("of_")
        }

    for rank in run_distributed(each, 2, FEW, both):
        for name, found in rank.items():
            assert len(found) == 2 * len(DTYPES), name
            for key, values in found.items():
                assert set(values) == {1}, (name, key)


# --- a module that is trained again ---


def test_a_first_engine_that_is_freed_late_takes_nothing_from_the_second(tmp_path: Path) -> None:
    """It is freed whenever the garbage collector comes, also in the midst of the second run."""

    def again(name: str) -> None:
        module = seeded(Small)
        first = run(name, module, rows(1))
        second = run(name, module, rows(2))
        wanted = second.trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        del first
        module.trainer = second.trainer
        gc.collect()
        found = second.trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        assert_same(found, wanted, atol=0.0)
        assert found["first.weight"].abs().min() > 0
        second.trainer.save_checkpoint(tmp_path / name)
        assert_same(dict(Small.load_from_checkpoint(tmp_path / name).state_dict()), wanted, atol=0.0)

    run_distributed(each, 2, ["zero1", "zero2", "zero3"], again)

"""Save, resume and consolidate in the engine's own format, which has to be asked for."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import ZeROStrategy, consolidate_checkpoint
from lightning_shard.registry import NAMES
from lightning_shard.testing import RankFailed, run_distributed
from tests.strategies.cases import each
from tests.strategies.zero_modules import STAGES, ZERO_NAMES, Classifier, Trained, adamw, classes, numbers, sgd

pytestmark = pytest.mark.ranks


@dataclass
class State:
    """Losses of a run, and whole weights and optimizer states at its end."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Tensor]] = field(default_factory=dict)


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.state = State()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"].detach().clone()
        self.state.losses.append(float(trainer.strategy.reduce(loss, reduce_op="mean")))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if isinstance(trainer.strategy, ZeROStrategy):
            self.state.weights = trainer.strategy.full_state_dict()
            self.state.optimizer = trainer.strategy.full_optimizer_state()
        else:
            self.state.weights = {name: value.clone() for name, value in module.state_dict().items()}


def rows(batches: list[Any], rank: int, world_size: int) -> DataLoader:
    """This rank's rows of every global batch."""

    def part(batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch.chunk(world_size)[rank]
        return tuple(part(entry) for entry in batch)

    return DataLoader([part(batch) for batch in batches], batch_size=1, collate_fn=lambda entries: entries[0])


def fit(
    strategy: Any,
    module: pl.LightningModule,
    batches: list[Any],
    epochs: int,
    *,
    ckpt_path: Any = None,
    save: Any = None,
    world_size: int = 2,
    **settings: Any,
) -> State:
    """Train, on every rank of a running job; optionally resume before and save after."""
    import os

    if strategy in NAMES:
        strategy = ZeROStrategy(**NAMES[strategy].settings, checkpoint_format="engine")
    recorded = Recorder()
    callbacks = [recorded, *settings.pop("callbacks", [])]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"enable_checkpointing": False, **settings},
    )
    trainer.fit(module, rows(batches, int(os.environ.get("RANK", 0)), world_size), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return recorded.state


def seeded(make: Any) -> pl.LightningModule:
    torch.manual_seed(11)
    return make()


def reference(make: Any, batches: list[Any], epochs: int) -> State:
    """The same training in one process, in a rank of its own."""
    return run_distributed(lambda: fit("auto", seeded(make), batches, epochs, world_size=1), 1)[0]


def close(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left.float(), right.float(), atol=5e-6, rtol=1e-5)


def test_resume_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    def path(name: str) -> Path:
        return tmp_path / "a run" / f"{name}.ckpt"

    def make() -> pl.LightningModule:
        return Classifier(adamw(1e-2))

    def first(name: str) -> None:
        fit(name, seeded(make), classes(3), 1, save=path(name))

    def second(name: str) -> State:
        torch.manual_seed(99)
        return fit(name, make(), classes(3), 2, ckpt_path=path(name))

    run_distributed(each, 2, ZERO_NAMES, first)
    expected = reference(make, classes(3), 2)
    for rank in run_distributed(each, 2, ZERO_NAMES, second):
        for name, resumed in rank.items():
            assert resumed.losses == pytest.approx(expected.losses[3:], abs=5e-6), name
            assert all(close(resumed.weights[key], value) for key, value in expected.weights.items()), name
            assert {float(state["step"]) for state in resumed.optimizer.values()} == {6.0}, name
    for name in ZERO_NAMES:
        assert json.loads((path(name) / "lightning_shard.json").read_text())["world_size"] == 2


class Scalar(Trained):
    """loss = g * w, with the gradient g as the batch."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch).mean()


def test_adams_step_count_comes_back(tmp_path: Path) -> None:
    """Five steps with gradient 1, then one with 2: -0.59903; with a restarted step count it would be -0.68968."""
    cases = [
        (name, kind) for name in ("zero1", "zero2_offload", "zero3", "zero3_offload") for kind in ("Adam", "AdamW")
    ]

    def make(kind: str) -> pl.LightningModule:
        return Scalar(lambda module: getattr(torch.optim, kind)(module.parameters(), lr=0.1, weight_decay=0.0))

    def first(case: tuple[str, str]) -> None:
        fit(case[0], make(case[1]), [torch.ones(2)] * 5, 1, save=tmp_path / " ".join(case))

    def second(case: tuple[str, str]) -> State:
        return fit(case[0], make(case[1]), [torch.full((2,), 2.0)], 2, ckpt_path=tmp_path / " ".join(case))

    run_distributed(each, 2, cases, first)
    for rank in run_distributed(each, 2, cases, second):
        for case, resumed in rank.items():
            assert float(resumed.weights["w"]) == pytest.approx(-0.59903, abs=1e-5), case
            assert float(resumed.optimizer["w"]["step"]) == 6, case


class Everything(Trained):
    """Tied, frozen, 0-dimensional, persistent and other buffers; 7 trainable elements beside the tied ones."""

    def __init__(self, frozen: float = 0.5) -> None:
        super().__init__(sgd())
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.still = nn.Linear(4, 4)
        nn.init.constant_(self.still.weight, frozen)
        self.still.requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("freqs", torch.arange(4.0), persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1
        tokens = (batch[:, 0].abs() * 5).long() % 7
        logits = self.head(self.still(self.embed(tokens))) * self.log_temperature.exp()
        return nn.functional.cross_entropy(logits, (tokens + 1) % 7)


def test_frozen_tied_and_buffers_in_resume_and_consolidation(tmp_path: Path) -> None:
    names = [*STAGES, "zero3_offload"]

    def first(name: str) -> State:
        return fit(name, seeded(Everything), numbers(2), 1, save=tmp_path / name)

    def second(name: str) -> State:
        return fit(name, Everything(frozen=0.1), numbers(2), 2, ckpt_path=tmp_path / name)

    saved = run_distributed(each, 2, names, first)[0]
    for rank in run_distributed(each, 2, names, second):
        for name, resumed in rank.items():
            assert resumed.weights["still.weight"].eq(0.5).all(), name
            assert int(resumed.weights["count"]) == 4, name
    for name in names:
        plain_file = consolidate_checkpoint(tmp_path / name, tmp_path / f"plain {name}.ckpt")
        plain = torch.load(plain_file, weights_only=False)["state_dict"]
        fresh = Everything(frozen=0.1)
        fresh.load_state_dict(plain, strict=True)
        assert fresh.head.weight is fresh.embed.weight, name
        assert plain["log_temperature"].shape == (), name
        assert plain.keys() == saved[name].weights.keys(), name
        assert all(torch.equal(plain[key], saved[name].weights[key]) for key in plain), name
        assert Everything.load_from_checkpoint(plain_file).still.weight.eq(0.5).all(), name


class Seven(Trained):
    """Seven trainable elements, which no world size divides."""

    def __init__(self, groups: int = 1) -> None:
        def optimizer(module: Any) -> torch.optim.Optimizer:
            parts = [[module.layer.weight], [module.scale]] if groups == 2 else [list(module.parameters())]
            return torch.optim.SGD([{"params": part} for part in parts], lr=0.1)

        super().__init__(optimizer)
        self.layer = nn.Linear(3, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layer(batch) * self.scale).square().mean()


@pytest.mark.parametrize(("names", "world_size"), [(["zero1", "zero3"], 2), (["zero2", "zero3"], 4)])
def test_padding_never_leaks(names: list[str], world_size: int, tmp_path: Path) -> None:
    cases = [(name, groups) for name in names for groups in (1, 2)]

    def train(case: tuple[str, int]) -> State:
        name, groups = case
        path = tmp_path / f"{name} {groups}"
        return fit(name, seeded(lambda: Seven(groups)), numbers(2, width=3), 1, save=path, world_size=world_size)

    for case, saved in run_distributed(each, world_size, cases, train)[0].items():
        file = consolidate_checkpoint(tmp_path / "{} {}".format(*case), tmp_path / "{} {}.ckpt".format(*case))
        plain = torch.load(file, weights_only=False)["state_dict"]
        assert sum(tensor.numel() for tensor in plain.values()) == 7, case
        assert all(torch.equal(plain[key], saved.weights[key]) for key in saved.weights), case


def test_adagrads_accumulators_come_back(tmp_path: Path) -> None:
    names = ["zero1", "zero3"]

    def make() -> pl.LightningModule:
        return Classifier(
            lambda module: torch.optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.1)
        )

    def first(name: str) -> None:
        fit(name, seeded(make), classes(3), 1, save=tmp_path / name)

    def second(name: str) -> State:
        return fit(name, make(), classes(3), 2, ckpt_path=tmp_path / name)

    run_distributed(each, 2, names, first)
    expected = reference(make, classes(3), 2)
    for rank in run_distributed(each, 2, names, second):
        for name, resumed in rank.items():
            assert all(close(resumed.weights[key], value) for key, value in expected.weights.items()), name
            assert resumed.optimizer["net.0.weight"]["sum"].shape == (17, 13), name


class Noted(Classifier):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = 7

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]


class Counter(pl.Callback):
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def test_hooks_and_callbacks_state(tmp_path: Path) -> None:
    def first(name: str) -> None:
        fit(name, Noted(), classes(2), 1, save=tmp_path / name, callbacks=[Counter(5)])

    def second(name: str) -> tuple[int, int]:
        module, counter = Noted(), Counter()
        fit(name, module, classes(2), 2, ckpt_path=tmp_path / name, callbacks=[counter])
        return module.note, counter.count

    run_distributed(each, 2, STAGES, first)
    assert run_distributed(each, 2, STAGES, second) == [dict.fromkeys(STAGES, (7, 5))] * 2


def test_weights_only_is_one_plain_file_without_optimizer(tmp_path: Path) -> None:
    def first(name: str) -> State:
        checkpoint = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, filename=name, save_weights_only=True)
        return fit(
            name,
            seeded(lambda: Classifier(adamw())),
            classes(3),
            1,
            callbacks=[checkpoint],
            enable_checkpointing=True,
        )

    def resume(name: str, **settings: Any) -> State:
        strategy = ZeROStrategy(stage=int(name[-1]), checkpoint_format="engine", **settings)
        return fit(strategy, Classifier(adamw()), classes(3)[:1], 2, ckpt_path=tmp_path / f"{name}.ckpt")

    def refusal(name: str) -> str:
        with pytest.raises(MisconfigurationException) as refused:
            resume(name)
        return str(refused.value)

    saved = run_distributed(each, 2, STAGES, first)[0]
    for name in STAGES:
        file = torch.load(tmp_path / f"{name}.ckpt", weights_only=False)
        assert "optimizer_states" not in file, name
        assert all(torch.equal(file["state_dict"][key], value) for key, value in saved[name].weights.items()), name
    for rank in run_distributed(each, 2, STAGES, refusal):
        assert all("holds weights only" in message for message in rank.values()), rank
    for rank in run_distributed(each, 2, STAGES, lambda name: resume(name, load_full_weights=True)):
        for name, resumed in rank.items():
            assert {float(state["step"]) for state in resumed.optimizer.values()} == {1.0}, name


def test_evaluate_from_a_plain_file_and_from_a_folder(tmp_path: Path) -> None:
    def first(name: str) -> None:
        fit(name, seeded(Classifier), classes(3), 1, save=tmp_path / name)

    def plain(name: str) -> Path:
        return tmp_path / f"plain {name}.ckpt"

    def validate(name: str) -> list[float]:
        import os

        found = []
        for path in (tmp_path / name, plain(name)):
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=2,
                strategy=name,
                logger=False,
                enable_progress_bar=False,
                use_distributed_sampler=False,
                enable_model_summary=False,
            )
            loader = rows(classes(2), int(os.environ["RANK"]), 2)
            found.append(trainer.validate(Classifier(), loader, ckpt_path=path, verbose=False)[0]["val_loss"])
        return found

    def plainly(name: str) -> float:
        module = Classifier.load_from_checkpoint(plain(name))
        return float(sum(module.loss(batch) for batch in classes(2)) / 2)

    run_distributed(each, 2, STAGES, first)
    for name in STAGES:
        consolidate_checkpoint(tmp_path / name, plain(name))
    (expected,) = run_distributed(each, 1, STAGES, plainly)
    for found in run_distributed(each, 2, STAGES, validate):
        for name in STAGES:
            assert found[name] == pytest.approx([expected[name]] * 2, abs=5e-6), name


def test_wrong_paths_are_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "c"

    def save() -> None:
        fit("zero2", Classifier(), classes(1), 1, save=path)

    def resume(path: Path, strategy: str = "zero2", ranks: int = 2) -> None:
        fit(strategy, Classifier(), classes(1, rows=12), 2, ckpt_path=path, world_size=ranks)

    def message(case: tuple[Path, str]) -> str:
        with pytest.raises((MisconfigurationException, FileNotFoundError)) as refused:
            resume(*case)
        return str(refused.value)

    run_distributed(save, 2)
    (tmp_path / "empty").mkdir()
    wrong = {
        (path / "checkpoint", "zero2"): f"lies inside the checkpoint {path}",
        (tmp_path / "empty", "zero2"): "the folder is empty",
        (tmp_path / "missing", "zero2"): "missing",
        (path, "zero3"): "written by ZeRO stage 2 and cannot be loaded at stage 3",
    }
    for found in run_distributed(each, 2, list(wrong), message):
        for case, words in wrong.items():
            assert words in found[case], case
    with pytest.raises(RankFailed, match="written by 2 ranks and cannot be loaded on 3"):
        run_distributed(resume, 3, path, ranks=3)


def test_a_failed_write_leaves_the_old_checkpoint_or_none(tmp_path: Path) -> None:
    cases = [(name, target) for name in ("zero2", "zero3") for target in ("over the old one", "to a new path")]

    def first(case: tuple[str, str]) -> State:
        return fit(case[0], seeded(Classifier), classes(3), 1, save=tmp_path / " ".join(case))

    def fail(name: str, path: Path, target: Path) -> None:
        import errno
        import os

        real_save = torch.save

        def full_disk(*args: Any, **kwargs: Any) -> None:
            if os.environ["RANK"] == "1" and "optim_states" in str(args[1]):
                raise OSError(errno.ENOSPC, "No space left on device")
            real_save(*args, **kwargs)

        torch.save = full_disk
        fit(name, Classifier(), classes(3), 2, ckpt_path=path, save=target)

    for case, after_first in run_distributed(each, 2, cases, first)[0].items():
        path = tmp_path / " ".join(case)
        target = path if case[1] == "over the old one" else tmp_path / f"new {case[0]}"
        with pytest.raises(RankFailed, match="No space left on device"):
            run_distributed(fail, 2, case[0], path, target)
        assert target == path or not target.exists(), case
        plain = torch.load(consolidate_checkpoint(path, tmp_path / "plain.ckpt"), weights_only=False)["state_dict"]
        assert all(torch.equal(plain[key], value) for key, value in after_first.weights.items()), case


def test_consolidation_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        consolidate_checkpoint(tmp_path / "nothing", tmp_path / "f.ckpt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="it is empty"):
        consolidate_checkpoint(tmp_path / "empty", tmp_path / "f.ckpt")
    assert not (tmp_path / "f.ckpt").exists()
    assert issubclass(MisconfigurationException, Exception)


class Adapted(Trained):
    """A frozen layer with a trainable low-rank adapter."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__(sgd(0.0))
        self.base = nn.Linear(8, 8)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.full((8, 2), fill))
        self.up = nn.Parameter(torch.full((2, 8), fill))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.base(batch) + batch @ self.down @ self.up).square().mean()


class FillOwnSlices(pl.Callback):
    """Every rank writes another value into its own slice of the adapter."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        from deepspeed.utils import safe_set_local_fp32_param

        for parameter in (module.down, module.up):
            safe_set_local_fp32_param(parameter, torch.full_like(parameter.ds_tensor, 1.0 + trainer.global_rank))


def test_every_ranks_slice_of_an_adapter_comes_back(tmp_path: Path) -> None:
    """Beside the frozen weights, and without them."""
    paths = {exclude: tmp_path / ("adapter" if exclude else "whole") for exclude in (False, True)}

    def strategy(exclude: bool) -> ZeROStrategy:
        return ZeROStrategy(
            stage=3, exclude_frozen_parameters=exclude, load_full_weights=True, checkpoint_format="engine"
        )

    def first(exclude: bool) -> State:
        more: dict[str, Any] = {"save": paths[exclude], "callbacks": [FillOwnSlices()]}
        return fit(strategy(exclude), seeded(Adapted), numbers(1, width=8), 1, **more)

    def again(exclude: bool) -> State:
        # Not strict: an adapter-only checkpoint leaves the frozen weights to the module.
        module = Adapted()
        module.strict_loading = not exclude
        return fit(strategy(exclude), module, numbers(1, width=8), 2, ckpt_path=paths[exclude])

    saved = run_distributed(each, 2, list(paths), first)[0]
    found = run_distributed(each, 2, list(paths), again)
    for exclude, path in paths.items():
        wanted = saved[exclude].weights
        assert wanted["down"].unique().tolist() == [1.0, 2.0], path
        plain = torch.load(consolidate_checkpoint(path, path.with_suffix(".ckpt")), weights_only=False)["state_dict"]
        for name in ("down", "up"):
            assert torch.equal(plain[name], wanted[name]), path
            for rank in found:
                assert torch.equal(rank[exclude].weights[name], wanted[name]), path
        assert ("base.weight" in plain) is not exclude

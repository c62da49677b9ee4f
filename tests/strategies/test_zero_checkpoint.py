"""Save, resume and consolidate in the engine's own format."""

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
from lightning_shard.testing import RankFailed, run_distributed
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


@pytest.mark.parametrize("name", ZERO_NAMES)
def test_resume_equals_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a run" / "last.ckpt"

    def make() -> pl.LightningModule:
        return Classifier(adamw(1e-2))

    def first() -> None:
        fit(name, seeded(make), classes(3), 1, save=path)

    def second() -> State:
        torch.manual_seed(99)
        return fit(name, make(), classes(3), 2, ckpt_path=path)

    run_distributed(first, 2)
    expected = reference(make, classes(3), 2)
    for resumed in run_distributed(second, 2):
        assert resumed.losses == pytest.approx(expected.losses[3:], abs=5e-6)
        assert all(close(resumed.weights[key], value) for key, value in expected.weights.items())
        assert {float(state["step"]) for state in resumed.optimizer.values()} == {6.0}
    assert json.loads((path / "lightning_shard.json").read_text())["world_size"] == 2


class Scalar(Trained):
    """loss = g * w, with the gradient g as the batch."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch).mean()


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("name", ["zero1", "zero2_offload", "zero3", "zero3_offload"])
def test_adams_step_count_comes_back(name: str, kind: str, tmp_path: Path) -> None:
    """Five steps with gradient 1, then one with 2: -0.59903; with a restarted step count it would be -0.68968."""

    def make() -> pl.LightningModule:
        return Scalar(lambda module: getattr(torch.optim, kind)(module.parameters(), lr=0.1, weight_decay=0.0))

    def first() -> None:
        fit(name, make(), [torch.ones(2)] * 5, 1, save=tmp_path / "c")

    def second() -> State:
        return fit(name, make(), [torch.full((2,), 2.0)], 2, ckpt_path=tmp_path / "c")

    run_distributed(first, 2)
    for resumed in run_distributed(second, 2):
        assert float(resumed.weights["w"]) == pytest.approx(-0.59903, abs=1e-5)
        assert float(resumed.optimizer["w"]["step"]) == 6


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


@pytest.mark.parametrize("name", [*STAGES, "zero3_offload"])
def test_frozen_tied_and_buffers_in_resume_and_consolidation(name: str, tmp_path: Path) -> None:
    def first() -> State:
        return fit(name, seeded(Everything), numbers(2), 1, save=tmp_path / "c")

    def second() -> State:
        return fit(name, Everything(frozen=0.1), numbers(2), 2, ckpt_path=tmp_path / "c")

    saved = run_distributed(first, 2)[0]
    for resumed in run_distributed(second, 2):
        assert resumed.weights["still.weight"].eq(0.5).all()
        assert int(resumed.weights["count"]) == 4
    plain_file = consolidate_checkpoint(tmp_path / "c", tmp_path / "plain file.ckpt")
    plain = torch.load(plain_file, weights_only=False)["state_dict"]
    fresh = Everything(frozen=0.1)
    fresh.load_state_dict(plain, strict=True)
    assert fresh.head.weight is fresh.embed.weight
    assert plain["log_temperature"].shape == ()
    assert plain.keys() == saved.weights.keys()
    assert all(torch.equal(plain[key], saved.weights[key]) for key in plain)
    assert Everything.load_from_checkpoint(plain_file).still.weight.eq(0.5).all()


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


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("name", "world_size"), [("zero1", 2), ("zero2", 4), ("zero3", 2), ("zero3", 4)])
def test_padding_never_leaks(name: str, world_size: int, groups: int, tmp_path: Path) -> None:
    def train() -> State:
        return fit(
            name, seeded(lambda: Seven(groups)), numbers(2, width=3), 1, save=tmp_path / "c", world_size=world_size
        )

    saved = run_distributed(train, world_size)[0]
    plain = torch.load(consolidate_checkpoint(tmp_path / "c", tmp_path / "f.ckpt"), weights_only=False)["state_dict"]
    assert sum(tensor.numel() for tensor in plain.values()) == 7
    assert all(torch.equal(plain[key], saved.weights[key]) for key in saved.weights)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_adagrads_accumulators_come_back(name: str, tmp_path: Path) -> None:
    def make() -> pl.LightningModule:
        return Classifier(
            lambda module: torch.optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.1)
        )

    run_distributed(lambda: fit(name, seeded(make), classes(3), 1, save=tmp_path / "c"), 2)
    expected = reference(make, classes(3), 2)
    for resumed in run_distributed(lambda: fit(name, make(), classes(3), 2, ckpt_path=tmp_path / "c"), 2):
        assert all(close(resumed.weights[key], value) for key, value in expected.weights.items())
        assert resumed.optimizer["net.0.weight"]["sum"].shape == (17, 13)


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


@pytest.mark.parametrize("name", STAGES)
def test_hooks_and_callbacks_state(name: str, tmp_path: Path) -> None:
    def first() -> None:
        fit(name, Noted(), classes(2), 1, save=tmp_path / "c", callbacks=[Counter(5)])

    def second() -> tuple[int, int]:
        module, counter = Noted(), Counter()
        fit(name, module, classes(2), 2, ckpt_path=tmp_path / "c", callbacks=[counter])
        return module.note, counter.count

    run_distributed(first, 2)
    assert run_distributed(second, 2) == [(7, 5), (7, 5)]


@pytest.mark.parametrize("name", STAGES)
def test_weights_only_is_one_plain_file_without_optimizer(name: str, tmp_path: Path) -> None:
    def first() -> State:
        checkpoint = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="w", save_weights_only=True)
        return fit(
            name,
            seeded(lambda: Classifier(adamw())),
            classes(3),
            1,
            callbacks=[checkpoint],
            enable_checkpointing=True,
        )

    def resume(**settings: Any) -> State:
        strategy = ZeROStrategy(stage=int(name[-1]), **settings)
        return fit(strategy, Classifier(adamw()), classes(3)[:1], 2, ckpt_path=tmp_path / "w.ckpt")

    saved = run_distributed(first, 2)[0]
    file = torch.load(tmp_path / "w.ckpt", weights_only=False)
    assert "optimizer_states" not in file
    assert all(torch.equal(file["state_dict"][key], value) for key, value in saved.weights.items())
    with pytest.raises(RankFailed, match="load_full_weights=True"):
        run_distributed(resume, 2)
    for resumed in run_distributed(lambda: resume(load_full_weights=True), 2):
        assert {float(state["step"]) for state in resumed.optimizer.values()} == {1.0}


@pytest.mark.parametrize("name", STAGES)
def test_evaluate_from_a_plain_file_and_from_a_folder(name: str, tmp_path: Path) -> None:
    def first() -> None:
        fit(name, seeded(Classifier), classes(3), 1, save=tmp_path / "c")

    def validate(path: Path) -> float:
        import os

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
        return trainer.validate(Classifier(), loader, ckpt_path=path, verbose=False)[0]["val_loss"]

    def plainly() -> float:
        module = Classifier.load_from_checkpoint(plain)
        return float(sum(module.loss(batch) for batch in classes(2)) / 2)

    run_distributed(first, 2)
    plain = consolidate_checkpoint(tmp_path / "c", tmp_path / "plain.ckpt")
    (expected,) = run_distributed(plainly, 1)
    for path in (tmp_path / "c", plain):
        assert run_distributed(validate, 2, path) == pytest.approx([expected] * 2, abs=5e-6)


def test_wrong_paths_are_one_clear_line(tmp_path: Path) -> None:
    def save() -> None:
        fit("zero2", Classifier(), classes(1), 1, save=tmp_path / "c")

    def resume(path: Path, strategy: str = "zero2", ranks: int = 2) -> None:
        fit(strategy, Classifier(), classes(1, rows=12), 2, ckpt_path=path, world_size=ranks)

    run_distributed(save, 2)
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "c" / "checkpoint", f"lies inside the checkpoint {tmp_path / 'c'}"),
        (tmp_path / "empty", "it is empty"),
        (tmp_path / "missing", "missing"),
    ):
        with pytest.raises(RankFailed, match=message):
            run_distributed(resume, 2, path)
    with pytest.raises(RankFailed, match="written by ZeRO stage 2 and cannot be loaded at stage 3"):
        run_distributed(resume, 2, tmp_path / "c", "zero3")
    with pytest.raises(RankFailed, match="written by 2 ranks and cannot be loaded on 3"):
        run_distributed(resume, 3, tmp_path / "c", ranks=3)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_a_failed_write_leaves_the_old_checkpoint_or_none(name: str, overwrite: bool, tmp_path: Path) -> None:
    path = tmp_path / "c"
    after_first = run_distributed(lambda: fit(name, seeded(Classifier), classes(3), 1, save=path), 2)[0]
    target = path if overwrite else tmp_path / "new"

    def fail() -> None:
        import errno
        import os

        real_save = torch.save

        def full_disk(*args: Any, **kwargs: Any) -> None:
            if os.environ["RANK"] == "1" and "optim_states" in str(args[1]):
                raise OSError(errno.ENOSPC, "No space left on device")
            real_save(*args, **kwargs)

        torch.save = full_disk
        fit(name, Classifier(), classes(3), 2, ckpt_path=path, save=target)

    with pytest.raises(RankFailed, match="No space left on device"):
        run_distributed(fail, 2)
    assert overwrite or not target.exists()
    plain = torch.load(consolidate_checkpoint(path, tmp_path / "plain.ckpt"), weights_only=False)["state_dict"]
    assert all(torch.equal(plain[key], value) for key, value in after_first.weights.items())


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


@pytest.mark.parametrize("exclude", [False, True])
def test_every_ranks_slice_of_an_adapter_comes_back(exclude: bool, tmp_path: Path) -> None:
    def strategy() -> ZeROStrategy:
        return ZeROStrategy(stage=3, exclude_frozen_parameters=exclude, load_full_weights=True)

    def first() -> State:
        return fit(
            strategy(), seeded(Adapted), numbers(1, width=8), 1, save=tmp_path / "c", callbacks=[FillOwnSlices()]
        )

    def again() -> State:
        # Not strict: an adapter-only checkpoint leaves the frozen weights to the module.
        module = Adapted()
        module.strict_loading = not exclude
        return fit(strategy(), module, numbers(1, width=8), 2, ckpt_path=tmp_path / "c")

    saved = run_distributed(first, 2)[0]
    assert saved.weights["down"].unique().tolist() == [1.0, 2.0]
    for resumed in run_distributed(again, 2):
        for name in ("down", "up"):
            assert torch.equal(resumed.weights[name], saved.weights[name])
    plain = torch.load(consolidate_checkpoint(tmp_path / "c", tmp_path / "plain.ckpt"), weights_only=False)
    weights = plain["state_dict"]
    assert all(torch.equal(weights[name], saved.weights[name]) for name in ("down", "up"))
    assert ("base.weight" in weights) is not exclude

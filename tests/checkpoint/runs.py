"""Trainings for tests of checkpoints, the same under every strategy: what each rank has afterwards, as tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import PipelineStrategy
from lightning_shard.testing import split_rows
from tests.strategies.zero_modules import Trained
from tests.strategies.zero_runs import trainer, world

SHARDED = ["zero1", "zero2", "zero3", "fsdp2"]
"""Strategies that partition tensors."""

ALL = [*SHARDED, "1f1b"]
"""And one that gives each rank tensors of its own."""


def strategy_of(name: str, **settings: Any) -> Any:
    """A strategy by its short name."""
    if name == "1f1b":
        return PipelineStrategy(microbatches=2, **settings)
    if not settings:
        return name
    from lightning_shard import FSDP2Strategy, ZeROStrategy

    return FSDP2Strategy(**settings) if name == "fsdp2" else ZeROStrategy(stage=int(name[-1]), **settings)


def own_rows(name: str, batches: Sequence[Any]) -> "DataLoader[Any]":
    """This rank's rows of each global batch; the ranks of one pipeline all see all rows."""
    mine = list(batches) if name == "1f1b" else [split_rows(batch, *world()) for batch in batches]
    return DataLoader(mine, batch_size=None)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What one rank has after a training."""

    weights: dict[str, Tensor]
    """Whole parameters and buffers."""

    optimizer: dict[str, dict[str, Tensor]]
    """Whole optimizer states by parameter and state name."""

    module: pl.LightningModule
    """The module itself."""

    trainer: pl.Trainer
    """The Trainer."""


class Whole(pl.Callback):
    """Collects whole states at the end of training, while they are there."""

    weights: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.weights, self.optimizer = whole_states(trainer, module)


def whole_states(
    trainer: pl.Trainer, module: pl.LightningModule
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Whole weights and optimizer states while the Trainer runs; collective."""
    strategy: Any = trainer.strategy
    if hasattr(strategy, "full_state_dict"):
        weights, states = strategy.full_state_dict(), strategy.full_optimizer_state()
    else:
        weights = module.state_dict()
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        states = {
            names[id(parameter)]: {key: value for key, value in found.items() if value is not None}
            for optimizer in trainer.optimizers
            for parameter, found in optimizer.state.items()
        }
    return (
        {name: value.detach().clone() for name, value in weights.items() if isinstance(value, Tensor)},
        {name: {key: torch.as_tensor(value).clone() for key, value in each.items()} for name, each in states.items()},
    )


def run(
    name: str,
    module: pl.LightningModule,
    batches: Sequence[Any],
    *,
    ckpt_path: Any = None,
    save: Any = None,
    callbacks: Sequence[pl.Callback] = (),
    settings: Mapping[str, Any] | None = None,
    validate: Sequence[Any] | None = None,
    **more: Any,
) -> Ran:
    """Train ``module`` under the strategy ``name`` on all ranks; then write a checkpoint to ``save``.

    Args:
        name: A strategy, or ``"auto"``.
        module: The module.
        batches: Global batches of an epoch.
        ckpt_path: What to resume from.
        save: Where to.
        callbacks: Callbacks.
        settings: Arguments of the strategy.
        validate: Global batches of validation.
        **more: Arguments of the Trainer.

    """
    whole = Whole()
    ran = trainer(strategy_of(name, **(settings or {})), callbacks=[*callbacks, whole], **more)
    ran.fit(
        module,
        own_rows(name, batches),
        None if validate is None else own_rows(name, validate),
        ckpt_path=ckpt_path,
    )
    if save is not None:
        ran.save_checkpoint(save)
    return Ran(weights=whole.weights, optimizer=whole.optimizer, module=module, trainer=ran)


def seeded(make: Callable[..., pl.LightningModule], *args: Any, seed: int = 11) -> Any:
    """A module with the same weights on every call."""
    torch.manual_seed(seed)
    return make(*args)


class Small(Trained):
    """Two layers whose sizes no number of ranks divides, and a buffer that counts."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer or (lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2)))
        self.first = torch.nn.Linear(3, 5)
        self.last = torch.nn.Linear(5, 1)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.first(x * self.scale)))
        return result

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - 1).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self(batch) - 1).square().mean(), sync_dist=True)


def rows(count: int = 3, size: int = 8, width: int = 3, seed: int = 5) -> list[Tensor]:
    """Global batches for `Small`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, width, generator=generator) for _ in range(count)]


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any], atol: float = 2e-6) -> None:
    """Assert that nested tensors are equal but for rounding; with ``atol=0`` quite equal."""
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    for name, value in expected.items():
        if isinstance(value, Mapping):
            assert_same(found[name], value, atol)
            continue
        assert found[name].shape == value.shape, name
        difference = (found[name].double() - value.double()).abs()
        assert difference.numel() == 0 or difference.max().item() <= atol, (name, found[name], value)


def message_of(fn: Callable[[], Any]) -> str:
    """The error of ``fn``, with its class; ``""`` if there is none."""
    try:
        fn()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""

"""Planning for the module, data and settings of a configuration file, without a run."""

import argparse
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_shard._compat.dry_run import fake_mode
from lightning_shard.plan.hardware import Device, parse_bytes
from lightning_shard.plan.precision import unified
from lightning_shard.plan.results import Plan
from lightning_shard.plan.schedules import plan_schedules
from lightning_shard.units.peek import NO_BATCH, peek_batch
from lightning_shard_cli.errors import CommandError
from lightning_shard_cli.training import Parser, Progress, check_strategy, check_yaml, refusal

_FOLLOWED = ("max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val")
"""Settings of the Trainer that a module may look at, and that matter to a plan."""


@dataclass(frozen=True, kw_only=True)
class Configured:
    """What a configuration describes."""

    module: LightningModule
    """The module; its tensors are fake where that was possible."""

    batch: Any | None
    """The first batch of one rank, or ``None`` where there is none."""

    trainer: Trainer
    """A Trainer of so many ranks that never runs."""

    settings: dict[str, Any]
    """The Trainer's settings in the configuration."""

    notes: tuple[str, ...] = ()
    """What could not be done as it should."""


def plan_config(given: argparse.Namespace, device: Device | None, rest: list[str]) -> Plan:
    """Plan for a configuration.

    Args:
        given: The command's options.
        device: What a rank runs on.
        rest: Options that change the configuration.

    Raises:
        CommandError: For a mistake in the files or options, or a value that a constructor rejects.

    """
    assert device is not None
    if given.devices < 1 or given.nodes < 1 or given.devices % given.nodes:
        raise CommandError(f"--devices {given.devices} must be a multiple of --nodes {given.nodes}, both at least 1")
    if given.memory is not None:
        device = replace(device, memory_bytes=parse_bytes(given.memory))
    per_rank = 2 if given.stages_per_rank is None else given.stages_per_rank
    schedules = plan_schedules(given.stages, given.microbatches, per_rank) if given.stages is not None else ()
    configured = read(given.config, rest, devices=given.devices, nodes=given.nodes)
    from lightning_shard.plan.search import plan_module

    plan: Plan = plan_module(
        configured.module,
        configured.batch,
        devices=given.devices,
        nodes=given.nodes,
        device=device,
        precision=unified(configured.settings.get("precision")),
        simulate=3 if given.simulate is None else given.simulate,
        gradient_clip_val=configured.settings.get("gradient_clip_val"),
        accumulate_grad_batches=configured.settings.get("accumulate_grad_batches") or 1,
    )
    return replace(plan, schedules=schedules or plan.schedules, notes=(*configured.notes, *plan.notes))


def read(files: list[str], options: list[str], *, devices: int, nodes: int) -> Configured:
    """Build what a configuration describes, but nothing that would run it.

    Args:
        files: Configuration files; the last one wins.
        options: Options that change them.
        devices: Ranks.
        nodes: Machines that they are in.

    Raises:
        CommandError: For a mistake in the files or options, or a value that a constructor rejects.

    """
    for file in files:
        if Path(file).is_file():
            check_yaml(Path(file))
    try:
        cli = PlanCLI(devices, nodes, args=[*(f"--config={file}" for file in files), *options])
    except Exception as error:
        if (message := refusal(error, Progress())) is None:
            raise
        raise CommandError(message) from error
    batch = first_batch(cli)
    if cli.datamodule is None and cli.fake and _made_without_values(batch):
        cli.build(fake=False)  # the module makes its own data
        batch = first_batch(cli)
    notes = list(cli.notes)
    if batch is None:
        notes.append(f"{type(cli.datamodule or cli.model).__name__} gives no training batch.")
    return Configured(module=cli.model, batch=batch, trainer=cli.trainer, settings=cli.settings, notes=tuple(notes))


def first_batch(cli: "PlanCLI") -> Any | None:
    """The first batch of a rank's train loader, on the CPU; ``None`` if there is no loader, or it gives nothing."""
    source = cli.datamodule or cli.model
    kind = LightningDataModule if cli.datamodule else LightningModule
    if not is_overridden("train_dataloader", source, kind):
        return None
    source.prepare_data()
    source.setup("fit")
    loader = source.train_dataloader()
    batch = peek_batch(loader)
    return next(iter(CombinedLoader(loader, "max_size")), (None,))[0] if batch is NO_BATCH else batch


def _made_without_values(batch: Any) -> bool:
    """Whether a batch holds stand-ins for tensors."""
    found: list[bool] = []
    apply_to_collection(batch, Tensor, lambda tensor: found.append(type(tensor) is not Tensor))
    return any(found)


class PlanCLI(LightningCLI):
    """LightningCLI that takes the files of ``fit``, and builds the module and the data, but no Trainer of theirs."""

    def __init__(self, devices: int, nodes: int, *, args: list[str]) -> None:
        self.devices, self.nodes = devices, nodes
        self.notes: list[str] = []
        self.fake = True
        self.ranks: Trainer | None = None
        super().__init__(run=False, args=args, parser_class=Parser, save_config_callback=None)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Take what ``fit`` takes beside module, data and Trainer, as it may stand in its files."""
        skipped = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        parser.add_method_arguments(Trainer, "fit", skip=set(skipped))

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and check the strategy's name, though the planner does not look at it."""
        assert isinstance(parser, Parser) and isinstance(args, list)
        parser.options = lambda: sorted(parser.get_defaults().keys())
        self.config = parser.parse_args(args)
        self.parsed = self.config.clone()
        # What modules save as their hyperparameters; LightningCLI reads it off the whole configuration, else later.
        self.config_dump = self.config.as_dict()
        self.settings: dict[str, Any] = vars(self.parsed["trainer"])
        check_strategy(self.settings["strategy"])

    def instantiate_classes(self) -> None:
        """Build the data and the module: without memory if the module's constructor can do without values."""
        try:
            self.build(fake=True)
        except Exception as error:
            self.build(fake=False)  # a mistake of the user's own is raised again
            self.notes.append(
                f"{type(self.model).__name__} was built with real memory, as its constructor needs values"
                f" ({type(error).__name__})."
            )

    def build(self, *, fake: bool) -> None:
        """Build both anew, as :class:`LightningCLI` does, but nothing of the Trainer; the data has values always."""
        self.fake = fake
        data = self._build(lambda key: key == "data").datamodule
        with fake_mode() if fake else nullcontext():
            self._build(lambda key: key not in ("data", "trainer"))
        self.datamodule = data
        for part in (self.model, *([data] if data else [])):
            part.trainer = self.trainer

    def _build(self, wanted: Callable[[str], bool]) -> "PlanCLI":
        """Build what the configuration says under some of its keys."""
        self.config = self.parsed.clone()
        for key in [key for key in vars(self.config) if not wanted(key)]:
            del self.config[key]
        try:
            super().instantiate_classes()
        finally:
            self.config = self.parsed
        return self

    def instantiate_trainer(self, **_: Any) -> Trainer:
        """A Trainer of so many ranks, for code that asks how many there are; it starts nothing."""
        if self.ranks is None:
            given = {name: self.settings.get(name) for name in _FOLLOWED}
            with _less_said("lightning.pytorch.utilities.rank_zero"):  # which devices it found here
                self.ranks = Trainer(
                    accelerator="cpu",
                    devices=self.devices // self.nodes,
                    num_nodes=self.nodes,
                    strategy="ddp",
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                    **{name: value for name, value in given.items() if value is not None},
                )
        return self.ranks


@contextmanager
def _less_said(name: str) -> Iterator[None]:
    """Let a logger only warn for a while."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)

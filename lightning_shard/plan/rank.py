"""The simulated rank: a Trainer with the real strategy, and a callback that looks on. For a process of its own."""

import io
import logging
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy, StrategyRegistry
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard._compat.dry_run import FakeTensorMode, attached_trainer, fake_mode
from lightning_shard._compat.simulating import join_fake_group, on_real_tensors
from lightning_shard.pipeline.absent import is_absent
from lightning_shard.plan.alone import Alone, Repeated, convert, quieten, wait_for_nobody
from lightning_shard.plan.ledger import Ledger, peak
from lightning_shard.plan.repeats import shorten
from lightning_shard.plan.results import Memory
from lightning_shard.plan.simulate import SINGLE, Simulation, SimulationOptions
from lightning_shard.plan.workspaces import Workspaces
from lightning_shard.telemetry.allocator import track_allocator
from lightning_shard.telemetry.fsdp_memory import is_counted
from lightning_shard.telemetry.traffic import Traffic
from lightning_shard.units.dry_copy import DryCopier
from lightning_shard.units.shard import recompute_activations
from lightning_shard.zero.optimizers import check_elementwise

_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
"""Precisions to which a module is converted."""


class _Done(Exception):
    """The steps are over."""


class Onlooker(pl.Callback):
    """Enters the world without data when process groups are made; ends the run after the second optimizer step.

    Args:
        mode: That world.
        ledger: Keeps book of the second step.
        options: Of the simulation.
        batch: The batch of every step.
        stack: Closes what is entered.

    """

    def __init__(
        self, mode: FakeTensorMode, ledger: Ledger, options: SimulationOptions, batch: Any, stack: ExitStack
    ) -> None:
        self._mode, self._ledger, self._options, self._batch, self._stack = mode, ledger, options, batch, stack
        self._first = 0 if options.reached is not None else options.accumulate_grad_batches
        self._before: Traffic | None = None
        self.held = Memory()
        self.reached: frozenset[str] = frozenset()
        self.engine_refusal = ""
        self.states_made = True
        self.traffic: Traffic | None = None

    @override
    def setup(self, trainer: "pl.Trainer", module: "pl.LightningModule", stage: str) -> None:
        self._stack.enter_context(self._mode)  # later than the process groups, whose making needs real numbers

    @override
    def on_train_start(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        # Later than the strategy's setup, where it looks at steps without running them.
        self._stack.enter_context(self._ledger)
        for optimizer in trainer.optimizers if self._options.like_cuda else ():
            _take_lists(optimizer)
        if self._options.strategy == SINGLE:
            self.engine_refusal = _engine_refusal(trainer.optimizers)
        if self._options.reached is not None:
            try:
                _make_states(trainer.optimizers, module, self._options.reached)
            except Exception:
                if not self._options.states_only:
                    raise
                self.states_made = False
        self._declare(trainer, module)
        if self._options.states_only:
            self.traffic = self._ledger.traffic
            raise _Done
        if self._options.repeats is not None:
            _mark_blocks(module, self._options.repeats.names[: self._options.blocks], self._ledger)

    @override
    def on_train_batch_start(self, trainer: "pl.Trainer", module: "pl.LightningModule", batch: Any, idx: int) -> None:
        if idx == self._first:
            self._declare(trainer, module)
            self._ledger.begin_step()
            self._before = self._ledger.traffic
        self._ledger.mark("before")

    @override
    def on_before_zero_grad(self, trainer: "pl.Trainer", module: "pl.LightningModule", optimizer: Any) -> None:
        self._ledger.optimizing = False  # a manual step may go on after an optimizer's
        self._ledger.mark("zero")

    @override
    def on_before_backward(self, trainer: "pl.Trainer", module: "pl.LightningModule", loss: Tensor) -> None:
        self._ledger.optimizing = False
        self._ledger.mark("loss")

    @override
    def on_before_optimizer_step(self, trainer: "pl.Trainer", module: "pl.LightningModule", optimizer: Any) -> None:
        with torch.no_grad():
            self._ledger.declare([p.grad for p in module.parameters() if p.grad is not None], "gradients")
        self.held = self._ledger.held()
        self.reached = frozenset(name for name, p in module.named_parameters() if p.grad is not None)
        self._ledger.mark("optimizer")
        self._ledger.optimizing = True

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", module: "pl.LightningModule", outputs: Any, batch: Any, idx: int
    ) -> None:
        self._ledger.optimizing = False
        if idx + 1 == self._first + self._options.accumulate_grad_batches:
            assert self._before is not None
            self.traffic = self._ledger.traffic - self._before
            raise _Done

    def _declare(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        with torch.no_grad():
            self._ledger.declare(module.parameters(), "parameters")
            self._ledger.declare([p.grad for p in module.parameters() if p.grad is not None], "gradients")
            self._ledger.declare(module.buffers(), "buffers")
            self._ledger.declare([self._batch], "buffers")
            for optimizer in trainer.optimizers:
                self._ledger.declare([list(state.values()) for state in optimizer.state.values()], "optimizer")


def run_rank(module: "pl.LightningModule", batch: Any, options: SimulationOptions) -> Simulation:
    """Be the rank. The process is of no other use afterwards."""
    began = time.monotonic()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    mode = fake_mode()
    attached = attached_trainer(module)
    copier = DryCopier(mode, torch.device("cpu"), [] if attached is None else [(attached, None)])
    clone, fake_batch = copier(module), copier(batch)
    del copier  # it would keep the parameters that the strategy replaces
    quieten(clone)
    wait_for_nobody()
    for name in options.checkpointed:
        recompute_activations(clone.get_submodule(name))
    # Of a module that no strategy changes; an optimizer that was made before has those of left out blocks, too.
    its_own = {id(parameter): parameter for parameter in clone.parameters()} if options.strategy == SINGLE else {}
    if options.repeats is not None:
        shorten(clone, options.repeats, options.blocks)
    if options.strategy != SINGLE:
        join_fake_group(options.rank, options.world_size)
    with ExitStack() as stack:
        workspaces = None
        if not options.like_cuda:
            with suppress(RuntimeError):  # who profiles memory already goes without
                workspaces = Workspaces(stack.enter_context(track_allocator()))
        ledger = Ledger(512 if options.like_cuda else 1, workspaces)
        stack.enter_context(redirect_stdout(io.StringIO()))
        onlooker = Onlooker(mode, ledger, options, fake_batch, stack)
        trainer = _trainer(options, onlooker)
        with suppress(_Done):
            trainer.fit(clone, Repeated(fake_batch, 2 * options.accumulate_grad_batches))
        assert onlooker.traffic is not None
        moments = ledger.moments()
        peaks = {segment: peak(found) for segment, found in moments.items()}
        names = {id(parameter): name for name, parameter in clone.named_parameters()}
        groups = [group["params"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return Simulation(
        peak=max(peaks.values(), key=lambda memory: memory.total),
        segments=peaks,
        moments=moments if options.repeats is not None or options.strategy == SINGLE else {},
        held=onlooker.held,
        payload_elements=onlooker.traffic.payload,
        sent_elements=onlooker.traffic.sent,
        optimizer_bytes=_optimizer_bytes(trainer.optimizers, names),
        optimizer_groups=tuple(tuple(names[id(p)] for p in group if id(p) in names) for group in groups),
        reached=onlooker.reached,
        engine_refusal=onlooker.engine_refusal,
        # An optimizer of other tensors than the copy's parameters tells nothing of them.
        states_made=onlooker.states_made and all(id(p) in names or id(p) in its_own for group in groups for p in group),
        optimizers=tuple(type(optimizer).__name__ for optimizer in trainer.optimizers),
        seconds=time.monotonic() - began,
    )


def _trainer(options: SimulationOptions, onlooker: Onlooker) -> "pl.Trainer":
    single = options.strategy == SINGLE
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if single else options.world_size,
        strategy=_strategy(options),
        plugins=[] if single else [Alone(options.rank, options.world_size)],
        callbacks=[onlooker],
        precision=options.precision,  # type: ignore[arg-type]
        gradient_clip_val=options.gradient_clip_val,
        accumulate_grad_batches=options.accumulate_grad_batches,
        max_epochs=1,  # as long as the loader is
        logger=DummyLogger(),  # a step may log to it
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    if (dtype := _DTYPES.get(options.precision)) is not None:
        vars(trainer.strategy.precision_plugin).update(convert_module=lambda module: convert(module, dtype))
    # Tensors without data cannot move, and are where they should be; and there are no other ranks to take leave of.
    vars(trainer.strategy).update(on_exception=lambda error: None, teardown=lambda: None)
    if single:
        vars(trainer.strategy).update(model_to_device=lambda: None)
    return trainer


def _strategy(options: SimulationOptions) -> Strategy:
    if options.strategy == SINGLE:
        return SingleDeviceStrategy(device="cpu")
    entry = StrategyRegistry[options.strategy]
    made: Strategy = entry["strategy"](**{**entry["init_params"], **options.settings})
    return made


def _optimizer_bytes(optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> dict[str, int]:
    kept = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if id(parameter) in names:
                counted = [value for name, value in state.items() if is_counted(name, value, parameter)]
                kept[names[id(parameter)]] = sum(value.numel() * value.element_size() for value in counted)
    return kept


def _engine_refusal(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Why DeepSpeed's engine would not take the optimizers, or nothing."""
    try:
        with on_real_tensors():
            for optimizer in optimizers:
                check_elementwise(optimizer, torch.device("cpu"))
    except MisconfigurationException as refusal:
        return str(refusal)
    return ""


def _make_states(optimizers: Sequence[torch.optim.Optimizer], module: nn.Module, reached: frozenset[str]) -> None:
    """Let optimizers step once on gradients without data, which then lie there as they do after any step."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if names.get(id(parameter)) in reached and not is_absent(parameter):
                    parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


def _take_lists(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer work on lists of tensors, which is torch's choice on a GPU and not on a CPU."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _mark_blocks(module: nn.Module, names: Sequence[str], ledger: Ledger) -> None:
    """Let the ledger know where each block's forward and backward begin and end."""

    def begin_backward(number: int, value: Any) -> None:
        for tensor in [value] if isinstance(value, Tensor) else value if isinstance(value, tuple | list) else ():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: ledger.mark(f"backward {number}"))  # type: ignore[no-untyped-call]
                return

    for number, name in enumerate(names):

        def entering(*_: Any, number: int = number) -> None:
            ledger.mark(f"forward {number}")

        def leaving(_: Any, __: Any, output: Any, number: int = number) -> None:
            if number == len(names) - 1:
                ledger.mark("head")
            begin_backward(number, output)

        block = module.get_submodule(name)
        block.register_forward_pre_hook(entering, prepend=True)
        block.register_forward_hook(leaving)

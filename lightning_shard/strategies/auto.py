"""The planner chooses: a strategy that becomes another one before `configure_model` runs."""

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_shard._compat.auto import AFTER_SETUP, loaders_left_alone, replace_strategy, train_loader
from lightning_shard._compat.groups import groups_hidden
from lightning_shard.checkpoint.together import everyones, from_first, together
from lightning_shard.failing import fails_alone
from lightning_shard.plan import hardware
from lightning_shard.plan.deciding import Decision, decide
from lightning_shard.plan.hardware import Device
from lightning_shard.plan.here import device_here
from lightning_shard.plan.layers import with_forward_as_step, with_layers
from lightning_shard.registry import nearest_name
from lightning_shard.strategies.candidates import CHOICES, Surroundings, find_candidates, make_strategy
from lightning_shard.units.dry_copy import cuda_in_use
from lightning_shard.units.peek import NO_BATCH, peek_batch

PATIENCE = timedelta(hours=2)
"""How long ranks wait for the one that plans, whatever the timeout of their other collectives."""


class AutoShardStrategy(DDPStrategy):
    """Lets the planner choose among ``ddp`` and the strategies of this package, and becomes the one that it chooses.

    What fits the devices' memory, the least invasive first, by the memory of *training* in whatever the Trainer is
    asked to do first. The choice falls once in the life of a Trainer, on rank 0 and for all ranks, after the `setup`
    hooks and before `configure_model`. From then on ``trainer.strategy`` is the chosen strategy itself. Until then, in
    `prepare_data` and `setup`, it is this one, which can do what ``ddp`` can between ranks.

    Args:
        device: What to plan for, by its name in the hardware table. Default: the GPU that is found, or the CPU with
            this machine's memory divided by the ranks on it.
        memory: What each device has, such as ``"2GB"``, or a number of bytes. Default: what it has in truth.
        margin: Share of that memory to leave free.
        simulate: How many of the best strategies are simulated, beyond closed forms.
        strategies: Names to choose among. Default: all but ``zero3_nvme``.
        process_group_backend: ``"gloo"``, ``"nccl"``, ... Default: the one for the device.
        timeout: How long a collective may take.

    Raises:
        MisconfigurationException: If an argument is impossible.

    """

    strategy_name = "auto_shard"

    def __init__(
        self,
        device: str | None = None,
        memory: str | float | None = None,
        margin: float = 0.1,
        simulate: int = 3,
        strategies: list[str] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        self._memory = _check_arguments(device, memory, margin, simulate, strategies)
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._device, self._margin, self._simulate, self._strategies = device, margin, simulate, strategies
        self._asked_backend = process_group_backend

    # --- until the choice ---

    @override
    def setup_environment(self) -> None:
        if self.root_device.type not in ("cpu", "cuda"):
            raise MisconfigurationException(
                f"strategy='auto_shard' chooses for CPU and CUDA devices, not for {self.root_device.type!r}."
            )
        super().setup_environment()

    @override
    def _get_process_group_backend(self) -> str:
        # Hooks may use the process group before the choice, and groups made of it outlive it: the chosen strategy finds
        # it initialised and keeps it. So it must be what each of them would make: with a way for tensors on the CPU
        # beside nccl, as pipelines and offloading FSDP2 need it; the others do not mind.
        backend = super()._get_process_group_backend()
        return f"cpu:gloo,cuda:{backend}" if self.root_device.type == "cuda" and ":" not in backend else backend

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if fails_alone(self.lightning_module):
            return
        super().barrier(*args, **kwargs)
        if AFTER_SETUP in (*args, *kwargs.values()):
            self._become_the_best()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.world_size > 1:
            exception.add_note(f"(raised on rank {self.global_rank} of {self.world_size})")

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        raise RuntimeError(
            f"strategy='auto_shard' has not been asked at the barrier {AFTER_SETUP!r}: this version of Lightning starts"
            " runs otherwise than the versions that this package knows. Name a strategy."
        )

    @override
    def teardown(self) -> None:
        # Nothing was moved to a device, and a refused module on the meta device could not be moved back from one.
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # --- the choice ---

    def _become_the_best(self) -> None:
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        decision = self._decide(trainer, module)
        rank_zero_info(decision.text)
        chosen = make_strategy(decision.name, decision.settings, self._asked_backend, self._timeout)
        replace_strategy(trainer, chosen)
        self._lightning_module = self.model = None
        chosen.connect(module)
        # It seeds anew, as every strategy does there; but here `setup` hooks have drawn random numbers already.
        with isolate_rng(include_cuda=cuda_in_use()):
            chosen.setup_environment()

    def _decide(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> Decision:
        """The same decision, or refusal, on every rank. Collective."""

        def look() -> tuple[Device, pl.LightningModule, Any, str]:
            here = device_here(self._device, self._memory, self.root_device, self.num_processes)
            batch, note = _first_batch(trainer, module)
            return here, with_layers(module, self.precision_plugin), batch, note

        # User code runs on all ranks, as it may expect; one plans, since ranks share cores and memory.
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        here, planned, batch, note = together("Looking at the module and its data for auto_shard", look, group)
        smallest = min(everyones(here, group), key=lambda each: each.memory_bytes)

        def plan() -> Decision | MisconfigurationException | None:
            if not self.is_global_zero:
                return None
            try:
                # Nothing that is asked of the module or the Trainer must wait for ranks that wait for this one.
                with groups_hidden(), loaders_left_alone(trainer), isolate_rng(include_cuda=cuda_in_use()):
                    return self._plan(trainer, planned, batch, smallest, note)
            except MisconfigurationException as refusal:
                return refusal

        outcome = from_first(together("Planning for auto_shard", plan, group), group)
        dist.destroy_process_group(group)
        if isinstance(outcome, MisconfigurationException):
            raise outcome
        assert isinstance(outcome, Decision)
        return outcome

    def _plan(
        self, trainer: "pl.Trainer", module: "pl.LightningModule", batch: Any, device: Device, note: str
    ) -> Decision:
        from lightning_shard.plan import search

        around = Surroundings(
            devices=self.world_size, device=self.root_device, host_is_apart=self._host_is_apart(device)
        )
        candidates = find_candidates(trainer, module, self._strategies, around)
        if not candidates.names:
            reasons = "\n".join(f"  {name}: {reason}" for name, reason in candidates.excluded.items())
            raise MisconfigurationException(f"There is no strategy that this run could use:\n{reasons}")
        if batch is None and module.example_input_array is not None:
            module, batch = with_forward_as_step(module), module.example_input_array
        plan = search.plan_module(
            module,
            batch,
            devices=self.world_size,
            nodes=self.num_nodes,
            device=device,
            precision=str(self.precision_plugin.precision),
            simulate=self._simulate,
            margin=self._margin,
            strategies=candidates.names,
            gradient_clip_val=trainer.gradient_clip_val,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
        )
        return decide(plan, margin=self._margin, excluded=candidates.excluded, notes=(note,) if note else ())

    def _host_is_apart(self, device: Device) -> bool:
        return self._memory is not None or device.name != "cpu"

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: `lightning_shard.registry` holds the names."""


def _first_batch(trainer: "pl.Trainer", module: "pl.LightningModule") -> tuple[Any, str]:
    """A batch of training, or ``None``, and what to say of it."""
    fits = trainer.state.fn == TrainerFn.FITTING
    batch: Any = NO_BATCH
    if fits:
        with isolate_rng(include_cuda=cuda_in_use()):
            loader = train_loader(trainer)
        batch = peek_batch(loader)
    if batch is not NO_BATCH:
        return trainer.precision_plugin.convert_input(batch), ""
    why = (
        "the train loader gives no batch without drawing it (it can only be iterated, is empty, or fails here)"
        if fits
        else f"this run has no train loader ({trainer.state.fn and trainer.state.fn.value})"
    )
    if module.example_input_array is not None:
        return None, f"Note: {why}: activations are those of the module's example_input_array."
    return None, (
        f"Note: {why}, and the module has no example_input_array: only model states are counted, and activations come"
        " on top. Raise the margin if they are large."
    )


def _check_arguments(device: Any, memory: Any, margin: Any, simulate: Any, strategies: Any) -> float | None:
    """Refuse arguments that are impossible by themselves.

    Returns:
        The memory in bytes, if it was given.

    Raises:
        MisconfigurationException: Naming the argument, its value and what it may be.

    """
    try:
        if device is not None:
            hardware.device(device)
    except (ValueError, AttributeError) as error:
        raise MisconfigurationException(f"AutoShardStrategy(device={device!r}): {error}") from error
    try:
        limit = None if memory is None else hardware.parse_bytes(memory)
    except ValueError as error:
        raise MisconfigurationException(f"AutoShardStrategy(memory={memory!r}): {error}") from error
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < 1 or math.isnan(margin):
        raise MisconfigurationException(f"AutoShardStrategy(margin={margin!r}): a share of the memory, in [0, 1).")
    if isinstance(simulate, bool) or not isinstance(simulate, int) or simulate < 0:
        raise MisconfigurationException(
            f"AutoShardStrategy(simulate={simulate!r}): a whole number of strategies, 0 or more."
        )
    _check_names(strategies)
    return limit


def _check_names(strategies: Any) -> None:
    if strategies is None:
        return
    if not isinstance(strategies, Sequence) or isinstance(strategies, str) or not strategies:
        raise MisconfigurationException(
            f"AutoShardStrategy(strategies={strategies!r}): a list of names to choose among, or None for all."
        )
    for name in strategies:
        if name not in CHOICES:
            near = nearest_name(str(name))
            hint = f" Did you mean {near!r}?" if near in CHOICES else ""
            raise MisconfigurationException(
                f"AutoShardStrategy(strategies=[...]): {name!r} cannot be chosen.{hint} There are {', '.join(CHOICES)}."
            )
    if len(set(strategies)) < len(strategies):
        raise MisconfigurationException(f"AutoShardStrategy(strategies={strategies!r}): a name stands there twice.")

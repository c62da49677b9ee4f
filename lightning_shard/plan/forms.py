"""Every strategy and its degrees for so many devices: stages, microbatches, replicas, checkpointing, offload."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.pipeline.microbatch import split_batch
from lightning_shard.pipeline.schedule import SCHEDULES, ScheduleName, why_impossible
from lightning_shard.plan.costs import Cost, divisors
from lightning_shard.plan.partitioned import partitioned_cost
from lightning_shard.plan.precision import refusal
from lightning_shard.plan.profile import TWO, ModuleProfile
from lightning_shard.plan.replicated import replicated_cost
from lightning_shard.plan.sharded import sharded_cost
from lightning_shard.plan.simulate import SINGLE, Simulation, SimulationFailed, SimulationOptions, simulate_each
from lightning_shard.plan.staged import staged_cost
from lightning_shard.registry import FSDP2, NAMES, PIPELINE, ZERO

DDP = "ddp"

_MOST_STAGES = 64
"""Stages of a pipeline that are looked at: torch writes schedules out, in time that grows with their square."""


class LeftOut(Exception):
    """A strategy cannot be had; the message says why."""


@dataclass(kw_only=True)
class Forms:
    """Closed forms of all strategies for one module and one set of devices."""

    profile: ModuleProfile
    """Of the module."""

    options: SimulationOptions
    """Of the run; the strategy is ignored."""

    devices: int
    """Ranks."""

    nodes: int
    """Machines."""

    cuda: bool
    """Whether devices have streams."""

    left_out: dict[str, str] = field(default_factory=dict)
    """Names that could not be had, and why."""

    failed: dict[str, str] = field(default_factory=dict)
    """Names whose simulation failed, and why."""

    _known: dict[str, Simulation | None] = field(default_factory=dict)
    _half: Simulation | None = None
    _half_share: float = 0.5

    def costs(self, names: Sequence[str]) -> list[Cost]:
        """What the named strategies cost, each in all its degrees."""
        self._simulate_on_two(names)
        found: list[Cost] = []
        for name in names:
            try:
                found.extend(self._of(name))
            except (LeftOut, MisconfigurationException) as error:
                self.left_out[name] = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        return found

    def _of(self, name: str) -> Iterator[Cost]:
        precision = self.options.precision
        if reason := refusal(name, precision):
            raise LeftOut(reason)
        family = DDP if name == DDP else NAMES[name].strategy
        if family in (ZERO, PIPELINE) and len(self.profile.optimizers) > 1:
            raise LeftOut(f"the module has {len(self.profile.optimizers)} optimizers, and it trains with one")
        refused = self.profile.tried.engine_refusal if self.profile.tried is not None else ""
        if family == ZERO and refused:
            raise LeftOut(refused)
        if family in (FSDP2, PIPELINE) and "LBFGS" in self.profile.optimizers:
            raise LeftOut("LBFGS evaluates the loss several times in a step, over all parameters together")
        if family == DDP:
            yield replicated_cost(self.profile, precision, self.devices, self.options.accumulate_grad_batches)
        elif family == ZERO:
            yield self._partitioned(name)
        elif family == FSDP2:
            yield from self._sharded(name)
        else:
            yield from self._staged(NAMES[name].settings["schedule"])

    # --- storage divided ---

    def _partitioned(self, name: str) -> Cost:
        settings = NAMES[name].settings
        return partitioned_cost(
            self.profile,
            self._known.get("computed") or self.profile.single,
            self.options.precision,
            name=name,
            stage=settings["stage"],
            offload=settings.get("offload"),
            devices=self.devices,
            cuda=self.cuda,
            accumulate=self.options.accumulate_grad_batches,
        )

    def _sharded(self, name: str) -> Iterator[Cost]:
        settings = NAMES[name].settings
        replicas = int(settings.get("replicas", 1))
        changed: dict[str, Any] = {}
        keeps = settings.get("reshard_after_forward", True) is False
        if (refused := self.refusal("fsdp2_grad" if keeps else "fsdp2")) is not None:
            raise LeftOut(refused)
        if replicas > 1 and self.nodes > 1:
            replicas = changed["replicas"] = self.nodes  # gathers stay inside a node
        if self.devices % replicas or (self.devices == replicas and replicas > 1):
            raise LeftOut(f"{replicas} replicas of several ranks do not come out of {self.devices}")
        for checkpointed in (False, True) if self.profile.units else (False,):
            yield sharded_cost(
                self.profile,
                self._known.get(_on_two(name, checkpointed)),
                self.options.precision,
                name=name,
                settings={**changed, **({"activation_checkpointing": True} if checkpointed else {})},
                devices=self.devices,
                replicas=replicas,
                keeps=keeps,
                offload=bool(settings.get("cpu_offload")),
                accumulate=self.options.accumulate_grad_batches,
            )

    def _simulate_on_two(self, names: Sequence[str]) -> None:
        """Run what closed forms start from: a step in the engine's precision, and FSDP2 on two ranks."""
        profile = self.profile
        if profile.single is None:
            return
        wanted: dict[str, SimulationOptions] = {}
        if self.options.precision == "bf16-mixed" and any(name.startswith("zero") for name in names):
            # The engine computes in bf16 throughout: no copies of fp32 weights are kept for backward.
            wanted["computed"] = self._option(SINGLE, {}, 1, precision="bf16-true")
        for name in names:
            if name != DDP and NAMES[name].strategy == FSDP2 and not refusal(name, self.options.precision):
                keeps = NAMES[name].settings.get("reshard_after_forward", True) is False
                for checkpointed in (False, True) if profile.units else (False,):
                    settings = {"activation_checkpointing": True} if checkpointed else {}
                    wanted[_on_two(name, checkpointed)] = self._option(
                        "fsdp2_grad" if keeps else "fsdp2", settings, TWO
                    )
        for key, found in zip(wanted, self.simulate(list(wanted.values())), strict=True):
            self._known[key] = found
        if profile.rows is not None and profile.rows > 1 and any(name.startswith("pipeline") for name in names):
            half, *_ = split_batch(profile.batch, 2)
            (self._half,) = self.simulate([self._option(SINGLE, {}, 1)], half.batch)
            self._half_share = half.rows / profile.rows

    def _option(self, strategy: str, settings: dict[str, Any], ranks: int, **more: Any) -> SimulationOptions:
        return replace(
            self.options, strategy=strategy, settings=settings, world_size=ranks, repeats=self.profile.repeats, **more
        )

    @property
    def _fixed_bytes(self) -> float:
        """What a forward keeps whatever its rows, by two batches: low-precision copies of weights."""
        if self._half is None:
            return 0.0
        less = max(memory.activations for memory in self._half.segments.values())
        slope = (self.profile.saved_bytes - less) / (1 - self._half_share)
        return max(0.0, self.profile.saved_bytes - slope)

    def simulate(self, wanted: Sequence[SimulationOptions], batch: Any = None) -> list[Simulation | None]:
        """Simulate, on the profile's batch or on another.

        What fails with few blocks is tried with all of them; where that fails, too, the answer is ``None``.
        """
        distinct = list(dict.fromkeys(map(_key, wanted)))
        options = {_key(each): each for each in wanted}
        found: dict[Any, Simulation | None] = {}
        batch = self.profile.batch if batch is None else batch
        first = simulate_each(self.profile.module, batch, [options[key] for key in distinct])
        for key, answer in zip(distinct, first, strict=True):
            if isinstance(answer, SimulationFailed) and options[key].repeats is not None:
                whole = replace(options[key], repeats=None)
                (answer,) = simulate_each(self.profile.module, batch, [whole])
            if isinstance(answer, SimulationFailed):
                self._note(options[key].strategy, answer)
            found[key] = None if isinstance(answer, SimulationFailed) else answer
        return [found[_key(each)] for each in wanted]

    def refusal(self, strategy: str) -> str | None:
        """What a strategy said when its simulation showed that it would refuse the module in a run, too."""
        kind, _, reason = self.failed.get(strategy, "").partition(": ")
        return reason if kind == "MisconfigurationException" else None

    def _note(self, strategy: str, failure: SimulationFailed) -> None:
        if strategy != SINGLE:
            self.failed.setdefault(strategy, (str(failure).strip().splitlines() or [""])[0].rstrip("."))

    # --- computation divided ---

    def _staged(self, schedule: ScheduleName) -> Iterator[Cost]:
        profile = self.profile
        if profile.stages is None:
            raise LeftOut("its stages cannot be told without a batch, and a step that runs without data")
        if profile.rows is None or profile.rows < 2:
            raise LeftOut(f"it splits a batch into microbatches, and this one has {profile.rows or 'no'} rows to share")
        made = 0
        reason = f"no number of stages divides {self.devices} ranks"
        per = SCHEDULES[schedule].stages_per_rank or 2
        for stages in divisors(self.devices):
            if not 2 <= stages <= _MOST_STAGES:
                continue
            if stages * per > profile.stages.most:
                reason = reason if made else f"the step can be cut into {profile.stages.most} stages at most"
                continue
            microbatches = self._microbatches(schedule, stages, per)
            if microbatches is None:
                reason = f"a batch of {profile.rows} rows has too few for the microbatches of {stages} stages"
                continue
            for checkpointed in (False, True):
                made += 1
                yield staged_cost(
                    profile,
                    self.options.precision,
                    schedule=schedule,
                    stages=stages,
                    microbatches=microbatches,
                    fixed_bytes=self._fixed_bytes,
                    devices=self.devices,
                    checkpointed=checkpointed,
                    accumulate=self.options.accumulate_grad_batches,
                )
        if not made:
            raise LeftOut(reason)

    def _microbatches(self, schedule: ScheduleName, stages: int, per: int) -> int | None:
        """Twice the stages, or as many as the batch has rows for."""
        assert self.profile.rows is not None
        possible: Callable[[int], bool] = lambda m: why_impossible(schedule, stages, per, m) is None  # noqa: E731
        tried = range(min(2 * stages * (per if schedule == "dualpipev" else 1), self.profile.rows), 0, -1)
        return next((microbatches for microbatches in tried if possible(microbatches)), None)


def _on_two(name: str, checkpointed: bool) -> str:
    return f"{name} {checkpointed}"


def _key(options: SimulationOptions) -> Any:
    return (
        options.strategy,
        tuple(sorted(options.settings.items(), key=lambda item: item[0])),
        options.world_size,
        options.rank,
        options.precision,
        options.repeats is None,
    )

"""The search: what every strategy costs for a module on so many devices, which fit, and which to take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import lightning.pytorch as pl

from lightning_shard.plan.checking import whole_number
from lightning_shard.plan.choice import choose, invasiveness
from lightning_shard.plan.costs import Cost, total_payload, total_sent
from lightning_shard.plan.forms import DDP, Forms
from lightning_shard.plan.hardware import Device
from lightning_shard.plan.hardware import device as device_named
from lightning_shard.plan.precision import check_precision, unified
from lightning_shard.plan.profile import ModuleProfile, profile_module
from lightning_shard.plan.results import Memory, Plan, StrategyPlan
from lightning_shard.plan.roofline import step_time
from lightning_shard.plan.simulate import SINGLE, Simulation, SimulationOptions
from lightning_shard.plan.words import size_in_words
from lightning_shard.registry import AUTO, FSDP2, NAMES, PIPELINE

MARGIN = 0.1
"""Share of a device's memory that is left free: for its context, the communication library's buffers and fragments,
which no formula here knows. Not calibrated on a GPU."""

_ADAM_ELEMENTS = 2
"""Elements per parameter to go on with where the module's own optimizer could not be tried."""

_MORE_ROUNDS = 3
"""How often a choice that its simulation refutes is made anew."""


_FEW_STAGES = 2
"""Stages up to which several ranks of a pipeline are simulated."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A strategy on its way into the plan."""

    cost: Cost
    plan: StrategyPlan

    @property
    def pace(self) -> float:
        """Seconds for a batch's rows."""
        time = self.plan.time
        return time.total / (self.cost.batches * self.cost.replicas) if time is not None else 0.0


def plan_module(
    module: "pl.LightningModule",
    batch: Any = None,
    *,
    devices: int,
    device: Device | str,
    nodes: int = 1,
    precision: str = "32-true",
    simulate: int = 3,
    margin: float = MARGIN,
    strategies: Sequence[str] | None = None,
    gradient_clip_val: float | None = None,
    accumulate_grad_batches: int = 1,
) -> Plan:
    """Tell what each strategy costs for a module on so many devices, which ones fit, and which to take.

    Nothing is trained, no device is used, and the module is not changed: steps run on tensors without data, in
    processes of their own. Closed forms rank all strategies; the best are then simulated with their own code.

    Args:
        module: The module. Its layers may be on the meta device, or still to be made by ``configure_model``.
        batch: What one rank gets for one call of ``training_step``. Without one, only model states are counted.
        devices: Ranks.
        device: What a rank runs on, or its name in the table of devices.
        nodes: Machines that the ranks are in.
        precision: As in ``Trainer(precision=...)``.
        simulate: How many of the best strategies are simulated.
        margin: Share of the device's memory that must stay free, in [0, 1).
        strategies: Names to plan; ``None`` for all.
        gradient_clip_val: As in the Trainer.
        accumulate_grad_batches: As in the Trainer.

    Raises:
        TypeError: If the module is no LightningModule.
        ValueError: If a number or a name makes no sense.
        MisconfigurationException: If the module has no layers, or cannot be copied without data.

    """
    module = getattr(module, "_orig_mod", module)  # of what torch.compile made of it
    if not isinstance(module, pl.LightningModule):
        raise TypeError(f"plan() needs a LightningModule, not a {type(module).__name__}: its training_step is planned.")
    chip = device_named(device) if isinstance(device, str) else device
    precision = unified(precision)
    _check(devices, nodes, precision, simulate, margin, strategies, accumulate_grad_batches)
    options = SimulationOptions(
        strategy=SINGLE,
        world_size=1,
        precision=precision,
        gradient_clip_val=gradient_clip_val,
        accumulate_grad_batches=accumulate_grad_batches,
        like_cuda=chip.name != "cpu",
    )
    profile = profile_module(module, batch, options, _ADAM_ELEMENTS)
    if profile.single is not None:
        options = replace(options, reached=profile.single.reached)
    forms = Forms(profile=profile, options=options, devices=devices, nodes=nodes, cuda=options.like_cuda)
    names = _names(strategies)
    in_node = devices // nodes
    rows = [
        _Row(
            cost=cost, plan=_described(cost, profile, chip, margin, step_time(cost, profile, chip, in_node, precision))
        )
        for cost in forms.costs(names)
    ]
    rows = _simulated(_few(_best(rows)), forms, profile, chip, margin, simulate)
    plans = [row.plan for row in rows]
    notes = [*profile.notes]
    notes += _grouped(forms.left_out, "left out")
    failed = {name: reason for name, reason in forms.failed.items() if name not in forms.left_out}
    notes += _grouped(failed, "planned by its closed form or model states only, as it could not be simulated")
    return Plan(
        parameters=profile.psi,
        devices=devices,
        nodes=nodes,
        device=chip,
        memory_bytes=chip.memory_bytes,
        precision=precision,
        optimizer=", ".join(profile.optimizers) or "assumed: Adam",
        strategies=tuple(plans),
        chosen=choose(plans),
        notes=tuple(notes),
    )


def _grouped(reasons: Mapping[str, str], what: str) -> list[str]:
    """A note for each reason, with all names that have it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [f"{', '.join(of)} {'is' if len(of) == 1 else 'are'} {what}: {why}." for why, of in names.items()]


def _check(
    devices: int,
    nodes: int,
    precision: str,
    simulate: int,
    margin: float,
    strategies: Sequence[str] | None,
    accumulate: int,
) -> None:
    whole_number("devices", devices, most=10**6)
    whole_number("nodes", nodes)
    whole_number("simulate", simulate, least=0)
    whole_number("accumulate_grad_batches", accumulate, most=10**6)
    if devices % nodes:
        raise ValueError(f"devices={devices} must be a multiple of nodes={nodes}: every node has as many.")
    check_precision(precision)
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin} must be a share of the memory, at least 0 and less than 1.")
    known = _names(None)
    for name in strategies or ():
        if name not in known:
            raise ValueError(f"strategies names {name!r}, which cannot be planned. Choose among {', '.join(known)}.")


def _names(strategies: Sequence[str] | None) -> tuple[str, ...]:
    if strategies is not None:
        return tuple(dict.fromkeys(strategies))
    return (DDP, *(name for name, entry in NAMES.items() if entry.strategy != AUTO))


def _described(
    cost: Cost, profile: ModuleProfile, device: Device, margin: float, time: Any, simulated: bool = False
) -> StrategyPlan:
    if cost.memory is not None:
        cost = replace(cost, memory=_whole(cost.memory))
    plan = StrategyPlan(
        name=cost.name,
        settings=cost.settings,
        model_states=cost.model_states,
        host_bytes=cost.host_bytes,
        payload_elements=total_payload(cost.transfers),
        sent_elements=total_sent(cost.transfers),
        flops_fraction=cost.flops_fraction,
        memory=cost.memory,
        time=time,
        rows=None if profile.rows is None else profile.rows * cost.batches * cost.replicas,
        simulated=simulated,
    )
    return _judged(plan, device, margin, step_known=profile.single is not None)


def _whole(memory: Memory) -> Memory:
    """In whole bytes."""
    return Memory(**{each.name: round(getattr(memory, each.name)) for each in fields(Memory)})


def _judged(plan: StrategyPlan, device: Device, margin: float, step_known: bool = True) -> StrategyPlan:
    """The plan with a word on whether it fits, with both numbers.

    Where no step is known, model states alone must do; where other strategies' peaks are known and this one's is not,
    or nothing of the model states is on the device, it cannot be said.
    """
    if plan.memory is None and not plan.device_bytes:
        return replace(plan, fits=None, reason="all model states are off the device; what a step needs is not known")
    usable = device.memory_bytes * (1 - margin)
    spare = usable - plan.device_bytes
    what = "its peak" if plan.memory is not None else "its model states alone need"
    needs = f"{what} {'is ' if plan.memory is not None else ''}{size_in_words(plan.device_bytes)}"
    less = f" ({size_in_words(device.memory_bytes)} less {margin:.0%})" if margin else ""
    end = f"{size_in_words(spare)} to spare" if spare >= 0 else f"{size_in_words(-spare)} too much"
    if plan.memory is None and step_known and spare >= 0:
        return replace(plan, fits=None, reason=f"{needs} of {size_in_words(usable)}{less}; its peak is not known")
    return replace(plan, fits=spare >= 0, reason=f"{needs} of {size_in_words(usable)}{less}: {end}")


def _best(rows: Sequence[_Row]) -> list[_Row]:
    """Those that fit first, each by the time for a row."""

    def order(row: _Row) -> tuple[bool, float, int, int]:
        pace = float(f"{row.pace:.2e}")  # what differs by less is a tie, which the plainer one wins
        return not row.plan.fits, pace, len(row.plan.settings), invasiveness(row.plan.name)

    return sorted(rows, key=order)


def _few(rows: Sequence[_Row]) -> list[_Row]:
    """Of each pipeline's many degrees the fastest and the smallest."""
    smallest: dict[str, _Row] = {}
    fastest: dict[str, _Row] = {}
    for row in rows:
        fastest.setdefault(row.plan.name, row)
        if row.plan.device_bytes < smallest.setdefault(row.plan.name, row).plan.device_bytes:
            smallest[row.plan.name] = row
    kept = {id(row) for row in (*smallest.values(), *fastest.values())}
    return [row for row in rows if id(row) in kept or not row.plan.name.startswith("pipeline")]


def _simulated(
    rows: list[_Row], forms: Forms, profile: ModuleProfile, device: Device, margin: float, simulate: int
) -> list[_Row]:
    """Put simulated peaks in the place of closed forms: for the choice, and for the best besides it."""
    if not simulate or profile.single is None:
        return rows
    for round_ in range(1 + _MORE_ROUNDS):
        wanted = _finalists(rows, simulate if not round_ else 1)
        if not wanted:
            break
        for place, row in zip(wanted, _run(forms, [rows[place] for place in wanted]), strict=True):
            rows[place] = replace(row, plan=_judged(row.plan, device, margin)) if row.plan.simulated else row
        rows = _best(rows)
    return rows


def _finalists(rows: Sequence[_Row], most: int) -> list[int]:
    """Places of the choice and of the best others that are still to be simulated; for ``most=1`` of the choice only."""
    chosen = choose([row.plan for row in rows])
    order = sorted(range(len(rows)), key=lambda place: rows[place].plan is not chosen)
    waiting = [place for place in order if _can_be_simulated(rows[place])]
    if most == 1:
        return [place for place in waiting if rows[place].plan is chosen]
    return waiting[:most]


def _can_be_simulated(row: _Row) -> bool:
    if row.plan.simulated or row.plan.memory is None or row.plan.name == DDP:
        return False
    return NAMES[row.plan.name].strategy in (FSDP2, PIPELINE)


def _run(forms: Forms, rows: Sequence[_Row]) -> list[_Row]:
    """The rows with what simulations tell; unchanged where a simulation fails."""
    wanted = [_options(forms, row, rank) for row in rows for rank in _ranks(row, forms.devices)]
    found = iter(forms.simulate(wanted))
    done = []
    for row in rows:
        answers = [next(found) for _ in _ranks(row, forms.devices)]
        known = [answer for answer in answers if answer is not None]
        if len(known) < len(answers):
            done.append(row if (refused := forms.refusal(row.plan.name)) is None else _refused(row, refused))
        else:
            done.append(replace(row, plan=_with(row, max(known, key=lambda answer: answer.peak.total))))
    return done


def _refused(row: _Row, reason: str) -> _Row:
    return replace(row, plan=replace(row.plan, fits=None, reason=f"it refuses this module: {reason}"))


def _with(row: _Row, simulation: Simulation) -> StrategyPlan:
    peak = simulation.peak
    if row.plan.host_bytes:  # the simulated device is the host, where the states are, and the optimizer steps
        on_device = [memory for segment, memory in simulation.segments.items() if segment != "optimizer"]
        peak = max(
            (replace(memory, parameters=0, gradients=0, optimizer=0) for memory in on_device),
            key=lambda memory: memory.total,
        )
    return replace(row.plan, memory=_whole(peak), simulated=True)


def _ranks(row: _Row, devices: int) -> list[int]:
    """The ranks to simulate: of equal shards the first, of stages the one that needs most, of few both ends, too."""
    if NAMES[row.plan.name].strategy == FSDP2:
        return [0]
    stages = int(row.plan.settings.get("stages", devices))
    width = devices // stages
    ends = {0, (stages - 1) * width} if stages <= _FEW_STAGES else set()
    return sorted({row.cost.worst * width, *ends})


def _options(forms: Forms, row: _Row, rank: int) -> SimulationOptions:
    sharded = NAMES[row.plan.name].strategy == FSDP2
    return replace(
        forms.options,
        strategy=row.plan.name,
        settings=row.plan.settings,
        world_size=forms.devices,
        rank=rank,
        repeats=forms.profile.repeats if sharded else None,
    )

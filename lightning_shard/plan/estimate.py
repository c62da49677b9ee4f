"""What every strategy costs for a number of parameters, without a module: the arithmetic table."""

from dataclasses import dataclass, replace

from lightning_shard.plan.arithmetic import Stage, model_states, sent_elements
from lightning_shard.plan.checking import parameter_count, whole_number
from lightning_shard.plan.choice import choose, invasiveness
from lightning_shard.plan.hardware import Device, parse_bytes
from lightning_shard.plan.hardware import device as device_named
from lightning_shard.plan.precision import (
    COMPUTED,
    Engine,
    bytes_per_parameter,
    check_precision,
    elements_of_optimizer,
    refusal,
    unified,
)
from lightning_shard.plan.results import Plan, StrategyPlan
from lightning_shard.plan.schedules import plan_schedules
from lightning_shard.plan.words import size_in_words


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a strategy divides and places the model states."""

    name: str
    """Its registered name, or ``ddp``."""

    engine: Engine
    """Who trains."""

    stage: Stage
    """What is partitioned."""

    off_device: tuple[str, ...] = ()
    """Model states that lie in host memory or on NVMe."""

    keeps_gathered: bool = False
    """Whether parameters are whole on every rank from forward to backward."""

    replicas: int = 1
    """Groups of ranks that share the model states each."""


_OPTIMIZER = ("gradients", "master", "optimizer")
_ALL = ("parameters", *_OPTIMIZER)

FORMS = (
    Form(name="ddp", engine="torch", stage=0),
    Form(name="zero1", engine="deepspeed", stage=1),
    Form(name="zero2", engine="deepspeed", stage=2),
    Form(name="zero3", engine="deepspeed", stage=3),
    Form(name="zero1_offload", engine="deepspeed", stage=1, off_device=_OPTIMIZER),
    Form(name="zero2_offload", engine="deepspeed", stage=2, off_device=_OPTIMIZER),
    Form(name="zero3_offload", engine="deepspeed", stage=3, off_device=_OPTIMIZER),
    Form(name="zero3_offload_params", engine="deepspeed", stage=3, off_device=_ALL),
    Form(name="zero3_nvme", engine="deepspeed", stage=3, off_device=_ALL),
    Form(name="fsdp2", engine="torch", stage=3),
    Form(name="fsdp2_grad", engine="torch", stage=3, keeps_gathered=True),
    Form(name="fsdp2_hybrid", engine="torch", stage=3, replicas=2),
    Form(name="fsdp2_offload", engine="torch", stage=3, off_device=_ALL),
)
"""The strategies that divide storage only."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    trained: int
    frozen: int
    devices: int
    memory: float | None
    precision: str
    elements: int
    accumulate: int


def plan_parameters(
    parameters: float,
    *,
    devices: int,
    nodes: int = 1,
    device: Device | str | None = None,
    memory_bytes: float | str | None = None,
    precision: str = "bf16-mixed",
    optimizer: str = "adam",
    stages: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int = 2,
    frozen: float = 0,
    accumulate_grad_batches: int = 1,
) -> Plan:
    """Plan for a number of parameters alone: model states and traffic, without activations and times.

    Args:
        parameters: Number of parameters, Ψ.
        devices: Ranks, N.
        nodes: Machines that they are in.
        device: What a rank runs on, or its name in the table.
        memory_bytes: Memory of a device in bytes, or like ``"80GB"``; it outweighs that of ``device``.
        precision: As in ``Trainer(precision=...)``.
        optimizer: Its name, like ``"adam"``, ``"sgd"``, ``"sgd-momentum"``.
        stages: Ranks in a pipeline; by default all.
        microbatches: Microbatches in a pipeline's batch; with it the schedules are planned, too.
        stages_per_rank: Stages that a rank runs where the schedule does not fix it.
        frozen: How many of the parameters are not trained.
        accumulate_grad_batches: As in the Trainer; traffic is that of one optimizer step.

    Raises:
        ValueError: If a number or a name makes no sense; with the name and the number.

    """
    total = parameter_count("parameters", parameters)
    still = parameter_count("frozen", frozen, least=0)
    if still >= total:
        raise ValueError(f"frozen={still:,} must be less than parameters={total:,}: something must be trained.")
    whole_number("devices", devices, most=10**6)
    whole_number("nodes", nodes)
    whole_number("accumulate_grad_batches", accumulate_grad_batches, most=10**6)
    if devices % nodes:
        raise ValueError(f"devices={devices} must be a multiple of nodes={nodes}: every node has as many.")
    if stages is not None and (whole_number("stages", stages) > devices or devices % stages):
        raise ValueError(f"stages={stages} must divide devices={devices}: every pipeline has a rank for each stage.")
    precision = unified(precision)
    check_precision(precision)
    chip = device_named(device) if isinstance(device, str) else device
    memory = chip.memory_bytes if chip else None
    if memory_bytes is not None:
        memory = parse_bytes(memory_bytes)
        chip = replace(chip, memory_bytes=memory) if chip else None
    run = _Run(
        trained=total - still,
        frozen=still,
        devices=devices,
        memory=memory,
        precision=precision,
        elements=elements_of_optimizer(optimizer),
        accumulate=accumulate_grad_batches,
    )
    ranks = stages or devices
    schedules = plan_schedules(ranks, microbatches, stages_per_rank) if microbatches is not None and ranks > 1 else ()
    notes = ["Activations, buffers and temporaries are not counted: they depend on the module and its batch."]
    rows: list[StrategyPlan] = []
    for form in FORMS:
        if reason := _impossible(form, devices) or refusal(form.name, precision):
            notes.append(f"{form.name} is left out: {reason}.")
        else:
            rows.append(_storage_row(form, run))
    one_by_one = next((each.reason for each in schedules if each.schedule == "1f1b"), "")
    if reason := one_by_one or refusal("pipeline", precision) or ("one rank is no pipeline" if ranks == 1 else ""):
        notes.append(f"pipeline_1f1b is left out: {reason.rstrip('.')}.")
    else:
        rows.append(_pipeline_row(run, ranks))
        notes.append("pipeline_1f1b: for stages of equal size; what its stages send to each other is not counted.")
    if any(row.host_bytes for row in rows):
        notes.append("Host memory and NVMe are not judged: see what each strategy keeps there.")
    rows.sort(key=lambda row: (row.fits is not True, invasiveness(row.name)))
    return Plan(
        parameters=total,
        devices=devices,
        nodes=nodes,
        device=chip,
        memory_bytes=memory,
        precision=precision,
        optimizer=optimizer,
        strategies=tuple(rows),
        chosen=choose(rows),
        schedules=schedules,
        notes=tuple(notes),
    )


def plan_pipeline(stages: int, microbatches: int, stages_per_rank: int = 2) -> Plan:
    """A plan of schedules alone.

    Args:
        stages: Ranks in a pipeline.
        microbatches: Microbatches in a batch.
        stages_per_rank: Stages that a rank runs where the schedule does not fix it.

    Returns:
        A plan without parameters (0) and strategies.

    Raises:
        ValueError: If a number makes no sense.

    """
    schedules = plan_schedules(stages, microbatches, stages_per_rank)
    return Plan(parameters=0, devices=stages, strategies=(), schedules=schedules)


def _impossible(form: Form, devices: int) -> str:
    if devices % form.replicas:
        return f"its {form.replicas} replicas need a number of ranks that is a multiple of {form.replicas}"
    return ""


def _storage_row(form: Form, run: _Run) -> StrategyPlan:
    ranks = run.devices // form.replicas
    offloaded = bool(form.off_device)
    each = bytes_per_parameter(
        form.engine, run.precision, run.elements, offloaded=offloaded and form.engine == "deepspeed", stage=form.stage
    )
    states = model_states(run.trained, ranks, form.stage, each)
    # An offloaded optimizer takes its share of the gradients as they come, at stage 1, too; FSDP2 that accumulates
    # keeps whole gradients until the batch that steps (docs/fsdp2.md, "Traffic").
    if offloaded and form.stage == 1:
        states = replace(states, gradients=states.gradients / ranks)
    if form.engine == "torch" and form.stage == 3 and run.accumulate > 1:
        states = replace(states, gradients=each.gradients * run.trained)
    still = each.parameters * run.frozen / (ranks if form.stage == 3 else 1)
    states = replace(states, parameters=states.parameters + still)
    gathered = COMPUTED[run.precision] * (run.trained + run.frozen) if form.keeps_gathered else 0
    within, between = _payloads(form, run, ranks)
    row = StrategyPlan(
        name=form.name,
        model_states=states,
        host_bytes=sum(getattr(states, kind) for kind in form.off_device),
        payload_elements=within + between,
        sent_elements=sent_elements(within, ranks) + sent_elements(between, form.replicas),
        flops_fraction=1,
    )
    return _judged(row, run.memory, gathered)


def _payloads(form: Form, run: _Run, ranks: int) -> tuple[float, float]:
    """Payload elements of an optimizer step among the ranks that share the model states, and between replicas.

    Source: ZeRO (Rajbhandari et al. 2020), section 7, for one backward a step and nothing frozen. Accumulating,
    ``ddp``, stage 1 and FSDP2 reduce once a step; stage 2, stage 3 and an offloaded optimizer, which keep no whole
    gradients, after every backward. Parameters that are partitioned are gathered in every forward and, unless kept,
    backward. What is frozen has no gradient, and changes in no step.
    """
    total, steps = run.trained + run.frozen, run.accumulate
    eager = form.engine == "deepspeed" and (form.stage >= 2 or bool(form.off_device))
    reduced = run.trained * (steps if eager else 1)
    match form.stage:
        case 3:
            gathered = total * steps * (1 if form.keeps_gathered else 2)
        case _:  # the second half of the all-reduce, or the new parameters after the step
            gathered = run.trained
    return reduced + gathered, 2 * run.trained / ranks if form.replicas > 1 else 0


def _pipeline_row(run: _Run, stages: int) -> StrategyPlan:
    """A pipeline over so many ranks, in replicas that average their gradients; every stage has as many parameters."""
    each = bytes_per_parameter("torch", run.precision, run.elements)
    states = model_states(run.trained / stages, 1, 0, each)
    replicas = run.devices // stages
    payload = 2 * run.trained / stages if replicas > 1 else 0
    row = StrategyPlan(
        name="pipeline_1f1b",
        settings={"stages": stages} if replicas > 1 else {},
        model_states=replace(states, parameters=states.parameters + each.parameters * run.frozen / stages),
        payload_elements=payload,
        sent_elements=sent_elements(payload, replicas),
        flops_fraction=1 / stages,
    )
    return _judged(row, run.memory, 0)


def _judged(row: StrategyPlan, memory: float | None, gathered: float) -> StrategyPlan:
    """The row with a word on whether its model states leave room on the device."""
    held = row.model_states.total - row.host_bytes
    parts = f"{size_in_words(held)} of model states"
    if gathered:
        parts += f" and {size_in_words(gathered)} of gathered parameters"
    if memory is None:
        return replace(row, reason=parts if gathered or row.host_bytes else "")
    if not held:
        return replace(
            row, reason="all model states are off the device; what its layers need there, a module must tell"
        )
    left = memory - held - gathered
    if left > 0:
        verdict = f"{size_in_words(left)} of {size_in_words(memory)} left for activations"
    else:
        verdict = f"{size_in_words(-left)} more than the {size_in_words(memory)} of a device"
    return replace(row, fits=left > 0, reason=f"{parts}: {verdict}")

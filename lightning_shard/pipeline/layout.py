"""How a module is laid out over stages: where its steps are cut, and which stage has which parameter."""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shard.pipeline.cuts import Cut, Refused, parameter_stages, spans, stage_of
from lightning_shard.pipeline.find_cuts import CutFinder
from lightning_shard.pipeline.partition import CutPoint, StageRow, choose, stage_table
from lightning_shard.pipeline.stages import Key
from lightning_shard.pipeline.trace import Trace

Balance = Literal["flops", "parameters", "memory"]


@dataclass(kw_only=True)
class Layout:
    """The stages of one module."""

    cuts: list[tuple[Key, ...]]
    """For each stage but the last the calls at which it ends, in the step that was cut first."""

    owners: dict[str, tuple[int, ...]]
    """For each parameter the stages that use it; the first is its owner."""

    buffers: dict[str, int] = field(default_factory=dict)
    """For each buffer the stage that changes it, or 0."""

    table: str = ""
    """The stages, as people are shown them."""

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.cuts) + 1

    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several stages use."""
        return {name: stages for name, stages in self.owners.items() if len(stages) > 1}

    def digest(self) -> str:
        """A short text that is the same on ranks that agree."""
        return hashlib.sha256(repr((self.cuts, sorted(self.owners.items()))).encode()).hexdigest()[:16]


ATTRIBUTE = "_lightning_shard_stages"
"""Of a LightningModule: its layout, and the settings that it was laid out with."""


def is_laid_out(module: "pl.LightningModule") -> bool:
    """Whether a pipeline has divided the module already."""
    return ATTRIBUTE in vars(module)


def lay_out(
    module: "pl.LightningModule",
    traces: Sequence[Trace],
    stages: int,
    split: Literal["auto"] | list[str],
    balance: Balance,
    rank_of: Callable[[int], int],
) -> Layout:
    """Cut the first of ``traces`` into stages, the others at the same module calls, and assign every parameter.

    Args:
        module: The module.
        traces: Of the steps to come.
        stages: How many stages to make.
        split: Names of modules at whose ends the stages end, or ``"auto"``.
        balance: What an automatic split evens out.
        rank_of: The rank of a stage, within a pipeline.

    Raises:
        MisconfigurationException: If the steps cannot be cut so.

    """
    first = traces[0]
    found, refused = CutFinder(first).find()
    costs = costs_before(module, first, found, balance, stages)
    cuts = [found[place] for place in _choose(found, refused, costs, stages, split, first)]
    layout = Layout(cuts=[cut.keys for cut in cuts], owners={})
    uses = [parameter_stages(first, cuts)]
    uses += [parameter_stages(trace, matching_cuts(trace, layout, uses[0])) for trace in traces[1:]]
    layout.owners = _owners(module, uses)
    layout.buffers = _buffers(module, first, cuts)
    _check_buffers(first, cuts)
    _warn_about_copies(module, layout)
    empty = [stage for stage in range(stages) if not any(stage in own for own in layout.owners.values())]
    if empty:
        rank_zero_warn(
            f"Pipeline stage {empty[0]} has no parameters: the module has too few layers for {stages} stages of equal"
            " cost. Use fewer stages, or balance='parameters'."
        )
    layout.table = _table(module, first, cuts, layout, rank_of)
    return layout


def agree(layout: Layout) -> None:
    """Check that all ranks laid the module out in the same way. Collective.

    Raises:
        MisconfigurationException: If they did not.

    """
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, layout.digest())
    if len(set(digests)) > 1:
        raise MisconfigurationException(
            f"The ranks traced different steps (digests {digests}), so their stages would not fit together. Build the"
            " same module and loaders of the same batch size on every rank."
        )


def matching_cuts(trace: Trace, layout: Layout, uses: dict[str, set[int]] | None = None) -> list[Cut]:
    """The cuts of ``trace`` that fit a layout: at the same calls, or where the parameters' stages allow.

    Raises:
        MisconfigurationException: If there is none for some boundary.

    """
    found, _ = CutFinder(trace).find()
    owners = layout.owners or {name: tuple(sorted(stages)) for name, stages in (uses or {}).items()}
    chosen: list[Cut] = []
    for boundary, keys in enumerate(layout.cuts):
        after = chosen[-1].time if chosen else 0
        same = [cut for cut in found if cut.time > after and set(cut.keys) & set(keys)]
        fitting = _by_owners(trace, found, owners, boundary, after)
        cut = next((each for each in same if each in fitting), None)
        if cut is None:
            cut = min(fitting, key=lambda each: each.crossing_bytes, default=same[0] if same else None)
        if cut is None:
            raise MisconfigurationException(
                f"{trace.step} cannot be cut where stage {boundary} ends, behind {keys[-1][0]!r}: it calls its modules"
                " in another order than the step that was cut first. Let the steps share one forward, or choose cuts"
                " that exist in both with PipelineStrategy(split=[...])."
            )
        chosen.append(cut)
    return chosen


def _by_owners(
    trace: Trace, found: Sequence[Cut], owners: dict[str, tuple[int, ...]], boundary: int, after: int
) -> list[Cut]:
    """The cuts with the parameters of the stages up to ``boundary`` before them and the others behind them."""
    before, behind = after, trace.end
    for name, time, _ in trace.uses():
        stages = owners.get(name, ())
        if stages and max(stages) <= boundary:
            before = max(before, time)
        elif stages and min(stages) > boundary:
            behind = min(behind, time)
    return [cut for cut in found if after < cut.time and before <= cut.time < behind]


def _choose(
    found: Sequence[Cut],
    refused: Sequence[Refused],
    costs: Sequence[float],
    stages: int,
    split: Literal["auto"] | list[str],
    trace: Trace,
) -> list[int]:
    points = [CutPoint(position=cut.time, name=cut.call.name, crossing_bytes=cut.crossing_bytes) for cut in found]
    names = None
    if split != "auto":
        outer = {name: cut.call.name for cut in found for name, _ in cut.keys}
        names = [outer.get(name, name) for name in split]
        why = {entry.name: entry.reason for entry in refused}
        for name in split:
            if name not in outer and name in why:
                raise MisconfigurationException(
                    f"PipelineStrategy(split=[...]): no stage can end behind {name!r}: {why[name]}."
                )
    try:
        return choose(points, costs, stages, names)
    except MisconfigurationException as error:
        reasons = list(dict.fromkeys(entry.reason for entry in refused))
        if reasons and names is None:
            error.add_note("Refused places: " + "; ".join(reasons[:5]))
            raise MisconfigurationException(
                f"{error} Places where no stage can end: {'; '.join(reasons[:5])}."
            ) from None
        raise


def costs_before(
    module: "pl.LightningModule", trace: Trace, cuts: Sequence[Cut], balance: Balance, stages: int = 1
) -> list[float]:
    """What comes before each cut, and in the whole step, in FLOPs, elements or bytes."""
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    events: list[tuple[int, float]] = []
    seen: set[str] = set()
    total_flops = sum(operation.flops for operation in trace.operations)
    if balance == "flops" and not total_flops:
        balance = "parameters"
    for operation in trace.operations:
        new = [name for name in operation.parameters if name not in seen and not seen.add(name)]  # type: ignore[func-returns-value]
        elements = sum(sizes.get(name, 0) for name in new)
        match balance:
            case "flops":
                events.append((operation.time, float(operation.flops)))
            case "parameters":
                events.append((operation.time, float(elements)))
            case "memory":
                # Weight, gradient and two optimizer states in fp32, and activations of about as many microbatches as
                # there are stages (1F1B).
                events.append((operation.time, 16.0 * elements + float(operation.saved) * stages))
    costs, total, place = [], 0.0, 0
    for time in [*(cut.time for cut in cuts), trace.end]:
        while place < len(events) and events[place][0] <= time:
            total += events[place][1]
            place += 1
        costs.append(total)
    return costs


def _owners(module: "pl.LightningModule", uses: Iterable[dict[str, set[int]]]) -> dict[str, tuple[int, ...]]:
    together: dict[str, set[int]] = {}
    for use in uses:
        for name, stages in use.items():
            together.setdefault(name, set()).update(stages)
    names = [name for name, _ in module.named_parameters()]
    used = [(place, name) for place, name in enumerate(names) if together.get(name)]
    owners: dict[str, tuple[int, ...]] = {}
    for place, name in enumerate(names):
        stages = together.get(name, set())
        if not stages and used:
            # A parameter that no traced step used, such as an expert's that got no row, stays with its next of kin.
            _, kin = max(used, key=lambda other: (_common_parts(name, other[1]), -abs(other[0] - place)))
            stages = together[kin]
        owners[name] = tuple(sorted(stages or {0}))
    return owners


def _common_parts(one: str, other: str) -> int:
    """How many modules around two parameters are the same."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _buffers(module: "pl.LightningModule", trace: Trace, cuts: Sequence[Cut]) -> dict[str, int]:
    """The last stage that calls the module of each buffer: only there it is up to date."""
    ends: dict[str, int] = {}
    for call in trace.calls:
        ends[call.name] = stage_of(min(call.end, trace.end), cuts)
    last = len(cuts)
    return {
        name: ends.get(name.rpartition(".")[0], last if "." not in name else 0) for name, _ in module.named_buffers()
    }


def _check_buffers(trace: Trace, cuts: Sequence[Cut]) -> None:
    """Refuse a buffer that one stage changes and an earlier one reads: there it would stay as it was."""
    changed = {o.inputs[0].index for o in trace.operations if o.writes and o.inputs}
    for name, value in trace.buffers.items():
        if value.index not in changed and value.mutated is None:
            continue
        reads, writes = trace.buffer_uses(name)
        if not writes:
            continue
        stage = min(stage_of(time, cuts) for time in writes)
        early = [stage_of(time, cuts) for time in reads if stage_of(time, cuts) < stage]
        if early:
            raise MisconfigurationException(
                f"Buffer {name!r} is changed on stage {stage} and read on stage {early[0]}, which would not see the"
                " change. Choose cuts that leave both on one stage (PipelineStrategy(split=[...])), or change the"
                " buffer in `on_train_batch_end`, where `trainer.strategy.broadcast_from_last` brings the value to all"
                " ranks."
            )


def _warn_about_copies(module: "pl.LightningModule", layout: Layout) -> None:
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    extra = {name: sizes[name] * (len(stages) - 1) for name, stages in layout.tied().items()}
    total = sum(sizes.values())
    if total and sum(extra.values()) > total / 2:
        largest = max(extra, key=lambda name: extra[name])
        rank_zero_warn(
            f"{len(extra)} parameters, such as {largest!r}, are used on several pipeline stages and kept on each of"
            " them:"
            f" {sum(extra.values()):,} elements beyond the module's {total:,}. The steps call the same modules more"
            " than once, so the pipeline saves less memory than it could; call each module once in a step."
        )


def _table(
    module: "pl.LightningModule", trace: Trace, cuts: Sequence[Cut], layout: Layout, rank_of: Callable[[int], int]
) -> str:
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    total = sum(operation.flops for operation in trace.operations) or 1
    rows = []
    for stage, (start, end) in enumerate(spans(trace, cuts)):
        inside = [call.name for call in trace.calls if start < call.start and call.end <= end]
        outer = [name for name in inside if name.rpartition(".")[0] not in inside] or ["-"]
        flops = sum(operation.flops for operation in trace.operations if start < operation.time <= end)
        rows.append(
            StageRow(
                stage=stage,
                rank=rank_of(stage),
                first=outer[0],
                last=cuts[stage].call.name if stage < len(cuts) else outer[-1],
                parameters=sum(sizes[name] for name, stages in layout.owners.items() if stage in stages),
                share=flops / total,
                crossing_bytes=cuts[stage].crossing_bytes if stage < len(cuts) else 0,
            )
        )
    return stage_table(rows)

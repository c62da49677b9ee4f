"""A plan as text, as JSON, and as a page to look at."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_shard.plan.html import page
from lightning_shard.plan.results import Plan, SchedulePlan, StrategyPlan
from lightning_shard.plan.schedules import LEGEND
from lightning_shard.plan.words import (
    count_in_words,
    parameters_in_words,
    percent_in_words,
    seconds_in_words,
    size_in_words,
)

_UNITS = "Numbers are of one rank; payload and sent are elements of a step, FLOPs its share of the model's."
_FITS = {True: "yes", False: "no", None: "?"}

# --- text ------------------------------------------------------------------------------------------------------------


def table(plan: Plan) -> str:
    """A plan as aligned text: a line a strategy, what to take and why, notes, and schedules."""
    parts = []
    if plan.strategies:
        shown = first_of_each(plan)
        parts += [_headline(plan), _aligned(_strategy_rows(plan, shown)), f"{verdict(plan)}\n{_UNITS}"]
        if hidden := len(plan.strategies) - len(shown):
            parts.append(f"{hidden} more with other settings are in the JSON and in the page's table.")
    if plan.schedules:
        parts += [_schedules(plan)]
    if plan.notes:
        parts.append("\n".join(f"* {note}" for note in plan.notes))
    return "\n\n".join(parts)


def _headline(plan: Plan) -> str:
    where = f"{plan.devices} ranks" if plan.devices > 1 else "1 rank"
    where += f" on {plan.nodes} nodes" if plan.nodes > 1 else ""
    memory = device_memory(plan)
    name = f", {plan.device.name}" if plan.device else ""
    room = f"{name} ({size_in_words(memory)} each)" if memory is not None else name
    return f"{parameters_in_words(plan.parameters)}, {where}{room}, precision {plan.precision}, {plan.optimizer}"


def device_memory(plan: Plan) -> float | None:
    """Bytes of a device that the strategies were held against; None if they were not."""
    if plan.memory_bytes is None and plan.device is not None:
        return plan.device.memory_bytes
    return plan.memory_bytes


def first_of_each(plan: Plan) -> list[StrategyPlan]:
    """The best of each name, and the one to take."""
    best: dict[str, StrategyPlan] = {}
    for each in plan.strategies:
        best.setdefault(each.name, each)
    return [each for each in plan.strategies if best[each.name] is each or each == plan.chosen]


def _strategy_rows(plan: Plan, shown: Sequence[StrategyPlan]) -> list[list[str]]:
    """The table's cells; a column that no strategy has a number for is left out."""
    columns: dict[str, list[str]] = {
        "strategy": [label(each) for each in shown],
        "model states": [size_in_words(each.model_states.total) for each in shown],
        "off device": [size_in_words(each.host_bytes) if each.host_bytes else "" for each in shown],
        "peak": [size_in_words(each.memory.total) if each.memory else "" for each in shown],
        "payload": [count_in_words(each.payload_elements) for each in shown],
        "sent": [count_in_words(each.sent_elements) for each in shown],
        "FLOPs": [percent_in_words(each.flops_fraction) for each in shown],
        "step": [seconds_in_words(each.time.total) if each.time else "" for each in shown],
        "rows/s": [count_in_words(each.rows_per_second) if each.rows_per_second else "" for each in shown],
        "fits": [_FITS[each.fits] if device_memory(plan) is not None else "" for each in shown],
        "": [each.reason for each in shown],
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    return [list(kept), *map(list, zip(*kept.values(), strict=True))]


def verdict(plan: Plan) -> str:
    """What to take and why, or that nothing fits."""
    if plan.chosen is not None:
        return f"Take {label(plan.chosen)}, the least invasive that fits: {plan.chosen.reason}."
    if any(each.fits is not None for each in plan.strategies):
        unknown = [each.name for each in plan.strategies if each.fits is None]
        doubt = f" ({', '.join(unknown)} cannot be judged)" if unknown else ""
        return f"Nothing is known to fit{doubt}: use more devices, devices with more memory, or a smaller model."
    return "Whether they fit is not judged: name a device or its memory."


def label(strategy: StrategyPlan) -> str:
    """The strategy's name, with settings if it has any."""
    given = ", ".join(f"{name}={plain(value)}" for name, value in strategy.settings.items())
    return f"{strategy.name}({given})" if given else strategy.name


def _aligned(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0, -1)) -> str:
    """Rows as lines; columns are aligned at their ends, but the first and the last at their beginnings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lefts = {index % len(widths) for index in left}
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index in lefts else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _schedules(plan: Plan) -> str:
    rows = [["schedule", "bubble", "in flight, by stage"]]
    for each in plan.schedules:
        bubble = "" if each.bubble_fraction is None else percent_in_words(each.bubble_fraction)
        rows.append([each.schedule, bubble, in_flight(each) or each.reason])
    parts = [_aligned(rows)]
    drawn = [each for each in plan.schedules if each.timeline]
    for each in drawn:
        width = len(str(len(each.timeline) - 1))
        lines = [f"  rank {rank:>{width}}  {line}" for rank, line in enumerate(each.timeline)]
        parts.append("\n".join([each.schedule, *lines]))
    return "\n\n".join([*parts, *([LEGEND] if drawn else [])])


def in_flight(schedule: SchedulePlan) -> str:
    """Microbatches alive by stage; of many stages the first and last few."""
    numbers = [str(number) for number in schedule.in_flight_microbatches]
    return " ".join(numbers if len(numbers) <= 24 else [*numbers[:12], "...", *numbers[-8:]])


# --- JSON ------------------------------------------------------------------------------------------------------------


def to_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain values, with sums beside their parts; bytes, elements and seconds as they are."""
    data: dict[str, Any] = {
        "parameters": plan.parameters or None,
        "devices": plan.devices,
        "nodes": plan.nodes,
        "device": dataclasses.asdict(plan.device) if plan.device else None,
        "memory_bytes": device_memory(plan),
        "precision": plan.precision if plan.strategies else None,
        "optimizer": plan.optimizer if plan.strategies else None,
        "strategies": [_strategy(each) for each in plan.strategies],
        "chosen": plan.chosen.name if plan.chosen else None,
        "chosen_settings": plan.chosen.settings if plan.chosen else None,
        "schedules": [_schedule(each) for each in plan.schedules],
        "notes": list(plan.notes),
    }
    converted: dict[str, Any] = plain(data)
    return converted


def _strategy(each: StrategyPlan) -> dict[str, Any]:
    return {
        "name": each.name,
        "settings": each.settings,
        "model_states_bytes": each.model_states.total,
        "model_states": dataclasses.asdict(each.model_states),
        "host_bytes": each.host_bytes,
        "device_bytes": each.device_bytes,
        "payload_elements": each.payload_elements,
        "sent_elements": each.sent_elements,
        "flops_fraction": each.flops_fraction,
        "peak_bytes": each.memory.total if each.memory else None,
        "memory": dataclasses.asdict(each.memory) if each.memory else None,
        "step_seconds": each.time.total if each.time else None,
        "time": dataclasses.asdict(each.time) if each.time else None,
        "rows": each.rows,
        "rows_per_second": each.rows_per_second,
        "fits": each.fits,
        "reason": each.reason,
        "simulated": each.simulated,
    }


def _schedule(each: SchedulePlan) -> dict[str, Any]:
    return {
        "schedule": each.schedule,
        "bubble_fraction": each.bubble_fraction,
        "in_flight_microbatches": list(each.in_flight_microbatches),
        "timeline": list(each.timeline),
        "reason": each.reason,
    }


def plain(value: Any) -> Any:
    """A value in terms of JSON; whole floats become integers, what JSON has no word for becomes text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"class": type(value).__name__, **plain(vars(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


# --- page ------------------------------------------------------------------------------------------------------------


def write_html(plan: Plan, path: str | Path) -> None:
    """Write a plan as one page that needs nothing else; it appears when it is whole.

    Args:
        plan: What to show.
        path: The file; one that is there is replaced.

    Raises:
        ValueError: If it cannot be written, and why.

    """
    if not str(path):
        raise ValueError("The page cannot be written: its path is empty.")
    target = Path(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        raise ValueError(f"The page cannot be written to {target}: it is no file, but a device or a pipe.")
    contents = page(to_json(plan), verdict(plan))
    if target.is_dir():
        raise ValueError(f"The page cannot be written to {target}: it is a folder. Name a file in it.")
    if not target.parent.is_dir():
        raise ValueError(f"The page cannot be written to {target}: there is no folder {target.parent}.")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_text(contents, encoding="utf-8")
        part.replace(target)
    except OSError as error:
        raise ValueError(f"The page cannot be written to {target}: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)

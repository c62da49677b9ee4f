"""Measurements as text."""

from collections.abc import Sequence

from lightning_shard._compat.model_states import Kind
from lightning_shard.telemetry.memory import Bytes, ExpectedModelStates, ModelStateBytes

ROWS: tuple[tuple[Kind, str, int], ...] = (  # kind, label, the stage from which on it is partitioned (0: never)
    ("parameters", "parameters", 3),
    ("gathered", "  kept whole as well", 0),
    ("master", "master copy (fp32)", 1),
    ("gradients", "gradients", 2),
    ("optimizer", "optimizer states", 1),
    ("buckets", "buckets", 0),
)


def model_state_table(measured: Sequence[ModelStateBytes], expected: ExpectedModelStates) -> str:
    """Model states of every rank beside the formula: a row a kind, a column a rank, bytes with their device.

    Args:
        measured: What each rank holds.
        expected: What the formula says that a rank holds.

    """
    header = ["", "formula", "bytes", *(f"rank {states.rank}" for states in measured)]
    lines = [header]
    for kind, label, partitioned_from in ROWS:
        held = [getattr(states, kind) for states in measured]
        formula, size = _formula(kind, partitioned_from, expected)
        if any(held) or size:
            lines.append([label, formula, f"{size:,}" if formula else "", *(_devices(devices) for devices in held)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    title = f"Model states per rank: Ψ = {expected.parameters_total:,} parameters, N = {expected.ranks} ranks"
    rows = [
        line[0].ljust(widths[0])
        + "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    ]
    return "\n".join([title, *(row.rstrip() for row in rows)])


def _formula(kind: Kind, partitioned_from: int, expected: ExpectedModelStates) -> tuple[str, int]:
    if kind == "buckets":
        return "", 0
    if kind == "gathered":
        return ("small ones" if expected.gathered else ""), expected.gathered
    per_parameter = getattr(expected.per_parameter, kind)
    if not per_parameter:
        return "", 0
    shared = 0 < partitioned_from <= expected.stage
    return f"{per_parameter:g}Ψ/N" if shared else f"{per_parameter:g}Ψ", int(getattr(expected.states, kind))


def _devices(held: dict[str, Bytes]) -> str:
    return " + ".join(f"{part.storage:,} {device}" for device, part in sorted(held.items())) or "0"

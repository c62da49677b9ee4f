"""What was sharded, as a table: units, their parameters, and the bytes of each rank."""

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard._compat import sharding
from lightning_shard.units.plan import PlannedUnits
from lightning_shard.units.shard import Layout

_ROWS = 12
"""Units listed one by one; of more, those in the middle are summed up."""


def show_units(planned: PlannedUnits, layout: Layout, mesh: DeviceMesh) -> None:
    """Print the table on rank 0."""
    rank_zero_info(units_table(planned, layout, mesh))


def units_table(planned: PlannedUnits, layout: Layout, mesh: DeviceMesh) -> str:
    """The table as text.

    Args:
        planned: Which modules became units, and which that were wanted did not.
        layout: The sharded module's units.
        mesh: The ranks.

    """
    ranks = mesh.size(mesh.ndim - 1)
    rows = [_row(name or "(the module itself)", list(sharding.sharded_parameters(unit)))
            for name, unit in layout.units.items()]  # fmt: skip
    rows = [row for row in rows if row[1]]  # a module that is all units holds nothing itself
    count = len(rows)
    if layout.whole:
        rows.append(_row("(whole on every rank)", list(layout.whole.values())))
    total = ("total", sum(row[1] for row in rows), sum(row[2] for row in rows))
    cells = [("unit", "parameters", "held by a rank")]
    cells += [(name, f"{parameters:,}", _bytes(held)) for name, parameters, held in [*_shortened(rows), total]]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = [f"{name:<{widths[0]}}  {parameters:>{widths[1]}}  {held:>{widths[2]}}" for name, parameters, held in cells]
    largest = max(rows, key=lambda row: row[1])
    shared = f"{ranks} ranks" if mesh.ndim == 1 else f"{ranks} ranks, in {mesh.size(0)} replicas"
    text = [
        f"FSDP2: {count} {'unit' if count == 1 else 'units'}, sharded over {shared}.",
        *lines,
        f"Largest unit: {largest[0]}, {largest[1]:,} parameters; while it is at work, a rank holds all of it.",
    ]
    text += [f"Not a unit: {name}: {reason}" for name, reason in planned.rejected.items()]
    return "\n".join(text)


def _row(name: str, parameters: list[nn.Parameter]) -> tuple[str, int, int]:
    held = sum(sharding.local_bytes(parameter) for parameter in parameters)
    return name, sum(parameter.numel() for parameter in parameters), held


def _shortened(rows: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    if len(rows) <= _ROWS:
        return rows
    head, tail = rows[: _ROWS // 2], rows[-_ROWS // 2 :]
    middle = rows[_ROWS // 2 : -_ROWS // 2]
    return [*head, (f"... {len(middle)} more", sum(r[1] for r in middle), sum(r[2] for r in middle)), *tail]


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError

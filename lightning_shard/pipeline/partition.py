"""Where a pipeline is cut: the stages of least cost, exactly, or the names that the user gives.

Only numbers and names are handled here; no tensor and no process group.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from lightning.fabric.utilities.exceptions import MisconfigurationException

_LISTED = 20
"""Names that an error lists at most."""

_Rank = tuple[float, float]
"""How good a way of cutting is: crossing bytes, then the sum of the stages' squared costs. Less is better."""


@dataclass(frozen=True, kw_only=True)
class CutPoint:
    """A place between two operations of the step where a stage may end."""

    position: int
    """When in the step it lies; later cuts have larger positions."""

    name: str
    """The module at whose end it lies."""

    crossing_bytes: int
    """Bytes of the values that a microbatch sends across it."""


def choose(cuts: Sequence[CutPoint], costs_before: Sequence[float], stages: int, split: list[str] | None) -> list[int]:
    """Choose the cuts between the stages.

    Args:
        cuts: The allowed cuts, in the order of their positions.
        costs_before: Cost of all that comes before each cut, and last the cost of the whole step.
        stages: How many stages are wanted.
        split: Names of the modules at whose ends the stages end, the last stage aside; None for a balanced choice.

    Returns:
        Indices of the ``stages - 1`` chosen cuts, increasing.

    Raises:
        MisconfigurationException: If there are too few cuts, or a name is none of them, or their order is another.

    """
    if split is not None:
        return _named(cuts, stages, split)
    if len(cuts) < stages - 1:
        raise MisconfigurationException(
            f"{stages} stages need {stages - 1} cuts, but the step can be cut in {len(cuts)} places only:"
            f" {_listing(cuts)}. Use {len(cuts) + 1} stages or fewer, write the forward so that it calls its blocks as"
            " modules (a cut lies at a module's end), and compile the blocks, not the whole model."
        )
    return balance(costs_before, [cut.crossing_bytes for cut in cuts], stages)


# --- balanced --------------------------------------------------------------------------------------------------------


def balance(costs_before: Sequence[float], crossing: Sequence[int], stages: int) -> list[int]:
    """The cuts whose largest stage costs least; among those, the fewest crossing bytes; among those, the most even.

    Exact, by dynamic programming over the cuts (Pinar and Aykanat 2004, *Fast optimal load balancing algorithms for 1D
    partitioning*, gives the problem and its monotonic structure): first the least possible largest cost, in O(kn), then
    the best way to keep it, in O(kn log n) for k stages and n cuts. Most even is the least sum of squared stage costs.

    Args:
        costs_before: Cost of all that comes before each cut, never decreasing, and last the total.
        crossing: Bytes that cross each cut.
        stages: How many stages, at most one more than there are cuts.

    Returns:
        Indices of the ``stages - 1`` chosen cuts, increasing.

    """
    assert len(costs_before) == len(crossing) + 1 and 1 <= stages <= len(costs_before)
    least = _least_largest(costs_before, stages)
    limit = least[-1][-1]
    # Ways to end stage after stage at a cut: only cuts that the stages before can reach within the limit count.
    reach = min(_reach(least[0], limit), len(crossing))
    ranks: list[_Rank] = [(crossing[i], costs_before[i] ** 2) for i in range(reach)]
    bytes_at = [*crossing, 0]
    first = 0  # the earliest cut that the current stage can end at, as every stage ends at a cut of its own
    choices = []
    for stage in range(1, stages):
        last = stage == stages - 1
        lowest = len(crossing) if last else stage  # the last stage ends with the step, which is no cut
        highest = len(crossing) if last else min(_reach(least[stage], limit), len(crossing)) - 1
        ends = _Ends(costs=costs_before, limit=limit, before=ranks, first=first)
        chosen = ends.best(lowest, highest)
        best = [ends.rank(i, j) for j, i in enumerate(chosen, lowest)]
        ranks = [(across + bytes_at[j], squares) for j, (across, squares) in enumerate(best, lowest)]
        choices.append((lowest, chosen))
        first = lowest
    cuts: list[int] = []
    end = len(crossing)
    for lowest, chosen in reversed(choices):
        end = chosen[end - lowest]
        cuts.append(end)
    return cuts[::-1]


def _least_largest(costs: Sequence[float], stages: int) -> list[list[float]]:
    """``[s][j]``: the least possible largest cost when s + 1 stages cover what comes before cut j; inf if they cannot.

    Each row never decreases with j from its first finite entry on, and a last stage's cost never increases with where
    it starts. So the best start, where the two meet, moves only forward as j does.
    """
    table = [list(costs)]
    for stage in range(1, stages):
        before, row, start = table[-1], [float("inf")] * len(costs), stage - 1
        for j in range(stage, len(costs)):
            while start + 1 < j and before[start + 1] <= costs[j] - costs[start + 1]:
                start += 1
            row[j] = max(before[start], costs[j] - costs[start])
            if start + 1 < j:
                row[j] = min(row[j], max(before[start + 1], costs[j] - costs[start + 1]))
        table.append(row)
    return table


def _reach(row: Sequence[float], limit: float) -> int:
    """One more than the last cut within reach of the limit; from the row's first finite entry on, all cuts are."""
    return max(j for j, cost in enumerate(row) if cost <= limit) + 1


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """Where one stage may start, given where it ends."""

    costs: Sequence[float]
    """Cost before each cut, and the total."""

    limit: float
    """No stage may cost more."""

    before: list[_Rank]
    """The best rank of the stages before, for each cut that they can end at."""

    first: int
    """The cut that the first of ``before`` belongs to."""

    def rank(self, start: int, end: int) -> _Rank:
        """How good it is to start at one cut and end at another."""
        across, squares = self.before[start - self.first]
        return across, squares + (self.costs[end] - self.costs[start]) ** 2

    def best(self, lowest: int, highest: int) -> list[int]:
        """The best start for each end from ``lowest`` to ``highest``; of equal ones the first.

        By divide and conquer: squared differences fulfil the quadrangle inequality (Yao 1980), so a later end has
        no earlier best start, and half of the ends need only look at starts on one side of the middle one's.
        """
        found = [0] * (highest - lowest + 1)
        pending = [(lowest, highest, self.first, self.first + len(self.before) - 1)]
        while pending:
            low, high, earliest, latest = pending.pop()
            if low > high:
                continue
            end = (low + high) // 2
            starts = range(min(latest, end - 1), earliest - 1, -1)
            best, best_rank = -1, (float("inf"), float("inf"))
            for start in starts:
                if self.costs[end] - self.costs[start] > self.limit:
                    break  # earlier starts cost more still
                rank = self.rank(start, end)
                if rank <= best_rank:
                    best, best_rank = start, rank
            assert best >= 0, "every end within reach has a start"
            found[end - lowest] = best
            pending += [(low, end - 1, earliest, best), (end + 1, high, best, latest)]
        return found


# --- named -----------------------------------------------------------------------------------------------------------


def _named(cuts: Sequence[CutPoint], stages: int, split: list[str]) -> list[int]:
    if len(split) != stages - 1:
        raise MisconfigurationException(
            f"split names the modules at whose ends {stages} stages end, the last one aside: {stages - 1} names, but it"
            f" has {len(split)}: {split}. Give {stages - 1} names, or use {len(split) + 1} stages."
        )
    names = [cut.name for cut in cuts]
    for name in split:
        if name not in names:
            near = _nearest(name, names)
            nearest = f" Nearest to it: {', '.join(map(repr, near))}." if near else ""
            raise MisconfigurationException(
                f"split={split}: no stage can end at {name!r}.{nearest} Allowed, in the order of the step:"
                f" {_listing(cuts)}."
            )
    chosen: list[int] = []
    after = len(cuts)
    for name in reversed(split):  # a module that is called several times ends several times: the last that fits
        fitting = [i for i in range(after) if names[i] == name]
        if not fitting:
            later = split[len(split) - len(chosen)]
            where = "is named twice" if later == name else f"ends only after {later!r}"
            raise MisconfigurationException(
                f"split={split} must name each module once, in the order in which the step ends them, but {name!r}"
                f" {where}. In order they are {sorted(set(split), key=names.index)}."
            )
        after = fitting[-1]
        chosen.append(after)
    return chosen[::-1]


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """The allowed names nearest to another: in the module tree, the last that ends, then those spelled alike."""
    parts = name.split(".")

    def shared(other: str) -> int:
        both = list(zip(parts, other.split("."), strict=False))
        return next((i for i, (one, two) in enumerate(both) if one != two), len(both))

    unique = list(dict.fromkeys(names))
    depth = max(map(shared, unique), default=0)
    kin = [other for other in unique if depth and shared(other) == depth]
    return list(dict.fromkeys([*kin[-1:], *difflib.get_close_matches(name, unique, n=3)]))


def _listing(cuts: Sequence[CutPoint]) -> str:
    names = list(dict.fromkeys(cut.name for cut in cuts))
    if len(names) <= _LISTED:
        return ", ".join(names) or "nowhere"
    half = _LISTED // 2
    return ", ".join([*names[:half], f"... {len(names) - _LISTED} more ...", *names[-half:]])


# --- table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One stage, as people are shown it."""

    stage: int
    """Its number, from 0."""

    rank: int
    """The rank, within a pipeline, that runs it."""

    first: str
    """Its first module."""

    last: str
    """Its last module."""

    parameters: int
    """Elements of its parameters."""

    share: float
    """Its part of the step's FLOPs, 0 to 1."""

    crossing_bytes: int
    """Bytes that a microbatch sends from it to the next stage; 0 for the last."""


def stage_table(rows: Sequence[StageRow]) -> str:
    """The stages as a table.

    Args:
        rows: One per stage.

    Returns:
        Lines of text, the first of them the heading.

    """
    cells = [("stage", "rank", "first module", "last module", "parameters", "share of FLOPs", "crossing bytes")]
    for row in rows:
        share, crossing = f"{row.share:.1%}", f"{row.crossing_bytes:,}"
        cells.append((str(row.stage), str(row.rank), row.first, row.last, f"{row.parameters:,}", share, crossing))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [
        "  ".join(
            f"{text:<{width}}" if column in (2, 3) else f"{text:>{width}}"  # names to the left, numbers to the right
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join(aligned)

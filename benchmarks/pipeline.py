"""What ``PipelineStrategy`` costs, and whether its schedules do what they promise, on CPU ranks.

1. Overhead: a Trainer step against a hand-written loop on torch.distributed.pipelining
   (``benchmarks/pipeline_overhead.py``).
2. Bubble: how long ranks stand idle, with stages that sleep instead of computing (``benchmarks/pipeline_bubble.py``).
3. Memory: how many microbatches' activations autograd keeps at once, in the same run.

    python benchmarks/pipeline.py                           # all: some minutes
    python benchmarks/pipeline.py --parts bubble --json     # the sleeping stages only, as JSON
    python benchmarks/pipeline.py --markdown                # tables in Markdown
    python benchmarks/pipeline.py --quick                   # only to see that it runs: seconds
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

# As a script this file is in no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import pipeline_bubble, pipeline_overhead
from benchmarks.pipeline_bubble import Measured, judge_bubble, judge_memory
from benchmarks.pipeline_overhead import Overhead
from benchmarks.turns import parse_options
from lightning_shard.pipeline.schedule import SCHEDULES

R = TypeVar("R")

PARTS = ("overhead", "bubble")
PAIRS = 40
FEW_PAIRS = 10
"""As many where ranks share cores, and no target is set."""

OVERHEAD = [
    pipeline_overhead.Case(schedule="gpipe", ranks=2, blocks=4, width=256, rows=320, pairs=PAIRS),
    pipeline_overhead.Case(schedule="1f1b", ranks=2, blocks=4, width=256, rows=320, pairs=PAIRS),
    # Where computing takes no time, one sees what each step and each microbatch costs besides.
    pipeline_overhead.Case(schedule="1f1b", ranks=2, blocks=4, width=32, rows=8, pairs=PAIRS),
    pipeline_overhead.Case(schedule="1f1b", ranks=4, blocks=4, width=256, rows=320, pairs=PAIRS),
]
QUICK_OVERHEAD = pipeline_overhead.Case(schedule="1f1b", ranks=2, blocks=1, width=32, rows=4, pairs=5)

OVERHEAD_COLUMNS: dict[str, Callable[[Overhead], str]] = {
    "schedule": lambda row: row.schedule,
    "ranks": lambda row: str(row.ranks),
    "microbatches": lambda row: str(row.microbatches),
    "parameters": lambda row: f"{row.parameters:,}",
    "pairs": lambda row: str(row.pairs),
    "forward, ms": lambda row: f"{row.forward_ms:.2f}",
    "by hand, ms": lambda row: f"{row.bare_ms:.1f}",
    "Trainer, ms": lambda row: f"{row.ours_ms:.1f}",
    "ratio": lambda row: f"{row.ratio:.3f}",
    "hand : hand": lambda row: f"{row.bare_against_bare:.3f}",
    "CPU ratio": lambda row: f"{row.cpu_ratio:.3f}",
    "replay, ms": lambda row: " ".join(f"{cost:.2f}" for cost in row.replay_ms) or "-",
    "verdict": lambda row: row.verdict,
}

BUBBLE_COLUMNS: dict[str, Callable[[tuple[Measured, str]], str]] = {
    "schedule": lambda row: row[0].schedule,
    "stages": lambda row: str(row[0].stages),
    "measured, %": lambda row: f"{100 * row[0].bubble:.1f}",
    "steps, %": lambda row: f"{100 * row[0].lowest:.1f} - {100 * row[0].highest:.1f}",
    "by hand, %": lambda row: f"{100 * row[0].by_hand:.1f}",
    "on paper, %": lambda row: f"{100 * row[0].on_paper:.1f}",
    "(p-1)/(m+p-1)": lambda row: f"{100 * row[0].formula:.1f}",
    "verdict": lambda row: row[1],
}

MEMORY_COLUMNS: dict[str, Callable[[Measured], str]] = {
    "schedule": lambda row: row.schedule,
    "stages": lambda row: str(row.stages),
    "measured": lambda row: " ".join(f"{live:g}" for live in row.live),
    "on paper": lambda row: " ".join(map(str, row.live_on_paper)),
    "verdict": judge_memory,
}


class Tables:
    """Prints tables, each row as soon as it is known.

    Args:
        markdown: In Markdown, not as plain text.

    """

    def __init__(self, markdown: bool) -> None:
        self._markdown = markdown

    def show(self, title: str, rows: Iterable[R], columns: Mapping[str, Callable[[R], str]]) -> list[R]:
        """Print one table and return its rows."""
        print(f"\n{title}\n", flush=True)
        self._line(columns)
        self._line("---" for _ in columns)
        shown = []
        for row in rows:
            self._line(cell(row) for cell in columns.values())
            shown.append(row)
        return shown

    def _line(self, cells: Iterable[str]) -> None:
        padded = [f"{cell:>13}" for cell in cells]
        print("| " + " | ".join(padded) + " |" if self._markdown else " ".join(padded), flush=True)


def bubble_cases(options: argparse.Namespace) -> list[pipeline_bubble.Case]:
    """The schedules to measure: 1F1B, with which others are compared, before these."""
    ranks, microbatches = (2, 4) if options.quick else (4, 8)
    return [
        pipeline_bubble.Case(
            schedule=schedule,
            ranks=ranks,
            microbatches=microbatches,
            stages_per_rank=2,
            unit=options.unit_ms / 1000,
            steps=options.steps,
        )
        for schedule in SCHEDULES
        if schedule in options.schedules
    ]


def with_pairs(case: pipeline_overhead.Case, pairs: int) -> pipeline_overhead.Case:
    """A comparison with as many pairs of steps as are asked for, or fewer if ranks share cores."""
    return replace(case, pairs=pairs if pipeline_overhead.enough_cores(case) else min(pairs, FEW_PAIRS))


def judged(rows: Iterable[Measured]) -> Iterable[tuple[Measured, str]]:
    """Each row with its verdict, as it comes."""
    one_f_one_b = None
    for row in rows:
        if row.schedule == "1f1b":
            one_f_one_b = row
        yield row, judge_bubble(row, one_f_one_b)


def read_options(arguments: list[str] | None) -> tuple[argparse.Namespace, int]:
    """The options, and the number of steps before those of the first part that are compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run")
    parser.add_argument(
        "--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES), help="whose bubble to measure"
    )
    parser.add_argument("--unit-ms", type=float, default=50.0, help="milliseconds of a sleep")
    parser.add_argument("--steps", type=int, default=8, help="steps of a schedule that are measured")
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown, not as plain text")
    options, warm_up = parse_options(parser, arguments, pairs=PAIRS)
    if options.quick:
        options.steps = 2
    return options, warm_up


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, measure, print."""
    options, warm_up = read_options(arguments)
    cases = [QUICK_OVERHEAD] if options.quick else [with_pairs(case, options.pairs) for case in OVERHEAD]
    overhead = (pipeline_overhead.compare(case, warm_up) for case in cases if "overhead" in options.parts)
    asked = bubble_cases(options) if "bubble" in options.parts else []
    bubbles = judged(pipeline_bubble.measure(case) for case in asked)
    if options.json:
        json.dump(as_json(list(overhead), list(bubbles)), sys.stdout, indent=2)
        print()
        return
    tables = Tables(options.markdown)
    if "overhead" in options.parts:
        tables.show("A Trainer step against a hand-written loop", overhead, OVERHEAD_COLUMNS)
    if asked:
        numbers = f"{asked[0].ranks} ranks, {asked[0].microbatches} microbatches"
        found = tables.show(f"Bubble: {numbers}, sleeps of {options.unit_ms:g} ms", bubbles, BUBBLE_COLUMNS)
        title = f"Activations kept at once, by rank, in forwards of a stage on a microbatch: {numbers}"
        tables.show(title, [row for row, _ in found], MEMORY_COLUMNS)


def as_json(overhead: Sequence[Overhead], bubbles: Sequence[tuple[Measured, str]]) -> dict[str, Any]:
    """All that was found, with every verdict."""
    return {
        "overhead": [asdict(row) for row in overhead],
        "schedules": [
            {**asdict(row), "bubble_verdict": verdict, "memory_verdict": judge_memory(row)} for row, verdict in bubbles
        ],
    }


if __name__ == "__main__":
    main()

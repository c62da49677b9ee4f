"""Save under every strategy, resume under every other: what goes on must equal one process that was never stopped.

Three steps of AdamW under one strategy, a checkpoint, and two more under another, at other numbers of ranks too.
Losses, weights, buffers, moments and step counts are compared. A pair that fails fills its own cell.

    python benchmarks/checkpoint_matrix.py                                      # the whole table: about 20 minutes
    python benchmarks/checkpoint_matrix.py --models tied --json                 # one model, as JSON
    python benchmarks/checkpoint_matrix.py --write docs/checkpoint_matrix.md
    python benchmarks/checkpoint_matrix.py --quick                              # a few pairs that cover all
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

# As a script this file is in no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.checkpoint_cases import MODELS, PIPELINES_OF_SHARDS, SAVED_AFTER, STEPS, Under, all_under
from benchmarks.checkpoint_runs import ABSOLUTE, RELATIVE, Result, measure

Pair = tuple[str, Under, Under]
"""A model, what it is saved under, and what it resumes under."""

SAVED = [*all_under(1)[:1], *all_under(2, 4)]
"""What saves: one process, and everything on several ranks."""

RESUMED = all_under(1, 2, 4)
"""What resumes."""


def all_pairs(models: Sequence[str]) -> list[Pair]:
    """The whole table."""
    return [(model, saved, resumed) for model in models for saved in SAVED for resumed in RESUMED]


def covering_pairs(models: Sequence[str]) -> list[Pair]:
    """A few pairs in which everything saves, everything resumes, and every model does both.

    On four ranks, which take longest, one half of the strategies saves, and the other half resumes.
    """
    four = [under for under in all_under(4) if under.strategy != PIPELINES_OF_SHARDS]
    mixed = Under(strategy=PIPELINES_OF_SHARDS, ranks=4)
    saved = [*SAVED[:1], *all_under(2), *four[::2], mixed]
    resumed = [*all_under(1, 2), *four[1::2], mixed]
    # Steps of 7 through a list whose length 7 does not divide reach all of it.
    assert len(saved) % 7
    return [
        (models[(number + number // 5) % len(models)], saved[7 * number % len(saved)], under)
        for number, under in enumerate(resumed)
    ]


def cell(result: Result) -> str:
    """One pair's place in the table."""
    if result.verdict == "error":
        return "**error**"
    return f"{result.largest:.0e}" if result.verdict == "same" else f"**{result.largest:.0e}**"


def tables(results: Sequence[Result]) -> list[str]:
    """Lines of Markdown: a table for each model and number of ranks that resume."""
    lines = []
    for model in dict.fromkeys(result.model for result in results):
        by_pair = {(result.saved, result.resumed): result for result in results if result.model == model}
        for ranks in sorted({under.ranks for under in RESUMED}):
            columns = [str(under) for under in RESUMED if under.ranks == ranks]
            columns = [name for name in columns if any(resumed == name for _, resumed in by_pair)]
            if not columns:
                continue
            lines += ["", f"## {model}, resumed on {ranks} rank{'s' * (ranks > 1)}", ""]
            lines += ["| saved under | " + " | ".join(name.partition(",")[0] for name in columns) + " |"]
            lines += ["|---|" + "---:|" * len(columns)]
            for saved in dict.fromkeys(saved for saved, _ in by_pair):
                row = [by_pair.get((saved, resumed)) for resumed in columns]
                if any(row):
                    lines.append(f"| {saved} | " + " | ".join(cell(each) if each else "" for each in row) + " |")
    return lines


def failures(results: Sequence[Result]) -> list[str]:
    """Lines of Markdown: each pair that is not the same, and why."""
    failed = [result for result in results if result.verdict != "same"]
    lines = ["", "## What failed", ""] if failed else []
    for result in failed:
        lines.append(f"* {result.model}, saved under {result.saved}, resumed under {result.resumed}:")
        if result.error is None:
            numbers = f"losses {result.losses:.1e}, weights {result.weights:.1e}, moments {result.moments:.1e}"
            lines.append(f"  {numbers}, step counts {result.steps}.")
        else:
            reasons = [line.strip() for line in result.error.splitlines() if "Error" in line or "Exception" in line]
            lines.append(f"  {(reasons or result.error.splitlines())[-1][:400]}")
    return lines


PAGE = """\
# Saved under one strategy, resumed under another

`python benchmarks/checkpoint_matrix.py`, on {date}, on a {cores}-core {machine} CPU, gloo, {versions}, fp32.

{saved} steps of AdamW with a StepLR scheduler under the strategy of the row (a number behind it is that of its
ranks), then `trainer.save_checkpoint`, then {more} more steps from `ckpt_path=` under the strategy of the column, whose
module starts from other weights. Each data-parallel rank has rows of its own; the global batches are the same
everywhere. A number is the largest difference from one process that was never stopped, of the last {more} losses and,
on every rank, of all weights, buffers and moments; step counts are equal. The limit is {absolute:g} + {relative:g} ·
|value|; a bold number is beyond it.

* **plain**: three parameter groups, frozen parameters, a parameter without dimensions, a persistent buffer that counts
  the steps, and a buffer that is not saved.
* **tied**: the head of a language model is its embedding.
* **LoRA**: frozen `Linear(8, 8)`, each with a trained (8, 2) · (2, 8) beside it.

`pipeline x shard` is `PipelineStrategy(stages=2, data_parallel="shard")`.

{same} of {pairs} pairs are the same; the largest difference among them is {largest:.1e}.
"""


def document(results: Sequence[Result]) -> str:
    """The whole page."""
    same = [result for result in results if result.verdict == "same"]
    page = PAGE.format(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        cores=os.cpu_count(),
        machine=platform.machine().replace("_", "-"),
        versions=", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "lightning", "deepspeed")),
        saved=SAVED_AFTER,
        more=STEPS - SAVED_AFTER,
        absolute=ABSOLUTE,
        relative=RELATIVE,
        same=len(same),
        pairs=len(results),
        largest=max((result.largest for result in same), default=0.0),
    )
    return "\n".join([page.rstrip(), *tables(results), *failures(results), ""])


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, run the pairs, print.

    Returns:
        The exit status: 1 if a pair is not the same.

    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="models to train")
    parser.add_argument("--quick", action="store_true", help="few pairs that cover all strategies")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--write", type=Path, help="write the page to this file, too")
    options = parser.parse_args(arguments)
    pairs = covering_pairs(options.models) if options.quick else all_pairs(options.models)
    with TemporaryDirectory() as folder:
        results = measure(pairs, Path(folder))
    if options.write is not None:
        options.write.write_text(document(results))
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print("\n".join([*tables(results), *failures(results)]).strip())
    return int(any(result.verdict != "same" for result in results))


if __name__ == "__main__":
    sys.exit(main())

"""How wrong the planner is: its figures beside those of real runs, for every strategy.

A real run trains some steps on processes of this machine; its peak is what torch's CPU allocator really handed out,
its model states are live storage, its traffic a count of collectives. The planner never sees any of it.

    python benchmarks/plan_accuracy.py --measure-only --json measured.json    # the runs: about 20 minutes
    python benchmarks/plan_accuracy.py --json measured.json                   # beside the planner's figures
    python benchmarks/plan_accuracy.py --json measured.json --write docs/plan_accuracy.md
    python benchmarks/plan_accuracy.py --models gpt --strategies fsdp2 --ranks 2 --precisions 32-true
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

# As a script this file is in no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.plan_cases import MODELS, PRECISIONS, RANKS, STRATEGIES, TABLE, Case, all_cases
from benchmarks.plan_measure import MEASURED, STATES, Measured, Peak, Rank, measure
from benchmarks.plan_predict import Predicted, PredictedRank, predict

LIMIT = 0.05
"""Error of the peak from which on a row is a miss, where the strategy's own code is simulated."""

AIM = 0.10
"""The same for closed forms."""

# --- comparison ---


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, measured and predicted."""

    measured: Measured
    """What was measured."""

    predicted: Predicted
    """What the planner says."""

    @property
    def pairs(self) -> list[tuple[Rank, PredictedRank]]:
        """Each rank that the planner speaks of, measured and predicted."""
        return [(self.measured.ranks[said.rank], said) for said in self.predicted.ranks] if self.measured.ranks else []

    @property
    def worst(self) -> tuple[Rank, PredictedRank]:
        """The rank with the largest error; of a closed form the one that needs most."""
        if self.predicted.how == "closed form":
            return max(self.measured.ranks, key=lambda rank: rank.peak), self.predicted.ranks[0]
        return max(self.pairs, key=lambda pair: abs(error_of(*pair)))

    @property
    def error(self) -> float | None:
        """Predicted over measured peak, less 1; ``None`` where one of them is missing."""
        return error_of(*self.worst) if self.pairs else None

    @property
    def missed(self) -> bool:
        """Whether the error is beyond what it should be."""
        return self.error is None or abs(self.error) > (AIM if self.predicted.how == "closed form" else LIMIT)

    @property
    def wrong_states(self) -> list[str]:
        """Kinds of model states that are not predicted to the byte on some rank, with both figures."""
        wrong = []
        for measured, said in self.pairs:
            for kind, bytes_said in said.states.items():
                held = measured.states[kind]
                if kind == "optimizer" and self.predicted.how == "simulated":
                    held += measured.counters
                if kind == "gradients" and self.measured.case.strategy in ("zero1", "zero2"):
                    if self.measured.case.strategy == "zero1":
                        continue  # whole while backward runs, and no longer whole when it ends
                    held = measured.used_of_gradients
                if held != bytes_said:
                    wrong.append(f"{kind} of rank {said.rank}: {held:,} B, predicted {bytes_said:,.0f}")
        return wrong

    @property
    def wrong_payload(self) -> list[str]:
        """Ranks whose payload is not predicted to the element, with both figures."""
        return [
            f"rank {said.rank}: {measured.payload:,}, predicted {said.payload:,.0f}"
            for measured, said in self.pairs
            if measured.payload != said.payload
        ]


def error_of(measured: Rank, said: PredictedRank) -> float:
    """Relative error of the peak."""
    return said.peak / measured.peak - 1


# --- as text ---


def megabytes(size: float) -> str:
    """In MB of 10^6 bytes."""
    return f"{size / 1e6:.3f}"


def measured_lines(results: Sequence[Measured]) -> list[str]:
    """Lines of Markdown: what was measured, a line a rank."""
    lines = [
        "| case | rank | start | peak | spread | largest in | " + " | ".join(STATES) + " | payload | sent |",
        "|---|---:|---:|---:|---:|---|" + "---:|" * (len(STATES) + 2),
    ]
    for result in results:
        if result.error:
            lines.append(f"| {result.case} | | {result.error[:100]} |" + " |" * (len(STATES) + 5))
        for rank in result.ranks:
            backward = sum(peak.backward >= peak.optimizer for peak in rank.peaks) > len(rank.peaks) / 2
            states = " | ".join(f"{rank.states[kind]:,}" for kind in STATES)
            lines.append(
                f"| {result.case} | {rank.rank} | {rank.start:,} | {rank.peak:,} | {rank.spread:,} |"
                f" {'backward' if backward else 'optimizer'} | {states} | {rank.payload:,} | {rank.sent:,.1f} |"
            )
    return lines


def row_line(row: Row) -> str:
    """A line of the table."""
    case = row.measured.case
    name = f"{case.strategy}{' + checkpointing' * case.checkpointing}"
    head = f"| {case.model} | {name} | {case.ranks} | {case.precision} |"
    if row.error is None:
        return f"{head} | | | **none** | | | {(row.measured.error or row.predicted.error)[:120]} |"
    measured, said = row.worst
    percent = f"{100 * row.error:+.2f} %"
    return (
        f"{head} {megabytes(measured.peak)} | {megabytes(measured.spread)} | {megabytes(said.peak)} |"
        f" {f'**{percent}**' if row.missed else percent} | {'no' if row.wrong_states else 'yes'} |"
        f" {'no' if row.wrong_payload else 'yes'} |"
    )


def table(rows: Iterable[Row]) -> list[str]:
    """Lines of Markdown: a case a line, the worst first."""
    worst_first = sorted(rows, key=lambda row: -abs(row.error) if row.error is not None else -1e9)
    return [
        "| model | strategy | ranks | precision | measured MB | spread | predicted MB | error | states | payload |",
        "|---|---|---:|---|---:|---:|---:|---:|---|---|",
        *map(row_line, worst_first),
    ]


def summary(rows: Sequence[Row]) -> list[str]:
    """Lines of Markdown: a strategy a line."""
    lines = [
        "| strategy | how | cases | median error | worst error | misses | states exact | payload exact |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for strategy in STRATEGIES:
        some = [row for row in rows if row.measured.case.strategy == strategy]
        if not some:
            continue
        errors = sorted((row.error for row in some if row.error is not None), key=abs)
        middle = f"{100 * abs(errors[len(errors) // 2]):.2f} %" if errors else "none"
        worst = f"{100 * errors[-1]:+.2f} %" if errors else "none"
        states, payload = (
            sum(bool(row.pairs) and not wrong for row, wrong in ((row, getattr(row, name)) for row in some))
            for name in ("wrong_states", "wrong_payload")
        )
        missed = sum(row.missed for row in some)
        lines.append(
            f"| {strategy} | {some[0].predicted.how} | {len(some)} | {middle} | {worst} | {missed} |"
            f" {states} of {len(some)} | {payload} of {len(some)} |"
        )
    return lines


def inexact(rows: Iterable[Row]) -> list[str]:
    """Lines of Markdown: what is not exact, and by how much."""
    lines = []
    for row in rows:
        wrong = [*row.wrong_states, *(f"payload of {text}" for text in row.wrong_payload)]
        if wrong:
            more = f"; and {len(wrong) - 2} more" if len(wrong) > 2 else ""
            lines.append(f"* {row.measured.case}: {'; '.join(wrong[:2])}{more}.")
    return ["", "## What is not exact", "", *lines] if lines else []


PAGE = """\
# The planner's figures beside real runs

`{command}`, on {date}, on a {cores}-core {machine} CPU, gloo, {versions}.

**Measured** is the most bytes of torch's CPU allocator that were alive at once in a training step, of all threads, to
the byte, on the rank with the largest error (of a closed form: the rank that needs most). Counting begins before the
module is made; steps after the second are measured, when optimizer states exist: the median of {steps} steps. *Spread*
is how far these are from each other: gloo's threads let go of what they worked on when they come to it. Device and host
are one memory here, so that offloaded states are part of the peak.
**Predicted** is what the planner says without running anything: `simulated` from the strategy's own code on tensors
without data, `closed form` for `ddp` and for DeepSpeed's engine. *States* and *payload* say whether model states were
predicted to the byte and collectives to the element. Bold errors are misses: beyond {limit:.0%}, of a closed form
beyond {aim:.0%}.

Nothing here was run on a GPU: kernels take other workspaces there, allocators round, and NCCL's buffers are not gloo's,
which puts a collective's elements into memory of its own.
Gradients of stage 1 are not compared: they are whole while backward runs, and no longer whole when it ends.

"""


def page(rows: Sequence[Row], command: str) -> str:
    """The whole document."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "deepspeed"))
    head = PAGE.format(
        command=command,
        date=datetime.now(UTC).date(),
        cores=os.cpu_count(),
        machine=platform.machine(),
        versions=versions,
        steps=MEASURED,
        limit=LIMIT,
        aim=AIM,
    )
    missed = sum(row.missed for row in rows)
    count = f"{len(rows)} cases, {missed} of them misses."
    return head + "\n".join(
        [*summary(rows), "", count, "", "## Every case, the worst first", "", *table(rows), *inexact(rows), ""]
    )


# --- the command line ---


def read(path: Path) -> dict[Case, Measured]:
    """Measurements of an earlier run."""
    found = {}
    for entry in json.loads(path.read_text()) if path.exists() else []:
        case = Case(**entry.pop("case"))
        ranks = [Rank(**{**rank, "peaks": [Peak(**peak) for peak in rank["peaks"]]}) for rank in entry.pop("ranks")]
        found[case] = Measured(case=case, ranks=ranks, **entry)
    return found


def save(path: Path, results: Iterable[Measured]) -> None:
    """Write measurements, so that a later run need not make them again."""
    path.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def command(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The command that makes these cases anew."""
    chosen = {name: getattr(options, name) for name in ("models", "strategies", "ranks", "precisions")}
    parts = [
        f"--{name} {' '.join(map(str, values))}"
        for name, values in chosen.items()
        if values != parser.get_default(name)
    ]
    return " ".join(["python benchmarks/plan_accuracy.py", *parts])


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, measure, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=TABLE)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=RANKS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--json", type=Path, metavar="PATH", help="keep measurements here; what is there is not redone")
    parser.add_argument("--measure-only", action="store_true", help="do not ask the planner")
    parser.add_argument("--write", type=Path, metavar="PATH", help="write the document instead of printing it")
    options = parser.parse_args(arguments)
    cases = list(all_cases(options.models, options.strategies, options.ranks, options.precisions))
    known = read(options.json) if options.json else {}
    rows: list[Row] = []
    for number, case in enumerate(cases, 1):
        if case not in known or known[case].error:
            known[case] = measure(case)
            if options.json:
                save(options.json, known.values())
        note = f"{number}/{len(cases)} {case}: {known[case].error or f'{known[case].seconds:.0f} s'}"
        if not options.measure_only:
            rows.append(Row(measured=known[case], predicted=predict(case)))
            error = rows[-1].error
            note += f", {rows[-1].predicted.error or 'no figures' if error is None else f'{100 * error:+.2f} %'}"
        print(note, file=sys.stderr, flush=True)
    if options.measure_only:
        text = "\n".join(measured_lines([known[case] for case in cases]))
    else:
        text = page(rows, command(options, parser))
    if options.write:
        options.write.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()

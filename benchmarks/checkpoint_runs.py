"""Save under one strategy, resume under another, and compare with one process: many pairs in few starts of the ranks.

A start of the ranks takes longer than a training of some steps, so that one start runs many, one after the other.
``benchmarks/checkpoint_matrix.py`` makes a table of all pairs, and the tests run a covering part of them.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.checkpoint_cases import ONE, SAVED_AFTER, STEPS, Ended, Under, train
from lightning_shard.testing import RankFailed, run_distributed

ABSOLUTE, RELATIVE = 5e-6, 1e-5
"""The tolerance of every comparison in fp32."""

JOBS_OF_A_START = 16
"""Trainings of one start of the ranks: process groups, which stay until a process ends, have threads."""

# --- comparison ---


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one rank's end is from that of one process."""

    losses: list[float]
    """Of the steps after the checkpoint, of this rank's rows."""

    weights: float
    """The largest of all weights and buffers."""

    moments: float
    """The largest of all optimizer states but step counts."""

    steps: list[float]
    """The step counts that were found, each once."""

    excess: float
    """The largest difference as a share of the tolerance: 1 is the limit."""


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> tuple[float, float]:
    """The largest difference, and the largest as a share of the tolerance.

    Raises:
        ValueError: If names or shapes differ.

    """
    if found.keys() != expected.keys():
        raise ValueError(f"{what}: one has {sorted(found.keys() ^ expected.keys())[:4]}, the other has not.")
    largest, excess = 0.0, 0.0
    for name, value in expected.items():
        if found[name].shape != value.shape:
            raise ValueError(f"{what}: {name!r} is {tuple(found[name].shape)} instead of {tuple(value.shape)}.")
        if value.numel():
            off = (found[name].double() - value.double()).abs().nan_to_num(nan=float("inf"))
            largest = max(largest, float(off.max()))
            excess = max(excess, float((off / (ABSOLUTE + RELATIVE * value.double().abs())).max()))
    return largest, excess


def compare(ended: Ended, expected: Ended) -> Difference:
    """One rank's end and that of one process."""
    flat = [
        {f"{name}: {key}": value for name, state in each.optimizer.items() for key, value in state.items()}
        for each in (ended, expected)
    ]
    found, wanted = ({key: value for key, value in each.items() if not key.endswith(": step")} for each in flat)
    weights, excess = differences(ended.weights, expected.weights, "weights")
    moments, excess_of_moments = differences(found, wanted, "optimizer states")
    return Difference(
        losses=ended.losses[-(STEPS - SAVED_AFTER) :],
        weights=weights,
        moments=moments,
        steps=sorted({float(value) for key, value in flat[0].items() if key.endswith(": step")}),
        excess=max(excess, excess_of_moments),
    )


# --- many in one start ---


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training: from the start to the step at which it is saved, or from there to the end."""

    model: str
    """A key of `MODELS`."""

    under: Under
    """Under what it runs."""

    path: str
    """The checkpoint."""

    saves: bool
    """Whether it writes the checkpoint; else it resumes from it."""


def uninterrupted(models: Iterable[str]) -> dict[str, Ended]:
    """Every model in one process without a stop."""

    def all_of_them(names: list[str]) -> dict[str, Ended]:
        return {name: train(name, Under(strategy=ONE, ranks=1), STEPS) for name in names}

    return run_distributed(all_of_them, 1, list(models))[0]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one pair of strategies gave."""

    model: str
    """The model's name."""

    saved: str
    """What the checkpoint was saved under."""

    resumed: str
    """What went on from it."""

    losses: float | None = None
    """The largest difference of the last steps' losses, each the mean over all rows."""

    weights: float | None = None
    """The largest difference of a weight or buffer, on any rank."""

    moments: float | None = None
    """The largest difference of an optimizer state."""

    steps: list[float] | None = None
    """The step counts that were found, each once."""

    error: str | None = None
    """Why there are no numbers."""

    verdict: str
    """``same``, ``differs`` or ``error``."""

    @property
    def largest(self) -> float:
        """The largest of all differences."""
        assert self.losses is not None and self.weights is not None and self.moments is not None
        return max(self.losses, self.weights, self.moments)


def run_jobs(jobs: Sequence[Job], expected: Mapping[str, Ended], notes: Path) -> None:
    """Every job on this rank; a line for each that has ended, so that what was done survives a failure."""
    with (notes / f"{os.environ['RANK']}.jsonl").open("a") as file:
        for job in jobs:
            if job.saves:
                train(job.model, job.under, SAVED_AFTER, save=job.path)
                line = {}
            else:
                line = asdict(compare(train(job.model, job.under, STEPS, load=job.path), expected[job.model]))
            print(json.dumps(line), file=file, flush=True)


def run_all(jobs: Sequence[Job], expected: Mapping[str, Ended]) -> dict[Job, list[Difference] | str | None]:
    """Run jobs in few starts of the ranks; an error ends its own job alone, and the ranks start again.

    Returns:
        By job each rank's difference, ``None`` for one that saved, or the error's text.

    """
    found: dict[Job, list[Difference] | str | None] = {}
    for ranks in sorted({job.under.ranks for job in jobs}):
        left = [job for job in jobs if job.under.ranks == ranks]
        while left:
            started = left[:JOBS_OF_A_START]
            with TemporaryDirectory() as folder:
                failure = None
                try:
                    run_distributed(run_jobs, ranks, started, expected, Path(folder), timeout=180.0)
                except RankFailed as error:
                    failure = str(error)
                files = [Path(folder, f"{rank}.jsonl") for rank in range(ranks)]
                lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
            done = min(map(len, lines))
            for number, job in enumerate(started[:done]):
                found[job] = None if job.saves else [Difference(**json.loads(rank[number])) for rank in lines]
            if failure is not None and done < len(started):
                found[started[done]] = failure
                done += 1
            left = left[done:]
    return found


def result_of(job: Job, saved: Under, found: list[Difference] | str, expected: Ended) -> Result:
    """All ranks' differences of a job that resumed, in one result."""
    if isinstance(found, str):
        return Result(model=job.model, saved=str(saved), resumed=str(job.under), error=found, verdict="error")
    mean = torch.tensor([rank.losses for rank in found], dtype=torch.float64).mean(0)  # all have as many rows
    wanted = torch.tensor(expected.losses[-(STEPS - SAVED_AFTER) :], dtype=torch.float64)
    losses, excess = differences({"loss": mean}, {"loss": wanted}, "losses")
    steps = sorted({step for rank in found for step in rank.steps})
    same = max([excess, *(rank.excess for rank in found)]) <= 1 and steps == [float(STEPS)]
    return Result(
        model=job.model,
        saved=str(saved),
        resumed=str(job.under),
        losses=losses,
        weights=max(rank.weights for rank in found),
        moments=max(rank.moments for rank in found),
        steps=steps,
        verdict="same" if same else "differs",
    )


def measure(pairs: Sequence[tuple[str, Under, Under]], folder: Path) -> list[Result]:
    """Save and resume every pair.

    Args:
        pairs: A model's name, what is saved under, and what is resumed under.
        folder: For the checkpoints.

    """
    expected = uninterrupted(dict.fromkeys(model for model, _, _ in pairs))
    paths = {(model, saved): str(folder / f"{model} {saved}.ckpt") for model, saved, _ in pairs}
    saves = {key: Job(model=key[0], under=key[1], path=path, saves=True) for key, path in sorted(paths.items())}
    written = run_all(list(saves.values()), expected)
    resumes = {
        pair: Job(model=pair[0], under=pair[2], path=paths[pair[:2]], saves=False)
        for pair in pairs
        if written[saves[pair[:2]]] is None
    }
    ended = run_all(list(resumes.values()), expected)
    results = []
    for pair in pairs:
        model, saved, resumed = pair
        if pair in resumes:
            found = ended[resumes[pair]]
            assert found is not None
            results.append(result_of(resumes[pair], saved, found, expected[model]))
        else:
            error = written[saves[model, saved]]
            assert isinstance(error, str)
            results.append(
                Result(model=model, saved=str(saved), resumed=str(resumed), error=f"Saving: {error}", verdict="error")
            )
    return results

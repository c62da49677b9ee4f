"""One training step of a strategy's own code on one rank of many, without the others, and without memory.

A child process becomes that rank of a process group whose other ranks do not exist, and a Trainer with the strategy
itself trains a copy of the module on tensors that have shapes but no data. Every allocation goes through a ledger, and
every collective is counted. A child, because what it does to torch cannot be undone, and because some errors of fake
tensors end a process.
"""

import os
import pickle
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_shard._compat.groups import groups_hidden
from lightning_shard.plan.ledger import Moments, peak
from lightning_shard.plan.repeats import SHORT, Repeats, extend, line
from lightning_shard.plan.results import Memory

SINGLE = "single"
"""Name of the strategy that trains in one process, as a part of what others cost."""


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """What is simulated."""

    strategy: str
    """A registered name, or ``SINGLE``."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments on top of those that the name stands for."""

    world_size: int
    """Ranks."""

    rank: int = 0
    """Which of them is looked at."""

    precision: str = "32-true"
    """As in ``Trainer(precision=...)``."""

    gradient_clip_val: float | None = None
    """As in the Trainer."""

    accumulate_grad_batches: int = 1
    """As in the Trainer."""

    like_cuda: bool = False
    """Whether to imitate a GPU: optimizers that take lists of tensors, and memory in pieces of 512 bytes."""

    checkpointed: tuple[str, ...] = ()
    """Modules whose activations are recomputed, where the strategy has no option for that."""

    repeats: Repeats | None = None
    """Equal blocks of which only some are simulated."""

    blocks: int = 0
    """How many of them."""

    reached: frozenset[str] | None = None
    """Names of the parameters to which backward gives gradients, where they are known: the optimizers' states are then
    there without a step of their own."""

    states_only: bool = False
    """Whether the optimizers' states are all that is wanted, and no step is run."""

    timeout: float = 600.0
    """Seconds after which the simulation is given up."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a step did on the rank."""

    peak: Memory
    """Bytes on the device when they were most."""

    segments: Mapping[str, Memory]
    """The same for each part of the step: blocks' forwards and backwards, the optimizer's step."""

    moments: Mapping[str, Moments] = field(default_factory=dict)
    """For each part the bytes by kind after each change; of a step in one process, and where only some of the blocks
    were simulated."""

    held: Memory
    """Bytes on the device between backward and the optimizer's step, when all model states are there."""

    payload_elements: float
    """What the rank communicated, in the ZeRO paper's count."""

    sent_elements: float
    """What it sent for that on a ring."""

    optimizer_bytes: Mapping[str, int] = field(default_factory=dict)
    """By name of a trained parameter, what the optimizers keep for all of it, on however many ranks; counters aside."""

    optimizer_groups: tuple[tuple[str, ...], ...] = ()
    """Names of the parameters in each group of the optimizers."""

    optimizers: tuple[str, ...] = ()
    """The optimizers' classes."""

    reached: frozenset[str] = frozenset()
    """Names of the parameters here to which backward gave gradients."""

    states_made: bool = True
    """Whether the optimizers could be stepped; else ``optimizer_bytes`` says nothing."""

    engine_refusal: str = ""
    """Why ZeRO's engine would refuse the optimizers, of a step in one process; empty if it would not."""

    seconds: float
    """How long the simulation took."""


class SimulationFailed(RuntimeError):
    """A strategy's code could not be run without data; the message says where."""


def simulate(module: "pl.LightningModule", batch: Any, options: SimulationOptions) -> Simulation:
    """Run one optimizer step, after one that is not counted, and tell its peak.

    Where ``options.repeats`` says so, only short models are run, and the rest follows (see ``repeats.py``).

    Args:
        module: The module; it is not changed. Its tensors may be on any device, real, fake or meta.
        batch: What one rank gets for one call of ``training_step``.
        options: What to simulate.

    Raises:
        SimulationFailed: If the step wants values of tensors, or anything else fails in the child.

    """
    (found,) = simulate_each(module, batch, [options])
    if isinstance(found, SimulationFailed):
        raise found
    return found


def simulate_each(
    module: "pl.LightningModule", batch: Any, wanted: Sequence[SimulationOptions]
) -> "list[Simulation | SimulationFailed]":
    """The same for several, as many at a time as there are processors. Failures are returned in their places."""
    runs = [
        (place, replace(options, blocks=blocks))
        for place, options in enumerate(wanted)
        for blocks in (SHORT if options.repeats is not None else (0,))
    ]
    answers: dict[int, list[Simulation | SimulationFailed]] = {place: [] for place in range(len(wanted))}
    width = max(1, os.cpu_count() or 1)
    for first in range(0, len(runs), width):
        started = [(place, options, _start(module, batch, options)) for place, options in runs[first : first + width]]
        for place, options, child in started:
            answers[place].append(_finish(*child, options))
    return [_together(answers[place], options) for place, options in enumerate(wanted)]


def _together(
    answers: "Sequence[Simulation | SimulationFailed]", options: SimulationOptions
) -> "Simulation | SimulationFailed":
    for answer in answers:
        if isinstance(answer, SimulationFailed) or options.repeats is None:
            return answer
    few, more = answers
    assert isinstance(few, Simulation) and isinstance(more, Simulation)
    repeats = options.repeats
    assert repeats is not None
    try:
        moments = extend(few.moments, more.moments, repeats.count)
    except ValueError as error:
        return SimulationFailed(str(error))
    steps = repeats.count - SHORT[0]
    segments = {segment: peak(found) for segment, found in moments.items()}
    return Simulation(
        peak=max(segments.values(), key=lambda memory: memory.total),
        segments=segments,
        moments=moments,
        held=line(few.held, more.held, steps),
        payload_elements=few.payload_elements + steps * (more.payload_elements - few.payload_elements),
        sent_elements=few.sent_elements + steps * (more.sent_elements - few.sent_elements),
        optimizer_bytes=_of_all_blocks(more.optimizer_bytes, repeats),
        optimizer_groups=tuple(_names_of_all_blocks(group, repeats) for group in more.optimizer_groups),
        optimizers=more.optimizers,
        states_made=few.states_made and more.states_made,
        engine_refusal=more.engine_refusal,
        reached=frozenset(_of_all_blocks(dict.fromkeys(more.reached, 0), repeats)),
        seconds=max(few.seconds, more.seconds),
    )


def _of_all_blocks(by_name: Mapping[str, int], repeats: Repeats) -> dict[str, int]:
    first = f"{repeats.names[0]}."
    inside = {name.removeprefix(first): value for name, value in by_name.items() if name.startswith(first)}
    added = {f"{block}.{name}": value for block in repeats.names[SHORT[1] :] for name, value in inside.items()}
    return {**by_name, **added}


def _names_of_all_blocks(group: Sequence[str], repeats: Repeats) -> tuple[str, ...]:
    """The names in their order, the left out blocks' behind the last of the others."""
    first, last = f"{repeats.names[0]}.", f"{repeats.names[SHORT[1] - 1]}."
    inside = [name.removeprefix(first) for name in group if name.startswith(first)]
    place = max((number for number, name in enumerate(group) if name.startswith(last)), default=-1) + 1
    added = [f"{block}.{name}" for block in repeats.names[SHORT[1] :] for name in inside]
    return (*group[:place], *added, *group[place:])


def _start(module: "pl.LightningModule", batch: Any, options: SimulationOptions) -> tuple[int, int]:
    """A child that simulates, and the pipe that it will answer through."""
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        # Python 3.12 warns of forks beside threads. The child uses none of their locks: it computes in one thread, logs
        # nothing, and ends without cleaning up.
        child = os.fork()
    if not child:
        os.close(read_end)
        _be_the_child(module, batch, options, write_end)
    os.close(write_end)
    return read_end, child


def _finish(pipe: int, child: int, options: SimulationOptions) -> "Simulation | SimulationFailed":
    answer = _read(pipe, child, time.monotonic() + options.timeout)
    return answer if isinstance(answer, Simulation) else SimulationFailed(answer)


def _read(pipe: int, child: int, until: float) -> "Simulation | str":
    data = bytearray()
    try:
        while True:
            left = until - time.monotonic()
            ready, _, _ = select.select([pipe], [], [], max(0.0, left))
            if not ready:
                return "it took too long, and was ended"
            piece = os.read(pipe, 1 << 16)
            if not piece:
                break
            data += piece
    finally:
        os.close(pipe)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if not data:
        return f"the process that ran it ended with {os.waitstatus_to_exitcode(status)}"
    answer: Simulation | str = pickle.loads(bytes(data))
    return answer


def _be_the_child(module: "pl.LightningModule", batch: Any, options: SimulationOptions, pipe: int) -> None:
    """Simulate, answer, and end, whatever happens: nothing of the parent must run twice."""
    answer: Any = "it ended without an answer"
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):  # what the step prints, and what libraries say of a process that is a copy
            os.dup2(silence, output)
        torch.set_num_threads(1)
        from lightning_shard.plan.rank import run_rank

        with groups_hidden():  # those that the parent is in, whose other ranks are none of this one's
            answer = run_rank(module, batch, options)
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        with suppress(BaseException), os.fdopen(pipe, "wb") as stream:
            pickle.dump(answer, stream)
        os._exit(0)

"""The arithmetic of model states, traffic and bubbles: pure functions of numbers, without a process group.

Source of the model states and of the traffic: *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*
(Rajbhandari et al. 2020), sections 5 and 7; the paper's Ψ is ``parameters`` here and its N_d is ``ranks``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Stage = Literal[0, 1, 2, 3]
"""What ZeRO partitions: 0 nothing (plain data parallelism), 1 optimizer states and master copy, 2 gradients too,
3 parameters too. FSDP that reshards after forward is stage 3."""

FLAT_ALIGNMENT = 2
"""At stages 1 and 2 the engine pads a flat parameter group to a multiple of this many elements a rank."""


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes of the model states, or bytes per parameter of them."""

    parameters: float
    """The parameters that the forward computes with."""

    gradients: float
    """The gradients of the parameters."""

    master: float
    """The fp32 copy of the parameters that the optimizer updates; 0 where it updates the parameters themselves."""

    optimizer: float
    """What the optimizer keeps per parameter: for Adam its two moments."""

    @property
    def total(self) -> float:
        """Sum of the four."""
        return self.parameters + self.gradients + self.master + self.optimizer


MIXED_ADAM = ModelStates(parameters=2, gradients=2, master=4, optimizer=8)
"""Bytes per parameter of mixed precision with Adam: the paper's 16."""


def model_states(parameters: float, ranks: int, stage: Stage, per_parameter: ModelStates = MIXED_ADAM) -> ModelStates:
    """Model states of one rank, padding aside.

    With the paper's 16 bytes per parameter the totals are 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N for stages 0 to 3.

    Args:
        parameters: Number of parameters, Ψ.
        ranks: Ranks that share the model states, N.
        stage: What is partitioned.
        per_parameter: Bytes per parameter of each state.

    Returns:
        Bytes of each state on one rank.

    """
    share = parameters / ranks
    return ModelStates(
        parameters=per_parameter.parameters * (share if stage >= 3 else parameters),
        gradients=per_parameter.gradients * (share if stage >= 2 else parameters),
        master=per_parameter.master * (share if stage >= 1 else parameters),
        optimizer=per_parameter.optimizer * (share if stage >= 1 else parameters),
    )


def flat_partition(numels: Sequence[int], ranks: int) -> int:
    """Elements of one rank's partition of a parameter group at stages 1 and 2.

    The group is laid out as one flat tensor, padded at its end, and cut into equal parts.

    Args:
        numels: Elements of each parameter of the group.
        ranks: Number of partitions.

    Returns:
        Elements of a partition, padding included.

    """
    alignment = FLAT_ALIGNMENT * ranks
    return -(-sum(numels) // alignment) * FLAT_ALIGNMENT


def sharded_partition(numels: Sequence[int], ranks: int) -> int:
    """Elements of one rank's partition of parameters at stage 3, where each is cut, and padded, by itself.

    Args:
        numels: Elements of each parameter.
        ranks: Number of partitions.

    Returns:
        Elements of a partition, padding included.

    """
    return sum(-(-numel // ranks) for numel in numels)


def padded_rows(shapes: Iterable[Sequence[int]], ranks: int) -> int:
    """Elements of one rank's storage for parameters that FSDP2 shards: each is cut along its first dimension.

    Every rank stores ceil(rows / N) rows of a parameter, also one whose own rows are fewer or none, so that all can be
    gathered as they lie (Liang et al. 2024, *TorchTitan*; torch's documentation of ``fully_shard``). The gathered and
    the reduced tensor of a unit have N times as many elements.

    Args:
        shapes: Shape of each parameter, of one dimension or more.
        ranks: Ranks that share them, N.

    Returns:
        Elements, padding included; the same on every rank.

    """
    return sum(-(-rows // ranks) * math.prod(row) for rows, *row in shapes)


def own_rows(shape: Sequence[int], ranks: int, rank: int) -> int:
    """Elements of a parameter that FSDP2 leaves to one rank, without padding: what an optimizer keeps states for.

    The first ranks own ceil(rows / N) rows each, the next one what is left, and those after it nothing.

    Args:
        shape: The parameter's shape, of one dimension or more.
        ranks: Ranks that share it, N.
        rank: Which of them.

    Returns:
        Elements; over all ranks they add up to the parameter's.

    """
    rows, *row = shape
    share = -(-rows // ranks)
    return max(0, min(share, rows - rank * share)) * math.prod(row)


def exact_model_states(
    groups: Sequence[Sequence[int]],
    ranks: int,
    stage: Stage,
    per_parameter: ModelStates,
    frozen: Sequence[int] = (),
) -> ModelStates:
    """Model states of one rank to the byte, padding included.

    Args:
        groups: Elements of each trained parameter, by optimizer group.
        ranks: Ranks that share the model states.
        stage: What is partitioned.
        per_parameter: Bytes per parameter of each state.
        frozen: Elements of each parameter that is not trained; it has no state but itself.

    Returns:
        Bytes of each state on one rank.

    """
    match stage:
        case 0:
            whole = share = sum(sum(group) for group in groups)
        case 1 | 2:
            share = sum(flat_partition(group, ranks) for group in groups)
            whole = share * ranks
        case 3:
            whole = share = sum(sharded_partition(group, ranks) for group in groups)
    unchanged = sharded_partition(frozen, ranks) if stage == 3 else sum(frozen)
    return ModelStates(
        parameters=per_parameter.parameters * (whole + unchanged),
        gradients=per_parameter.gradients * (whole if stage == 1 else share),
        master=per_parameter.master * share,
        optimizer=per_parameter.optimizer * share,
    )


def optimizer_elements(name: str, options: Mapping[str, Any]) -> int:
    """Elements that an optimizer keeps per parameter.

    Args:
        name: The optimizer's class name.
        options: Its options as in ``optimizer.defaults`` or a parameter group.

    Returns:
        Elements per parameter; counters that are one number per tensor are not counted.

    Raises:
        ValueError: If the optimizer is not known.

    """
    match name:
        case "SGD":
            return 1 if options.get("momentum") else 0
        case "Adam" | "AdamW" | "FusedAdam" | "DeepSpeedCPUAdam":
            return 3 if options.get("amsgrad") else 2
        case "NAdam" | "RAdam" | "Adamax" | "Adadelta" | "Rprop":
            return 2
        case "Adagrad" | "ASGD" | "Lion" | "DeepSpeedCPUAdagrad" | "FusedLion" | "DeepSpeedCPULion":
            return 1
        case "RMSprop":
            return 1 + bool(options.get("momentum")) + bool(options.get("centered"))
        case _:
            raise ValueError(
                f"How many elements {name} keeps per parameter is not known: pass the number yourself"
                " (optimizer_elements=...)."
            )


def payload_elements(parameters: float, stage: Stage, reshard: bool = True) -> float:
    """Traffic of one rank and step in the paper's count: an all-reduce of n elements is 2n, a gather or scatter n.

    Args:
        parameters: Number of parameters, Ψ.
        stage: What is partitioned.
        reshard: At stage 3, whether gathered parameters are dropped after forward and gathered again for backward.

    Returns:
        Elements: 3Ψ where parameters are gathered twice, else 2Ψ.

    """
    return (3 if stage == 3 and reshard else 2) * parameters


def sent_elements(payload: float, ranks: int) -> float:
    """Elements that a rank sends on a ring for a payload in the paper's count."""
    return payload * (ranks - 1) / ranks


def bubble(stages: int, microbatches: int) -> float:
    """Share of a pipeline step in which a stage is idle, for GPipe and 1F1B: (p - 1) / (m + p - 1).

    Args:
        stages: Pipeline stages, p.
        microbatches: Microbatches per step, m.

    Returns:
        Idle over total, in [0, 1).

    """
    return (stages - 1) / (microbatches + stages - 1)

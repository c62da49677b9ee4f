"""Bytes per parameter: what precision, optimizer and engine make of a parameter, its gradient and its states."""

from difflib import get_close_matches
from typing import Any, Literal

from lightning_shard.plan.arithmetic import ModelStates, Stage, optimizer_elements

Engine = Literal["torch", "deepspeed"]
"""Who trains: torch itself (``ddp``, FSDP2, pipelines), or DeepSpeed's engine (ZeRO)."""

STORED: dict[str, int] = {
    "32-true": 4,
    "bf16-mixed": 4,
    "16-mixed": 4,
    "bf16-true": 2,
    "16-true": 2,
    "64-true": 8,
}
"""Precisions of the Trainer, and bytes of a stored weight where torch itself trains."""

COMPUTED: dict[str, int] = {**STORED, "bf16-mixed": 2, "16-mixed": 2}
"""Bytes of a weight that FSDP2 gathers, or that the engine stores."""

REFUSED: dict[str, dict[str, str]] = {
    "zero": {"64-true": "DeepSpeed's engine does not train in float64"},
    "fsdp2": {
        "16-mixed": "FSDP2Strategy has no loss scaler that all shards agree on",
        "64-true": "FSDP2Strategy does not train in float64",
    },
    "pipeline": {
        "16-mixed": "a loss scaler would decide on each stage by itself whether to skip a step",
        "16-true": "PipelineStrategy does not train in float16",
    },
}
"""Precisions that a family of strategies refuses, and why; a family is the beginning of the names."""

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "adam-amsgrad": ("Adam", {"amsgrad": True}),
    "adamw-amsgrad": ("AdamW", {"amsgrad": True}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "adamax": ("Adamax", {}),
    "adadelta": ("Adadelta", {}),
    "adagrad": ("Adagrad", {}),
    "asgd": ("ASGD", {}),
    "lion": ("Lion", {}),
    "rmsprop": ("RMSprop", {}),
    "rmsprop-momentum": ("RMSprop", {"momentum": 0.9}),
    "rprop": ("Rprop", {}),
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
}
"""Optimizers by the names that users write: class and the options that decide what it keeps."""


def check_precision(precision: str) -> None:
    """Refuse what is no precision that is known.

    Raises:
        ValueError: With the precisions that are.

    """
    if precision not in STORED:
        near = get_close_matches(str(precision), STORED, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"precision={precision!r} is not known.{hint} Choose one of {', '.join(STORED)}.")


def unified(precision: str | int | None) -> str:
    """The precision's full name: Trainers take ``32``, ``"bf16"`` and ``None``, too."""
    short = {"None": "32-true", "64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
    return short.get(str(precision), str(precision))


def elements_of_optimizer(name: str) -> int:
    """Elements that an optimizer keeps per parameter.

    Args:
        name: One of :data:`OPTIMIZERS`; upper and lower case are equal.

    Raises:
        ValueError: If it is none; with the names that there are.

    """
    known = OPTIMIZERS.get(str(name).lower())
    if known is None:
        near = get_close_matches(str(name).lower(), OPTIMIZERS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"optimizer={name!r} is not known.{hint} Choose one of {', '.join(OPTIMIZERS)}.")
    return optimizer_elements(*known)


def bytes_per_parameter(
    engine: Engine, precision: str, elements: int, *, offloaded: bool = False, stage: Stage = 0
) -> ModelStates:
    """Bytes per parameter of each model state, before anything is partitioned.

    Where torch itself trains, weights, gradients and optimizer states have the dtype of the module: fp32 under
    ``bf16-mixed``, too. DeepSpeed's engine stores weights and gradients in what it computes in, and keeps an fp32
    master copy and fp32 optimizer states at every precision, also at ``32-true``. Both come to 16 with mixed
    precision and Adam, as in the ZeRO paper (Rajbhandari et al. 2020, section 3.1).

    Args:
        engine: Who trains.
        precision: As in ``Trainer(precision=...)``.
        elements: Elements that the optimizer keeps per parameter.
        offloaded: Whether the engine's optimizer is offloaded, which then keeps fp32 gradients of its own; at stage 3
            those that the backward leaves come on top (docs/zero.md, "Offload").
        stage: ZeRO stage.

    Raises:
        ValueError: If the precision is not known, or is one that the engine refuses.

    """
    check_precision(precision)
    if engine == "torch":
        size = STORED[precision]
        return ModelStates(parameters=size, gradients=size, master=0, optimizer=size * elements)
    if reason := refusal("zero", precision):
        raise ValueError(f"precision={precision!r}: {reason}.")
    size = COMPUTED[precision]
    gradients = 4 + (size if stage == 3 else 0) if offloaded else size
    return ModelStates(parameters=size, gradients=gradients, master=4, optimizer=4 * elements)


def refusal(name: str, precision: str) -> str:
    """Why a strategy refuses a precision; ``""`` if it does not.

    Args:
        name: A strategy's name, or its beginning.
        precision: As in ``Trainer(precision=...)``.

    """
    return next((why.get(precision, "") for family, why in REFUSED.items() if name.startswith(family)), "")

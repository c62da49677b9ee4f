"""Which dtypes a unit computes and reduces in."""

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils.parametrize import ParametrizationList

from lightning_shard.config import MixedPrecision

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")
"""What ``Trainer(precision=...)`` may be."""


def check_precision(precision: str, mixed_precision: MixedPrecision | None) -> None:
    """Refuse a precision that the units cannot have.

    Args:
        precision: The Trainer's.
        mixed_precision: The strategy's own option.

    Raises:
        MisconfigurationException: Naming the precision and those that work, or the option that contradicts it.

    """
    if precision not in PRECISIONS:
        raise MisconfigurationException(
            f"Trainer(precision={precision!r}) does not work with FSDP2Strategy. Choose one of"
            f" {', '.join(map(repr, PRECISIONS))}."
        )
    if precision == "bf16-mixed" and mixed_precision is not None and mixed_precision.compute != "bf16":
        raise MisconfigurationException(
            f"Trainer(precision='bf16-mixed') computes in bf16, FSDP2Strategy(mixed_precision=MixedPrecision(compute="
            f"{mixed_precision.compute!r})) does not. Leave one of them out."
        )


def make_policy(precision: str, mixed_precision: MixedPrecision | None) -> MixedPrecisionPolicy:
    """FSDP2's policy for the Trainer's precision, or for the strategy's own option.

    Under ``bf16-mixed`` weights are gathered in bf16 and gradients reduced in fp32, while operators choose their dtype
    as in one process, by autocast: a loss on bf16 activations is then computed in fp32, and a step may mix its own fp32
    tensors with the module's. Without autocast the inputs of each unit are cast instead.
    """
    autocast = precision == "bf16-mixed"
    if mixed_precision is None:
        mixed_precision = MixedPrecision() if autocast else None
    if mixed_precision is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=_DTYPES[mixed_precision.compute],
        reduce_dtype=_DTYPES[mixed_precision.reduce],
        # For the root only: a unit inside would hand a tensor of another dtype on to the next one.
        output_dtype=_DTYPES[mixed_precision.output],
        cast_forward_inputs=not autocast,
    )


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_WITH_STATISTICS = (*_BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, *_WITH_STATISTICS)


def stays_fp32(module: nn.Module, policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """Parameters that must not be gathered in another dtype, and are so few that every rank keeps them whole.

    Autocast leaves the weights of normalisations in fp32, where their operators meet fp32 inputs; those with running
    statistics need weights of the statistics' dtype in any case, and so do parametrizations that keep buffers
    (spectral normalisation).

    Args:
        module: A unit.
        policy: Its policy.

    """
    if policy.param_dtype is None:
        return set()
    autocast = not policy.cast_forward_inputs
    kept: set[nn.Parameter] = set()
    for submodule in module.modules():
        spectral = isinstance(submodule, ParametrizationList) and any(True for _ in submodule.buffers())
        if spectral or isinstance(submodule, _NORMS if autocast else _WITH_STATISTICS):
            kept.update(submodule.parameters())
    return kept

"""Dtypes of units."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_shard.config import MixedPrecision
from lightning_shard.units.policy import PRECISIONS, check_precision, make_policy


@pytest.mark.parametrize("precision", PRECISIONS)
def test_true_precisions_change_nothing_and_mixed_gathers_in_bf16(precision: str) -> None:
    check_precision(precision, None)
    policy = make_policy(precision, None)
    if precision == "bf16-mixed":
        # Operators choose by autocast, so inputs keep their dtype.
        assert policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, cast_forward_inputs=False)
    else:
        assert policy == MixedPrecisionPolicy()


def test_the_option_is_torchs_policy() -> None:
    policy = make_policy("32-true", MixedPrecision(compute="fp16", reduce="bf16", output="fp32"))
    assert policy == MixedPrecisionPolicy(torch.float16, torch.bfloat16, torch.float32, cast_forward_inputs=True)


@pytest.mark.parametrize("precision", ["64-true", "16-mixed", "transformer-engine"])
def test_other_precisions_are_refused_with_those_that_work(precision: str) -> None:
    with pytest.raises(
        MisconfigurationException, match=f"{precision}.*'32-true', 'bf16-mixed', 'bf16-true', '16-true'"
    ):
        check_precision(precision, None)


def test_two_compute_dtypes_are_refused() -> None:
    check_precision("bf16-mixed", MixedPrecision(compute="bf16", output="fp32"))
    with pytest.raises(MisconfigurationException, match=r"computes in bf16.*compute='fp16'"):
        check_precision("bf16-mixed", MixedPrecision(compute="fp16"))

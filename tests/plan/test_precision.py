"""Bytes per parameter, compared with what docs/zero.md and docs/fsdp2.md have measured."""

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.pipeline.guards import check_precision as pipeline_check
from lightning_shard.plan.precision import (
    STORED,
    bytes_per_parameter,
    check_precision,
    elements_of_optimizer,
    refusal,
    unified,
)
from lightning_shard.units.policy import PRECISIONS


@pytest.mark.parametrize(
    ("engine", "precision", "optimizer", "parts"),
    [
        ("deepspeed", "bf16-mixed", "adam", (2, 2, 4, 8)),
        ("deepspeed", "bf16-true", "adamw", (2, 2, 4, 8)),
        ("deepspeed", "32-true", "adam", (4, 4, 4, 8)),
        ("deepspeed", "32-true", "sgd", (4, 4, 4, 0)),
        ("torch", "bf16-mixed", "adam", (4, 4, 0, 8)),
        ("torch", "32-true", "adam", (4, 4, 0, 8)),
        ("torch", "32-true", "sgd", (4, 4, 0, 0)),
        ("torch", "32-true", "SGD-momentum", (4, 4, 0, 4)),
        ("torch", "bf16-true", "adam", (2, 2, 0, 4)),
        ("torch", "64-true", "adam", (8, 8, 0, 16)),
    ],
)
def test_bytes_per_parameter(engine, precision, optimizer, parts):
    each = bytes_per_parameter(engine, precision, elements_of_optimizer(optimizer))
    assert (each.parameters, each.gradients, each.master, each.optimizer) == parts


def test_an_offloaded_optimizer_has_gradients_of_its_own():
    assert bytes_per_parameter("deepspeed", "bf16-mixed", 2, offloaded=True, stage=2).gradients == 4
    assert bytes_per_parameter("deepspeed", "bf16-mixed", 2, offloaded=True, stage=3).gradients == 6
    assert bytes_per_parameter("deepspeed", "32-true", 2, offloaded=True, stage=3).gradients == 8


def test_what_is_refused_is_what_the_strategies_refuse():
    for precision in STORED:
        assert (refusal("fsdp2_grad", precision) == "") == (precision in PRECISIONS), precision
        assert refusal("ddp", precision) == ""
        try:
            pipeline_check(precision)
        except MisconfigurationException:
            assert refusal("pipeline_1f1b", precision), precision
        else:
            assert not refusal("pipeline_1f1b", precision), precision
    with pytest.raises(ValueError, match="float64"):
        bytes_per_parameter("deepspeed", "64-true", 2)


def test_short_names_of_precisions():
    assert [unified(name) for name in (None, 32, "32", "bf16", 16, "bf16-true")] == [
        *("32-true",) * 3,
        "bf16-mixed",
        "16-mixed",
        "bf16-true",
    ]


def test_unknown_names_are_refused_with_known_ones():
    with pytest.raises(ValueError, match=r"precision='bf16-mixd'.*Did you mean 'bf16-mixed'"):
        check_precision("bf16-mixd")
    with pytest.raises(ValueError, match=r"optimizer='adan'.*Did you mean 'adam'.*sgd-momentum"):
        elements_of_optimizer("adan")

"""The arithmetic table. Reference values are worked out by hand from the ZeRO paper's formulas."""

import pytest

from lightning_shard.plan.arithmetic import exact_model_states, payload_elements
from lightning_shard.plan.estimate import plan_parameters, plan_pipeline
from lightning_shard.plan.precision import bytes_per_parameter


def gigabytes(plan, name):
    return plan.named(name).model_states.total / 1e9


def test_reference_model_states():
    plan = plan_parameters(7e9, devices=8)
    expected = {"ddp": 112, "zero1": 38.5, "zero2": 26.25, "zero3": 14, "fsdp2": 14, "fsdp2_grad": 14}
    for name, size in expected.items():
        assert gigabytes(plan, name) == pytest.approx(size, rel=1e-12), name
    plan = plan_parameters(13e9, devices=16)
    assert gigabytes(plan, "zero1") == pytest.approx(61.75, rel=1e-12)
    assert gigabytes(plan, "zero3") == pytest.approx(13, rel=1e-12)


def test_reference_traffic():
    plan = plan_parameters(7e9, devices=8)
    twice, thrice = ("ddp", "zero1", "zero2", "fsdp2_grad", "zero1_offload"), ("zero3", "fsdp2", "zero3_offload")
    for name in twice:
        row = plan.named(name)
        assert (row.payload_elements, row.sent_elements, row.flops_fraction) == (14e9, 12.25e9, 1)
    for name in thrice:
        row = plan.named(name)
        assert (row.payload_elements, row.sent_elements, row.flops_fraction) == (21e9, 18.375e9, 1)


def test_traffic_of_a_million_parameters_on_four_ranks():
    """In fp32 6 MB a rank and step, 9 MB where parameters are gathered twice."""

    def megabytes(name, **options):
        return plan_parameters(1e6, devices=4, precision="32-true", **options).named(name).sent_elements * 4 / 1e6

    assert [megabytes(name) for name in ("ddp", "zero1", "zero2", "fsdp2_grad")] == [6.0] * 4
    assert [megabytes(name) for name in ("zero3", "fsdp2")] == [9.0] * 2

    # Four backwards a step: stage 3 gathers 8 times and reduces 4 times; stage 2 reduces 4 times, FSDP2 once.
    accumulated = {"ddp": 6.0, "zero1": 6.0, "zero2": 15.0, "zero3": 36.0, "fsdp2": 27.0, "fsdp2_grad": 15.0}
    for name, size in accumulated.items():
        assert megabytes(name, accumulate_grad_batches=4) == pytest.approx(size), name

    # With nine tenths frozen, gradients are of the last tenth; what is partitioned is gathered all the same.
    frozen = {"ddp": 0.6, "zero1": 0.6, "zero2": 0.6, "zero3": 6.3, "fsdp2": 6.3, "fsdp2_grad": 3.3}
    for name, size in frozen.items():
        assert megabytes(name, frozen=0.9e6) == pytest.approx(size), name


@pytest.mark.parametrize(("name", "stage"), [("ddp", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3), ("fsdp2", 3)])
def test_payloads_are_those_of_the_formula(name, stage):
    assert plan_parameters(12345, devices=5).named(name).payload_elements == payload_elements(12345, stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_frozen_parameters_have_no_state_but_themselves(stage, precision):
    """As in the formula that runs are compared with."""
    row = plan_parameters(3_000_000, frozen=1_000_000, devices=4, precision=precision).named(f"zero{stage}")
    each = bytes_per_parameter("deepspeed", precision, 2)
    assert row.model_states == exact_model_states([[2_000_000]], 4, stage, each, [1_000_000])


def test_precision_and_optimizer_count():
    plan = plan_parameters(1e9, devices=4, precision="32-true", optimizer="sgd")
    assert gigabytes(plan, "ddp") == 8  # weights and gradients
    assert gigabytes(plan, "fsdp2") == 2
    assert gigabytes(plan, "zero3") == 3  # and a master copy
    plan = plan_parameters(1e9, devices=4, precision="bf16-true")
    assert gigabytes(plan, "ddp") == 8
    assert gigabytes(plan, "zero3") == 4


def test_offload_moves_states_off_the_device():
    plan = plan_parameters(8e9, devices=4, memory_bytes="80GB")

    def held(name):
        row = plan.named(name)
        return row.device_bytes / 1e9, row.host_bytes / 1e9

    assert held("zero2_offload") == (16, 32)  # 2Ψ; 16Ψ/N: fp32 gradients, master copy, two moments
    assert held("zero1_offload") == (16, 32)
    assert held("zero3_offload") == (4, 36)  # 2Ψ/N; 18Ψ/N: the gradients that the backward leaves, too
    assert held("zero3_offload_params") == held("zero3_nvme") == (0, 40)
    assert held("fsdp2_offload") == (0, 32)
    assert plan.named("zero3_nvme").fits is None and "off the device" in plan.named("zero3_nvme").reason


def test_hybrid_shards_over_half_of_the_ranks():
    """Gathers and the reduce-scatter among four, then the all-reduce of a quarter between two."""
    row = plan_parameters(4e9, devices=8).named("fsdp2_hybrid")
    assert row.model_states.total == 16e9
    assert row.payload_elements == 3 * 4e9 + 2 * 1e9
    assert row.sent_elements == 3 * 4e9 * 3 / 4 + 2 * 1e9 * 1 / 2
    plan = plan_parameters(4e9, devices=7)
    with pytest.raises(KeyError, match="fsdp2_hybrid"):
        plan.named("fsdp2_hybrid")
    assert any("fsdp2_hybrid is left out" in note and "multiple of 2" in note for note in plan.notes)


def test_pipelines():
    row = plan_parameters(8e9, devices=8).named("pipeline_1f1b")
    assert (row.model_states.total, row.payload_elements, row.flops_fraction) == (16e9, 0, 1 / 8)
    row = plan_parameters(8e9, devices=8, stages=4).named("pipeline_1f1b")
    assert (row.model_states.total, row.flops_fraction, row.settings) == (32e9, 1 / 4, {"stages": 4})
    assert (row.payload_elements, row.sent_elements) == (4e9, 2e9)  # two replicas average the gradients of a stage
    plan = plan_parameters(8e9, devices=4, microbatches=8)
    assert {each.schedule: each.bubble_fraction for each in plan.schedules}["1f1b"] == pytest.approx(3 / 11)
    plan = plan_parameters(8e9, devices=4, microbatches=3)
    assert any("pipeline_1f1b is left out" in note and "are 3" in note for note in plan.notes)
    assert plan_pipeline(4, 8).schedules[0].bubble_fraction == pytest.approx(3 / 11)


@pytest.mark.parametrize(
    ("memory", "name"),
    [
        ("113GB", "ddp"),
        ("112GB", "zero1"),  # nothing would be left
        ("38GB", "zero2"),
        ("26.25GB", "fsdp2"),  # fsdp2_grad has 14 GB of gathered parameters besides
        ("14GB", "zero3_offload"),
        ("1.75GB", None),
    ],
)
def test_the_choice_as_memory_shrinks(memory, name):
    plan = plan_parameters(7e9, devices=8, memory_bytes=memory)
    assert (plan.chosen and plan.chosen.name) == name
    fits = [row.fits is True for row in plan.strategies]
    assert fits == sorted(fits, reverse=True)


def test_margins_are_told_with_both_numbers():
    plan = plan_parameters(7e9, devices=8, device="h100")
    assert plan.named("zero1").reason == "38.5 GB of model states: 41.5 GB of 80 GB left for activations"
    assert plan.named("ddp").reason == "112 GB of model states: 32 GB more than the 80 GB of a device"
    assert "14 GB of gathered parameters" in plan.named("fsdp2_grad").reason
    assert any("Activations" in note for note in plan.notes)
    assert plan_parameters(7e9, devices=8, device="h100", memory_bytes="200GB").chosen.name == "ddp"


def test_nothing_is_judged_without_a_memory():
    plan = plan_parameters(7e9, devices=8)
    assert plan.chosen is None and all(row.fits is None for row in plan.strategies)


def test_fsdp2_that_accumulates_keeps_whole_gradients():
    once, often = (plan_parameters(1e9, devices=8, accumulate_grad_batches=k).named("fsdp2") for k in (1, 2))
    assert once.model_states.gradients == 0.5e9 and often.model_states.gradients == 4e9


def test_a_precision_that_a_strategy_refuses_leaves_it_out():
    plan = plan_parameters(7e9, devices=8, precision="16-mixed")
    names = [row.name for row in plan.strategies]
    assert not any(name.startswith(("fsdp2", "pipeline")) for name in names) and "zero3" in names
    assert sum("is left out" in note for note in plan.notes) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parameters": 0}, "parameters=0 must be at least 1"),
        ({"parameters": -7e9}, "parameters=-7e"),
        ({"parameters": float("nan")}, "parameters=nan must be a number"),
        ({"parameters": float("inf")}, "parameters=inf"),
        ({"parameters": 1.5}, r"parameters=1\.5 must be a whole number"),
        ({"parameters": 1e17}, r"parameters=1e\+17 must be .* at most 1e\+16"),
        ({"parameters": "7e9"}, "parameters='7e9'"),
        ({"frozen": 7e9}, "frozen=7,000,000,000 must be less than parameters=7,000,000,000"),
        ({"devices": 0}, "devices=0 must be at least 1"),
        ({"devices": 2.0}, r"devices=2\.0 must be a whole number"),
        ({"devices": 10**7}, "devices=10000000 must be at most"),
        ({"nodes": 3}, "devices=8 must be a multiple of nodes=3"),
        ({"nodes": 16}, "devices=8 must be a multiple of nodes=16"),
        ({"stages": 16}, "stages=16 must divide devices=8"),
        ({"stages": 3}, "stages=3 must divide devices=8"),
        ({"stages": 0}, "stages=0"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"device": "h10"}, "no device 'h10'"),
        ({"memory_bytes": "-3GB"}, "'-3GB' is no size"),
        ({"memory_bytes": float("nan")}, "nan is no size"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"optimizer": "magic"}, "optimizer='magic'"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0"),
    ],
)
def test_absurd_input_is_refused_by_name_and_number(arguments, message):
    given = {"parameters": 7e9, "devices": 8} | arguments
    with pytest.raises(ValueError, match=message):
        plan_parameters(given.pop("parameters"), **given)

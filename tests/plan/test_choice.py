"""Which strategy is taken: the least invasive that fits."""

from dataclasses import replace

from lightning_shard.plan.arithmetic import ModelStates
from lightning_shard.plan.choice import LEAST_INVASIVE, choose
from lightning_shard.plan.results import StrategyPlan
from lightning_shard.registry import NAMES


def strategy(name: str, fits: bool | None, **settings: object) -> StrategyPlan:
    states = ModelStates(parameters=1, gradients=1, master=0, optimizer=0)
    return StrategyPlan(
        name=name,
        settings=settings,
        model_states=states,
        payload_elements=0,
        sent_elements=0,
        flops_fraction=1,
        fits=fits,
    )


def test_every_name_has_its_place():
    assert set(LEAST_INVASIVE) == {"ddp", *NAMES} - {"auto_shard"}
    assert len(LEAST_INVASIVE) == len(set(LEAST_INVASIVE))


def test_the_least_invasive_that_fits_is_taken():
    shrinking = [
        "ddp",
        "zero1",
        "zero2",
        "fsdp2_grad",
        "fsdp2",
        "zero3",
        "zero2_offload",
        "zero3_offload",
        "zero3_nvme",
    ]
    for first in range(len(shrinking)):
        rows = [strategy(name, position >= first) for position, name in enumerate(shrinking)]
        for order in (rows, rows[::-1]):
            assert choose(order).name == shrinking[first]


def test_nothing_is_taken_where_nothing_is_known_to_fit():
    assert choose([strategy("ddp", False), strategy("zero3", None)]) is None
    assert choose([]) is None


def test_of_one_name_the_fewest_settings_and_then_the_first():
    bare, more = strategy("fsdp2", True), strategy("fsdp2", True, activation_checkpointing=True)
    assert choose([more, bare]) is bare
    twin = replace(bare)
    assert choose([twin, bare]) is twin


def test_a_name_that_has_no_place_comes_last():
    assert choose([strategy("my_own", True), strategy("zero3_nvme", True)]).name == "zero3_nvme"
    assert choose([strategy("my_own", True)]).name == "my_own"

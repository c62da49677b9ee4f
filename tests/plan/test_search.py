"""The search: every strategy and its degrees, what fits, what is taken."""

from dataclasses import replace
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

import lightning_shard
from lightning_shard.plan.choice import choose
from lightning_shard.plan.forms import DDP, Forms
from lightning_shard.plan.hardware import Device, device
from lightning_shard.plan.profile import profile_module
from lightning_shard.plan.results import Plan
from lightning_shard.plan.search import _judged, plan_module
from lightning_shard.plan.simulate import SINGLE, SimulationOptions
from lightning_shard.registry import AUTO, NAMES, PIPELINE
from tests.plan.modules import Late, Stack, tokens


def chip(memory: float = 1e9) -> Device:
    return replace(device("cpu"), memory_bytes=memory)


def make(module: Any = None, batch: Any = None, *, memory: float = 1e9, ranks: int = 4, **settings: Any) -> Plan:
    given = {"simulate": 0, "device": chip(memory), "devices": ranks, **settings}
    return plan_module(module if module is not None else Stack(), tokens() if batch is None else batch, **given)


@pytest.fixture(scope="module")
def whole() -> Plan:
    """All strategies of one module on four ranks."""
    return make(Stack(blocks=8))


def psi(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_every_strategy_is_planned_or_named(whole: Plan) -> None:
    names = {DDP, *(name for name, entry in NAMES.items() if entry.strategy != AUTO)}
    planned = {each.name for each in whole.strategies}
    assert names == planned | {note.split()[0] for note in whole.notes if "is left out" in note}
    assert {"fsdp2", "zero3", "pipeline_1f1b", "pipeline_dualpipev"} <= planned


def test_model_states_are_those_of_the_formulas(whole: Plan) -> None:
    """fp32 and Adam: 16 bytes a parameter, and 4 more for the engine's master copy; sizes here divide by four."""
    number = psi(Stack(blocks=8))
    assert whole.parameters == number
    expected = {"ddp": 16, "zero1": 8 + 12 / 4, "zero2": 4 + 16 / 4, "zero3": 20 / 4, "fsdp2": 16 / 4}
    for name, per_parameter in expected.items():
        assert whole.named(name).model_states.total == pytest.approx(per_parameter * number, rel=0.03), name
    for name, times in {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3, "fsdp2": 3, "fsdp2_grad": 2}.items():
        found = whole.named(name)
        assert found.payload_elements == pytest.approx(times * number, rel=0.03), name
        assert found.sent_elements == pytest.approx(found.payload_elements * 3 / 4), name


def test_only_pipelines_divide_the_computation(whole: Plan) -> None:
    for each in whole.strategies:
        stages = each.settings.get("stages", 4)
        expected = 1 / stages if each.name.startswith("pipeline") else 1
        assert each.flops_fraction == pytest.approx(expected, rel=0.35), each.name


def test_checkpointing_and_offload_cost_less_memory(whole: Plan) -> None:
    plain, checkpointed = (
        next(s for s in whole.strategies if s.name == "fsdp2" and bool(s.settings) is wanted)
        for wanted in (False, True)
    )
    assert checkpointed.device_bytes < plain.device_bytes
    assert whole.named("fsdp2_offload").host_bytes == whole.named("fsdp2").model_states.total
    for name in ("zero1", "zero2", "zero3"):
        assert whole.named(f"{name}_offload").device_bytes < whole.named(name).device_bytes


def test_those_that_fit_come_first_and_are_ranked_by_rows_a_second(whole: Plan) -> None:
    paces = [each.rows_per_second or 0 for each in whole.strategies]
    assert paces == sorted(paces, reverse=True)
    assert whole.chosen is not None and whole.chosen.name == "ddp"
    first = whole.strategies[0]
    assert first.rows == 8 * 4 if first.flops_fraction == 1 else first.rows in (8, 16)


def test_the_least_invasive_that_fits_is_taken(whole: Plan) -> None:
    """Whatever the limit: the first of the order that is not larger."""
    names = ["fsdp2_offload", "zero3", "ddp", "zero2", "fsdp2"]
    needs = {name: whole.named(name).device_bytes for name in names}
    # With activation checkpointing, which comes before any offload.
    needs["fsdp2_offload"] = min(s.device_bytes for s in whole.strategies if s.name == "fsdp2_offload")
    assert needs["ddp"] > needs["zero2"] > needs["fsdp2"] > needs["fsdp2_offload"]
    for limit in ("ddp", "zero2", "fsdp2", "fsdp2_offload"):
        judged = [_judged(each, chip(needs[limit]), 0.0) for each in whole.strategies if each.name in names]
        chosen = choose(judged)
        assert chosen is not None and chosen.name == limit
        for each in judged:
            assert each.fits is (each.device_bytes <= needs[limit])
            assert ("to spare" if each.fits else "too much") in each.reason
    assert choose([_judged(each, chip(1000), 0.0) for each in whole.strategies]) is None


def test_the_margin_stays_free() -> None:
    needed = make(strategies=["ddp"]).named("ddp").device_bytes
    assert make(strategies=["ddp"], memory=needed / 0.9 + 1).chosen is not None
    assert make(strategies=["ddp"], memory=needed / 0.9 - 1).chosen is None


def closed_and_simulated(module: Any, batch: Tensor, names: list[str], ranks: int, precision: str) -> dict[str, Any]:
    """Of each form of the strategies the two peaks."""
    options = SimulationOptions(strategy=SINGLE, world_size=1, precision=precision)
    profile = profile_module(module, batch, options, 2)
    forms = Forms(profile=profile, options=options, devices=ranks, nodes=1, cuda=False)
    costs = [cost for cost in forms.costs(names) if cost.settings.get("stages", ranks) == ranks]
    assert {cost.name for cost in costs} == set(names)
    wanted = [
        replace(options, strategy=cost.name, settings=cost.settings, world_size=ranks, rank=cost.worst)
        for cost in costs
    ]
    found = forms.simulate(wanted)
    return {
        f"{cost.name} {dict(cost.settings)}": (cost.memory, simulation and simulation.peak)
        for cost, simulation in zip(costs, found, strict=True)
    }


def test_closed_forms_of_shards_are_what_simulations_give() -> None:
    """But for the padding of single units, and the optimizer's counters."""
    names = ["fsdp2", "fsdp2_grad", "fsdp2_hybrid"]
    peaks = closed_and_simulated(Stack(blocks=4, width=31), tokens(), names, 6, "32-true")
    assert len(peaks) == 6
    for name, (closed, simulated) in peaks.items():
        assert closed.total == pytest.approx(simulated.total, rel=0.01), name


def test_closed_forms_of_pipelines_are_near_simulations() -> None:
    names = ["pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved"]
    peaks = closed_and_simulated(Stack(blocks=8, width=48), tokens(16, 32), names, 4, "bf16-mixed")
    assert len(peaks) == 6
    for name, (closed, simulated) in peaks.items():
        assert closed.total == pytest.approx(simulated.total, rel=0.15), name


def test_the_best_are_simulated_and_the_choice_is_among_them() -> None:
    names = ["ddp", "fsdp2", "fsdp2_grad", "pipeline_1f1b"]
    module = Stack(blocks=4)
    ddp = make(module, strategies=["ddp"]).named("ddp").device_bytes
    found = make(module, strategies=names, memory=ddp, simulate=2)
    assert found.chosen is not None and found.chosen.name == "fsdp2_grad" and found.chosen.simulated
    assert sum(each.simulated for each in found.strategies) in (2, 3)


def test_a_simulated_offload_holds_what_its_closed_form_holds() -> None:
    names = ["fsdp2_offload"]
    closed, simulated = make(strategies=names), make(strategies=names, simulate=2)
    assert len(closed.strategies) == 2 and all(each.simulated for each in simulated.strategies)
    for each in closed.strategies:
        (same,) = (s for s in simulated.strategies if s.settings == each.settings)
        assert each.device_bytes == pytest.approx(same.device_bytes, rel=0.01)


def test_without_a_batch_only_model_states_are_known() -> None:
    found = plan_module(Stack(), devices=4, device=chip())
    assert any("There is no batch" in note for note in found.notes)
    assert found.named("fsdp2").memory is None and found.named("fsdp2").time is None
    assert found.named("ddp").model_states.total == 16 * psi(Stack())
    assert "model states alone" in found.named("ddp").reason


def test_layers_may_be_made_late_and_once() -> None:
    module = Late()
    assert make(module, strategies=["ddp"]).parameters == psi(Stack())
    assert module.made == 0 and not list(module.parameters())


class Reads(Stack):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else -loss


def test_a_step_that_reads_values_is_planned_by_its_states() -> None:
    found = make(Reads(), strategies=["ddp", "pipeline_1f1b"])
    assert found.named("ddp").memory is None
    assert any("could not be simulated" in note for note in found.notes)
    assert any(note.startswith("pipeline_1f1b is left out") for note in found.notes)


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.blocks[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def test_shared_and_frozen_parameters_and_the_real_optimizer_count() -> None:
    module = Tied()
    frozen = psi(module.blocks[0])
    found = make(module, strategies=["ddp", "zero1"])
    assert found.parameters == psi(Stack()) - 50 * 24
    states = found.named("ddp").model_states
    assert states.parameters == 4 * found.parameters
    assert states.gradients == states.optimizer == 4 * (found.parameters - frozen)
    assert found.named("ddp").payload_elements == 2 * (found.parameters - frozen)
    assert found.optimizer == "SGD"


class Two(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.head.parameters(), 0.1), torch.optim.SGD(self.blocks.parameters(), 0.1)]


def test_with_two_optimizers_the_engine_and_pipelines_are_left_out() -> None:
    found = make(Two(), strategies=["ddp", "zero1", "pipeline_1f1b", "fsdp2"])
    assert {each.name for each in found.strategies} == {"ddp", "fsdp2"}
    assert any("zero1, pipeline_1f1b are left out: the module has 2 optimizers" in note for note in found.notes)


class Given(Stack):
    """Its optimizer was made with the module, as LightningCLI makes one that stands in a YAML file."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__(blocks)
        self.optimizer = torch.optim.Adam(self.parameters())

    def configure_optimizers(self) -> Any:
        return self.optimizer


def bound() -> Stack:
    """As LightningCLI binds an optimizer that stands in a YAML file."""
    module = Stack()
    optimizer = torch.optim.Adam(module.parameters())
    function = partial(LightningCLI.configure_optimizers, optimizer=optimizer, lr_scheduler=None)
    update_wrapper(function, LightningCLI.configure_optimizers)
    module.configure_optimizers = MethodType(function, module)  # type: ignore[method-assign]
    return module


def test_an_optimizer_that_was_made_before_counts_as_one_that_is_made_later() -> None:
    names = ["ddp", "zero1", "zero3"]
    made = make(Stack(), strategies=names)
    for module in (Given(), bound()):
        given = make(module, strategies=names)
        for name in names:
            assert given.named(name).model_states == made.named(name).model_states
            assert given.named(name).device_bytes == made.named(name).device_bytes


def test_an_optimizer_that_was_made_before_may_have_many_equal_blocks() -> None:
    """Of which only some are simulated, while it holds the parameters of all."""
    given, made = make(Given(8), strategies=["ddp"]), make(Stack(8), strategies=["ddp"])
    assert given.named("ddp").model_states == made.named("ddp").model_states
    assert given.named("ddp").device_bytes == made.named("ddp").device_bytes
    assert not given.notes


@pytest.mark.parametrize("blocks", [3, 8])
def test_an_optimizer_of_other_tensors_is_not_believed(blocks: int) -> None:
    """It would keep nothing for the module's parameters."""

    class Foreign(Stack):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1)

    found = make(Foreign(blocks), strategies=["zero1"])
    assert any("could not be tried" in note for note in found.notes)
    assert found.named("zero1").model_states.total > 8 * psi(Stack(blocks))


def test_planning_leaves_an_optimizer_that_was_made_before_alone() -> None:
    module = Given()
    step = module.optimizer.step
    make(module, strategies=["ddp"])
    assert not module.optimizer.state and module.optimizer.step == step


def test_what_a_strategy_refuses_in_a_run_is_not_chosen() -> None:
    """Shards and stages replace parameters, which an optimizer that was made before still holds."""
    found = make(Given(), strategies=["fsdp2", "fsdp2_offload", "pipeline_1f1b"], simulate=3)
    assert [each.name for each in found.strategies] == ["pipeline_1f1b"] * len(found.strategies)
    assert found.chosen is None
    assert all(each.fits is None and "it refuses this module" in each.reason for each in found.strategies)
    assert any("fsdp2, fsdp2_offload are left out: Optimizer 0 (Adam)" in note for note in found.notes)


def test_what_has_nothing_on_the_device_and_no_step_is_not_said_to_fit() -> None:
    for module, batch in ((Reads(), tokens()), (Stack(), None)):
        found = plan_module(module, batch, devices=4, device=chip(10), strategies=["fsdp2_offload", "ddp"], simulate=0)
        assert found.named("fsdp2_offload").fits is None
        assert found.named("ddp").fits is False
        assert found.chosen is None


class Unsuited(Stack):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_optimizers_that_a_strategy_refuses_are_left_out() -> None:
    found = make(Unsuited(), strategies=["ddp", "zero2", "fsdp2", "pipeline_1f1b"])
    assert {each.name for each in found.strategies} == {"ddp"}
    assert found.optimizer == "LBFGS"
    assert any("zero2 is left out: LBFGS evaluates the loss several times" in note for note in found.notes)


class Logs(Stack):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"loss": 1.0})  # type: ignore[union-attr]
        return loss


def test_a_step_may_log_to_its_logger() -> None:
    assert make(Logs(), strategies=["ddp"]).named("ddp").memory is not None


def test_a_step_that_fails_leaves_the_real_optimizer() -> None:
    class Plain(Reads):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    found = make(Plain(), strategies=["ddp"])
    assert found.optimizer == "SGD" and found.named("ddp").model_states.total == 8 * psi(Stack())


def test_a_step_without_a_loss_is_told() -> None:
    class Skips(Stack):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            return None

    assert any(
        "returns a loss" in note or "reaches no parameter" in note for note in make(Skips(), strategies=["ddp"]).notes
    )


def test_other_modules_and_compiled_ones() -> None:
    with pytest.raises(TypeError, match="needs a LightningModule, not a Linear"):
        make(nn.Linear(2, 2))
    plain, compiled = make(Stack(), strategies=["fsdp2"]), make(torch.compile(Stack()), strategies=["fsdp2"])
    assert compiled.named("fsdp2").device_bytes == plain.named("fsdp2").device_bytes


def test_a_process_group_of_the_caller_does_not_matter(tmp_path: Any) -> None:
    expected = make(strategies=["fsdp2", "pipeline_1f1b"])
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = make(strategies=["fsdp2", "pipeline_1f1b"])
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
    assert [each.device_bytes for each in found.strategies] == [each.device_bytes for each in expected.strategies]


def test_a_batch_without_enough_rows_makes_no_pipeline() -> None:
    found = make(batch=tokens(1), strategies=["pipeline_1f1b", "ddp"])
    assert [each.name for each in found.strategies] == ["ddp"]
    assert any("1 rows to share" in note for note in found.notes)


def test_several_nodes_shard_within_each() -> None:
    found = plan_module(Stack(), devices=8, nodes=2, device=chip(), strategies=["fsdp2_hybrid"])
    assert found.named("fsdp2_hybrid").settings["replicas"] == 2
    slow, fast = (
        make(Stack(width=512), ranks=8, nodes=nodes, strategies=["zero3"], device="t4").named("zero3").time
        for nodes in (8, 1)
    )
    assert slow is not None and fast is not None
    assert slow.exposed_communication > fast.exposed_communication
    assert slow.compute == fast.compute


def test_nothing_of_the_module_changes() -> None:
    module = Stack()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    make(module, strategies=["ddp", "fsdp2", "pipeline_1f1b"], simulate=1)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert type(module.blocks[0].forward).__name__ == "method"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 0}, "devices"),
        ({"ranks": 4, "nodes": 3}, "devices=4 must be a multiple of nodes=3"),
        ({"margin": 1.0}, "margin=1.0"),
        ({"margin": -0.1}, "margin=-0.1"),
        ({"strategies": ["zero4"]}, "zero4"),
        ({"precision": "bf17"}, "bf17"),
        ({"simulate": -1}, "simulate"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches"),
        ({"device": "h10"}, "h100"),
    ],
)
def test_absurd_input_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_a_module_without_layers_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="has no parameters"):
        make(pl.LightningModule())


def test_the_package_is_the_function() -> None:
    found = lightning_shard.plan(Stack(), tokens(), devices=2, device="cpu", strategies=["ddp"])  # type: ignore[operator]
    assert found.named("ddp").model_states.total == 16 * psi(Stack())
    from lightning_shard.plan import arithmetic

    assert arithmetic.bubble(4, 8) == 3 / 11


def test_forms_are_cheap_to_ask_again() -> None:
    options = SimulationOptions(strategy=SINGLE, world_size=1)
    profile = profile_module(Stack(), tokens(), options, 2)
    assert profile.stages is not None and profile.stages.most >= 4
    forms = Forms(profile=profile, options=options, devices=4, nodes=1, cuda=False)
    names = [name for name, entry in NAMES.items() if entry.strategy == PIPELINE]
    assert {cost.name for cost in forms.costs(names)} <= set(names)

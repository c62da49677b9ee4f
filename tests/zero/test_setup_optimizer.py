"""Which optimizer the engine gets, from the module or from the config."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_shard import _compat
from lightning_shard.config import Offload
from lightning_shard.zero.setup_optimizer import Chosen, configure_optimizer, promise_optimizer
from tests.zero.test_optimizers import StandIn, cpu_adam
from tests.zero.test_trial import NeedsMatrices

__all__ = ["cpu_adam"]


class Bare(pl.LightningModule):
    """Has no `configure_optimizers`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.second = nn.Linear(2, 1)
        self.trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
        )


class Module(Bare):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


def sgd(module: Any) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def choose(
    module: pl.LightningModule,
    config: dict[str, Any] | None = None,
    offload: Offload | None = None,
    device: str = "cpu",
    ensured: list[str] | None = None,
) -> Chosen:
    where = {"offload_optimizer": {"device": offload.optimizer}} if offload else {}
    return configure_optimizer(
        module,
        {"zero_optimization": where, **(config or {})},
        offload,
        torch.device(device),
        (ensured if ensured is not None else []).append,
    )


def refusal(module: pl.LightningModule, config: dict[str, Any] | None = None) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        choose(module, config)
    return str(caught.value)


# --- the module's optimizer ---


def test_the_modules_optimizer_is_the_one() -> None:
    made: list[Optimizer] = []

    def remember(module: Any) -> Any:
        made.append(sgd(module))
        return {"optimizer": made[0], "lr_scheduler": torch.optim.lr_scheduler.StepLR(made[0], 2)}

    chosen = choose(Module(remember))
    assert chosen.optimizer is made[0] and len(made) == 1
    assert (len(chosen.schedulers), chosen.schedulers[0].interval) == (1, "epoch")


def test_several_optimizers_are_refused() -> None:
    module = Module(lambda module: [sgd(module), torch.optim.AdamW(module.second.parameters())])
    module.automatic_optimization = False  # with automatic optimization, Lightning itself refuses
    message = refusal(module)
    assert "2 optimizers (SGD, AdamW)" in message and "one optimizer" in message


@pytest.mark.filterwarnings("ignore:.*configure_optimizers.*returned.*None")
def test_no_optimizer_is_refused() -> None:
    assert "returns no optimizer" in refusal(Module(lambda module: None))
    message = refusal(Bare())
    assert "Bare has no `configure_optimizers`" in message and "`optimizer` section" in message


def test_what_slices_would_break_is_refused_here() -> None:
    assert "NeedsMatrices" in refusal(Module(lambda module: NeedsMatrices(module.parameters())))

    def used(module: Any) -> Optimizer:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer

    assert "SGD holds state for 4 parameters" in refusal(Module(used))
    assert "belongs to no submodule" in refusal(
        Module(lambda module: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    )


def test_frozen_groups_are_left_out_for_the_engine_only() -> None:
    made: list[Optimizer] = []

    def groups(module: Any) -> Any:
        module.first.requires_grad_(False)
        made.append(
            torch.optim.SGD([{"params": module.first.parameters()}, {"params": module.second.parameters()}], lr=0.1)
        )
        return [made[0]], [torch.optim.lr_scheduler.StepLR(made[0], 1, gamma=0.5)]

    chosen = choose(Module(groups))
    (user,) = made
    assert [len(user.param_groups), len(chosen.optimizer.param_groups)] == [2, 1]
    assert chosen.optimizer.param_groups[0] is user.param_groups[1]
    assert chosen.optimizer.state is user.state
    for parameter in chosen.optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    before = user.param_groups[1]["params"][0].clone()
    chosen.optimizer.step()
    assert torch.allclose(before - 0.1, user.param_groups[1]["params"][0])
    chosen.schedulers[0].scheduler.step()
    assert chosen.optimizer.param_groups[0]["lr"] == 0.05


# --- offload ---


@pytest.mark.parametrize(
    ("offload", "device", "replaced"),
    [
        (None, "cuda", False),
        (Offload(optimizer="cpu"), "cpu", False),
        (Offload(optimizer="cpu"), "cuda", True),
        (Offload(optimizer="cpu", cpu_adam=True), "cpu", True),
        (Offload(optimizer="cpu", cpu_adam=False), "cuda", False),
        (Offload(optimizer=None, parameters="cpu"), "cuda", False),
    ],
    ids=str,
)
def test_cpu_adam_is_built_only_where_it_runs(
    offload: Offload | None, device: str, replaced: bool, cpu_adam: type[StandIn]
) -> None:
    module = Module(lambda module: torch.optim.AdamW(module.parameters(), lr=0.1))
    ensured: list[str] = []
    chosen = choose(module, offload=offload, device=device, ensured=ensured)
    assert isinstance(chosen.optimizer, cpu_adam) is replaced
    assert ensured == (["cpu_adam"] if replaced else [])


def test_offload_of_the_config_alone_counts(cpu_adam: type[StandIn]) -> None:
    config = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    chosen = choose(Module(lambda module: torch.optim.AdamW(module.parameters())), config, device="cuda")
    assert isinstance(chosen.optimizer, cpu_adam)
    ensured: list[str] = []
    choose(Module(sgd), config, device="cuda", ensured=ensured)
    assert ensured == []


# --- the config's sections ---

OPTIMIZER = {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}


@pytest.mark.parametrize("sections", [["optimizer"], ["scheduler"], ["optimizer", "scheduler"]], ids=str)
def test_sections_beside_configure_optimizers_are_refused(sections: list[str]) -> None:
    config = {name: {"type": "x"} for name in sections}
    message = refusal(Module(sgd), config)
    assert ", ".join(sections) in message and "Module overrides `configure_optimizers`" in message


def test_sections_serve_a_bare_module() -> None:
    module = Bare()
    module.first.requires_grad_(False)
    chosen = choose(module, {"optimizer": OPTIMIZER})
    assert type(chosen.optimizer) is torch.optim.SGD
    assert chosen.optimizer.param_groups[0]["params"] == list(module.second.parameters())
    assert chosen.schedulers == []


def test_the_trainers_check_passes_only_where_the_config_has_an_optimizer() -> None:
    module = Bare()
    promise_optimizer(module, {"scheduler": {}})
    assert not is_overridden("configure_optimizers", module)
    promise_optimizer(module, {"optimizer": OPTIMIZER})
    assert is_overridden("configure_optimizers", module)
    with pytest.raises(MisconfigurationException, match="`optimizer` section took its place"):
        module.configure_optimizers()
    assert type(choose(module, {"optimizer": OPTIMIZER}).optimizer) is torch.optim.SGD
    assert not is_overridden("configure_optimizers", module)
    own = Module(sgd)
    promise_optimizer(own, {"optimizer": OPTIMIZER})
    assert "configure_optimizers" not in vars(own)


def test_a_scheduler_section_without_an_optimizer_is_refused() -> None:
    assert "no `optimizer` section" in refusal(Bare(), {"scheduler": {"type": "WarmupLR"}})


SCHEDULERS = [
    ("WarmupLR", {"warmup_min_lr": 0.0, "warmup_max_lr": 0.8, "warmup_num_steps": 4, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 6, "warmup_max_lr": 0.8, "warmup_num_steps": 2, "warmup_type": "linear"}),
    ("StepLR", {"step_size": 2, "gamma": 0.1}),
]
# DeepSpeed's warm-up stays at its minimum for two steps.
EXPECTED = {
    "WarmupLR": [0.0, 0.0, 0.2, 0.4, 0.6, 0.8, 0.8],
    "WarmupDecayLR": [0.0, 0.0, 0.4, 0.8, 0.6, 0.4, 0.2],
    "StepLR": [0.5, 0.5, 0.05, 0.05, 0.005, 0.005],
}


@pytest.mark.parametrize(("name", "params"), SCHEDULERS)
def test_a_scheduler_of_deepspeed_or_torch_steers_each_step(name: str, params: dict[str, Any]) -> None:
    with _compat.quiet_engine_import():
        chosen = choose(Bare(), {"optimizer": OPTIMIZER, "scheduler": {"type": name, "params": params}})
    (scheduler,) = chosen.schedulers
    assert (scheduler.interval, scheduler.frequency) == ("step", 1)
    rates = []
    for _ in EXPECTED[name]:
        rates.append(chosen.optimizer.param_groups[0]["lr"])
        chosen.optimizer.step()
        scheduler.scheduler.step()
    assert rates == pytest.approx(EXPECTED[name])


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"type": "WarmUpLR"}, "scheduler.type='WarmUpLR'"),
        ({"params": {}}, "scheduler.type='None'"),
        # Names that are in those modules, but are no schedulers.
        ({"type": "Optimizer"}, "scheduler.type='Optimizer'"),
        ({"type": "logger"}, "scheduler.type='logger'"),
        ({"type": "ReduceLROnPlateau"}, "waits for a metric"),
        ({"type": "StepLR", "params": {"step": 2}}, "does not fit StepLR"),
        ({"type": "WarmupDecayLR", "params": {}}, "does not fit WarmupDecayLR"),
    ],
    ids=str,
)
def test_a_scheduler_section_that_does_not_fit_is_named(section: dict[str, Any], named: str) -> None:
    assert named in refusal(Bare(), {"optimizer": OPTIMIZER, "scheduler": section})

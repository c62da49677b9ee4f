"""Which optimizers may run on flat slices, judged without any rank."""

import copy
import logging
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from lightning_shard import _compat
from lightning_shard.zero.optimizers import (
    check_elementwise,
    check_no_early_state,
    choose_for_offload,
    cpu_adam_fits,
    from_config_section,
)

CPU = torch.device("cpu")
ELEMENTWISE = {
    torch.optim.SGD,
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
}
IN_TORCH = [
    entry
    for entry in vars(torch.optim).values()
    if isinstance(entry, type) and issubclass(entry, Optimizer) and entry is not Optimizer
]


def matrix() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(4, 3))]


def refusal(optimizer: Optimizer) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        check_elementwise(optimizer, CPU)
    message = str(caught.value)
    assert message.startswith(type(optimizer).__name__)
    assert "Choose an elementwise optimizer" in message
    return message


@pytest.mark.parametrize("kind", IN_TORCH, ids=lambda kind: kind.__name__)
def test_each_optimizer_of_torch_is_judged_rightly(kind: type[Optimizer]) -> None:
    optimizer = kind(matrix(), lr=0.1)  # type: ignore[call-arg]
    if kind in ELEMENTWISE:
        check_elementwise(optimizer, CPU)
    else:
        refusal(optimizer)


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_the_trial_agrees_with_the_list(kind: type[Optimizer]) -> None:
    # A subclass is not on the list, so that the trial has to judge it.
    subclass = type("Mine", (kind,), {})
    check_elementwise(subclass(matrix(), lr=0.1), CPU)


def test_the_optimizers_of_torch_that_the_test_knows_are_there() -> None:
    names = {kind.__name__ for kind in IN_TORCH}
    assert {"Adafactor", "LBFGS", "Muon", "SparseAdam"} == names - {kind.__name__ for kind in ELEMENTWISE}


def test_transformers_adafactor_is_refused() -> None:
    from transformers.optimization import Adafactor

    assert "rows and columns" in refusal(Adafactor(matrix()))
    assert "rows and columns" in refusal(Adafactor(matrix(), lr=1e-3, relative_step=False, scale_parameter=False))


@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable", "differentiable", "amsgrad", "maximize"])
def test_flags_of_adamw_do_not_matter(flag: str) -> None:
    check_elementwise(torch.optim.AdamW(matrix(), **{flag: True}), CPU)
    check_elementwise(torch.optim.AdamW(matrix(), lr=torch.tensor(1e-3)), CPU)


def test_state_before_the_first_step_is_refused() -> None:
    used = torch.optim.AdamW(matrix())
    used.param_groups[0]["params"][0].grad = torch.ones(4, 3)
    check_no_early_state(used)
    used.step()
    with pytest.raises(MisconfigurationException, match="AdamW holds state for 1 parameters before the first step"):
        check_no_early_state(used)
    # Its accumulators are made anew for the partitions.
    check_no_early_state(torch.optim.Adagrad(matrix(), initial_accumulator_value=0.1))


# --- the CPU Adam of DeepSpeed; a stand-in, since the real one compiles for minutes ---


class StandIn(Optimizer):
    def __init__(self, model_params: Any, **settings: Any) -> None:
        self.settings = settings
        super().__init__(model_params, {**settings, "bias_correction": True, "amsgrad": False})


@pytest.fixture
def cpu_adam(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    with _compat.quiet_engine_import():
        import deepspeed.ops.adam

    monkeypatch.setattr(deepspeed.ops.adam, "DeepSpeedCPUAdam", StandIn)
    return StandIn


def info(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_cpu_adam_takes_the_settings_and_the_groups(
    kind: Any, cpu_adam: type[StandIn], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = matrix(), matrix()
    groups = [{"params": first}, {"params": second, "lr": 0.5, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.2}]
    theirs = kind(groups, lr=0.25, betas=(0.7, 0.8), eps=1e-6, weight_decay=0.1)
    scheduler = LinearLR(theirs, start_factor=0.5, total_iters=1)
    assert cpu_adam_fits(theirs)
    with caplog.at_level(logging.INFO):
        ours = choose_for_offload(theirs, cpu_adam=True)
    assert isinstance(ours, cpu_adam)
    assert ours.settings["adamw_mode"] is (kind is torch.optim.AdamW)
    values = [(g["lr"], g["betas"], g["eps"], g["weight_decay"]) for g in ours.param_groups]
    assert values == [(0.125, (0.7, 0.8), 1e-6, 0.1), (0.25, (0.5, 0.6), 1e-3, 0.2)]
    assert [g["params"][0] for g in ours.param_groups] == [first[0], second[0]]
    assert all("bias_correction" in group for group in ours.param_groups)
    assert f"torch.optim.{kind.__name__}" in info(caplog) and "2 parameter group(s)" in info(caplog)
    # One and the same dictionaries: the scheduler on the user's optimizer steers ours.
    _compat.pretend_stepped(theirs)
    scheduler.step()
    assert [group["lr"] for group in ours.param_groups] == [0.25, 0.5]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.Adam(p, maximize=True), "maximize=True"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable=True"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True), "weight decay"),
        (lambda p: torch.optim.AdamW([{"params": p}, {"params": matrix(), "amsgrad": True}]), "amsgrad=True"),
    ],
)
def test_what_cpu_adam_cannot_do_stays_with_torch(
    make: Any, reason: str, cpu_adam: type[StandIn], caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = make(matrix())
    assert not cpu_adam_fits(optimizer)
    with caplog.at_level(logging.INFO):
        assert choose_for_offload(optimizer, cpu_adam=True) is optimizer
    assert reason in info(caplog)


def test_other_optimizers_and_other_wishes_stay_with_torch(cpu_adam: type[StandIn]) -> None:
    for optimizer in (torch.optim.SGD(matrix()), type("Mine", (torch.optim.AdamW,), {})(matrix())):
        assert choose_for_offload(optimizer, cpu_adam=True) is optimizer
    adamw = torch.optim.AdamW(matrix())
    assert choose_for_offload(adamw, cpu_adam=False) is adamw


# --- the config's optimizer section ---


@pytest.mark.parametrize(
    ("section", "kind", "expected"),
    [
        ({"type": "AdamW", "params": {"lr": 0.1, "betas": [0.8, 0.9]}}, "AdamW", {"lr": 0.1, "weight_decay": 0.0}),
        ({"type": "Adam", "params": {"lr": 0.1, "weight_decay": 0.3}}, "AdamW", {"weight_decay": 0.3}),
        ({"type": "adam", "params": {"adam_w_mode": False, "torch_adam": True}}, "Adam", {"weight_decay": 0.0}),
        ({"type": "Adam", "params": {"bias_correction": True}}, "AdamW", {}),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "SGD", {"momentum": 0.9}),
        ({"type": "Adagrad"}, "Adagrad", {}),
    ],
    ids=str,
)
def test_a_section_becomes_torchs_optimizer(section: dict[str, Any], kind: str, expected: dict[str, Any]) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    module[0].requires_grad_(False)
    before = copy.deepcopy(section)
    optimizer = from_config_section(section, module)
    assert type(optimizer) is getattr(torch.optim, kind)
    assert expected.items() <= optimizer.param_groups[0].items()
    assert optimizer.param_groups[0]["params"] == list(module[1].parameters())
    assert section == before


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"type": "OneBitAdam"}, "optimizer.type='OneBitAdam'"),
        ({"type": "Lamb"}, "optimizer.type='Lamb'"),
        ({"params": {"lr": 0.1}}, "optimizer.type='None'"),
        ({"type": "AdamW", "params": {"learning_rate": 0.1}}, "learning_rate"),
        ({"type": "AdamW", "params": {"lr": -1.0}}, "-1.0"),
        ({"type": "Adam", "params": {"bias_correction": False}}, "bias_correction"),
    ],
    ids=str,
)
def test_a_section_that_does_not_fit_is_named(section: dict[str, Any], named: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        from_config_section(section, nn.Linear(2, 2))
    assert named in str(caught.value)

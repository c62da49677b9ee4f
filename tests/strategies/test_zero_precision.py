"""Precision: what each setting means under ZeRO, as `docs/precision.md` has it, and which are refused."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import _compat
from lightning_shard.testing import RankFailed, run_distributed
from tests.strategies.cases import assert_all_same, each, under
from tests.strategies.zero_modules import Classifier, adamw, classes, sgd
from tests.strategies.zero_runs import loader, on_each_rank, trainer

pytestmark = pytest.mark.ranks

TABLE = Path(__file__).parents[2] / "docs" / "precision.md"
COLUMNS = [
    "stored weights",
    "weights in forward",
    "activations",
    "gradients",
    "master weights",
    "Adam moments",
    "scaler",
]


class Dtypes(Classifier):
    """Notes the dtypes that its forward sees."""

    def __init__(self) -> None:
        super().__init__(adamw())
        self.seen: dict[str, str] = {}
        self.net[0].register_forward_hook(self._note)

    def _note(self, module: Any, args: Any, output: Tensor) -> None:
        self.seen |= {"weights in forward": short(module.weight.dtype), "activations": short(output.dtype)}


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype))


def measure(name: str, precision: str) -> dict[str, str]:
    module = Dtypes()

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            assert isinstance(module, Dtypes)
            engine: Any = trainer.model
            weight = module.net[0].weight
            moments = [state["exp_avg"] for state in _compat.inner_optimizer(engine.optimizer).state.values()]
            module.seen |= {
                "stored weights": short(getattr(weight, "ds_tensor", weight).dtype),
                "gradients": short(engine.optimizer.gradient_accumulation_dtype),
                "master weights": short(_compat.flat_partitions(engine.optimizer)[0].dtype),
                "Adam moments": short(moments[0].dtype),
                "scaler": "none" if engine.optimizer.loss_scale == 1 else "dynamic",
            }

    trainer(name, precision=precision, callbacks=[Look()]).fit(module, loader(classes(2)))
    return module.seen


def documented() -> dict[str, dict[str, str]]:
    """The table's rows: precision to column to cell."""
    rows = [line.strip("| \n").split("|") for line in TABLE.read_text().splitlines() if line.startswith("|")]
    header, _, *body = [[cell.strip() for cell in row] for row in rows]
    assert header == ["`precision=`", *COLUMNS]
    return {row[0].strip("`"): dict(zip(COLUMNS, row[1:], strict=True)) for row in body}


def test_the_documented_dtypes_are_the_measured_ones() -> None:
    names = ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload_params"]
    cases = [(name, precision) for precision in documented() for name in names]
    for found in run_distributed(each, 2, cases, lambda case: measure(*case)):
        for name, precision in cases:
            assert found[name, precision] == documented()[precision], (name, precision)


def test_the_table_has_no_other_rows() -> None:
    assert set(documented()) == {"32-true", "bf16-mixed", "bf16-true"}


class Fp32Loss(Classifier):
    """A loss in bf16 near 1 would come in steps of 2^-8, and hide what is compared."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x).float(), y)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_follows_one_process(precision: str) -> None:
    names = ["zero1", "zero2", "zero3", "zero3_offload"]
    cases = under(names, lambda: Fp32Loss(sgd(0.01)), classes(), precision=precision)
    for key, comparison in assert_all_same(cases, atol=1e-3, rtol=1e-3).items():
        assert comparison.loss < 1e-3, key


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_64_true_is_refused_when_the_trainer_is_made(name: str) -> None:
    with pytest.raises(ValueError, match=r"precision='64-true'.*'32-true', '16-true', 'bf16-true'"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=name, precision="64-true", logger=False)


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_what_the_device_cannot_compute_is_refused(precision: str) -> None:
    def train(name: str) -> bool:
        from deepspeed.accelerator import get_accelerator

        # CPUs differ in this; the refusal is about those that lack it.
        get_accelerator().is_fp16_supported = lambda: False
        trainer(name, precision=precision).fit(Dtypes(), loader(classes(2)))
        return True

    match = rf"precision='{precision}'.*cpu device.*'32-true', 'bf16-mixed', 'bf16-true'"
    with pytest.raises(RankFailed, match=match):
        on_each_rank(train, "zero2")

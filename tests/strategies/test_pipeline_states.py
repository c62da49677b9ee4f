"""What a rank of a pipeline holds: its own stages' parameters, gradients and optimizer states, and nothing else's."""

import gc
import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import PipelineStrategy
from lightning_shard.pipeline.absent import is_absent
from lightning_shard.testing import run_distributed
from tests.strategies.pipeline_models import GPT, MODELS

pytestmark = pytest.mark.ranks


class Weighed(pl.Callback):
    """Counts bytes where all three kinds of states are there: just before the optimizer's second step."""

    def __init__(self, module: pl.LightningModule) -> None:
        self.originals = {name: weakref.ref(parameter) for name, parameter in module.named_parameters()}
        self.found: dict[str, Any] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gc.collect()
        here = {name: each for name, each in pl_module.named_parameters() if not is_absent(each)}
        self.found = {
            "parameters": sum(_bytes(each) for each in here.values()),
            "gradients": sum(_bytes(each.grad) for each in pl_module.parameters() if each.grad is not None),
            "states": sum(_bytes(value) for values in optimizer.state.values() for value in values.values()),
            "here": sorted(here),
            "alive": sorted(name for name, reference in self.originals.items() if reference() is not None),
            "counted": sum(each.numel() for each in pl_module.parameters()),
        }


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) and not is_absent(value) else 0


def loader(batches: list[Any]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=1, collate_fn=lambda items: items[0])  # type: ignore[arg-type]


def weigh(strategy_arguments: dict[str, Any], ranks: int) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module = GPT()
    weighed = Weighed(module)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=PipelineStrategy(**strategy_arguments),
        max_steps=2,
        callbacks=[weighed],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    make_batch = MODELS["GPT, tied embeddings"][1]
    trainer.fit(module, loader([make_batch(step) for step in range(2)]))
    job = trainer.strategy.job  # type: ignore[attr-defined]
    mine = set(job.pipeline.setting.own_stages)
    weighed.found["expected"] = sorted(name for name, stages in job.layout.owners.items() if mine & set(stages))
    return weighed.found


def check(ranks: list[dict[str, Any]], tied: str) -> None:
    sizes = {name: _bytes(parameter) for name, parameter in GPT().named_parameters()}
    whole = sum(sizes.values())
    for found in ranks:
        assert found["here"] == found["expected"]
        own = sum(sizes[name] for name in found["here"])
        # SGD with momentum has one state of the parameter's size.
        assert (found["parameters"], found["gradients"], found["states"]) == (own, own, own)
        assert own < whole
        # The parameters that the module was built with are gone, too, but for those that stayed.
        assert found["alive"] == found["here"]
        # People and callbacks that count parameters count all of them, once.
        assert found["counted"] == whole // 4
    assert [tied in found["here"] for found in ranks] == [True, *[False] * (len(ranks) - 2), True]
    together = sum(found["parameters"] for found in ranks)
    assert together == whole + sizes[tied]


def test_a_rank_holds_its_own_stages_states_only() -> None:
    check(run_distributed(weigh, 2, {"schedule": "1f1b"}, 2), tied="token.weight")
    check(run_distributed(weigh, 4, {"schedule": "gpipe"}, 4), tied="token.weight")


def test_a_module_built_on_the_meta_device_is_made_where_it_stays() -> None:
    from tests.strategies.pipeline_models import MLP

    def train() -> tuple[int, list[float], list[str]]:
        class OnMeta(MLP):
            def __init__(self) -> None:
                with torch.device("meta"):
                    super().__init__()

        pl.seed_everything(1, verbose=False)
        module = OnMeta()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="pipeline_1f1b",
            max_steps=4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        make_batch = MODELS["MLP in nn.Sequential"][1]
        trainer.fit(module, loader([make_batch(step) for step in range(4)]))
        weights = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        here = [name for name, each in module.named_parameters() if not is_absent(each)]
        return sum(each.is_meta for each in module.parameters()), [float(w.abs().sum()) for w in weights.values()], here

    (meta0, first, here0), (meta1, last, here1) = run_distributed(train, 2)
    assert (meta0, meta1) == (0, 0) and not set(here0) & set(here1)
    assert first == last and all(0 < total < 1e4 for total in first)

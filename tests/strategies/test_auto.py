"""`auto_shard` becomes the strategy that the planner names, and nobody can tell that it was not named by the user."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import DeepSpeedPrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_shard import AutoShardStrategy, FSDP2Strategy, PipelineStrategy, ZeROStrategy
from lightning_shard._compat.dry_run import fake_mode
from lightning_shard._compat.groups import groups_hidden
from lightning_shard.plan import search
from lightning_shard.plan.layers import with_forward_as_step, with_layers
from lightning_shard.strategies import auto
from lightning_shard.testing import RankFailed, run_distributed
from tests.strategies.auto_runs import WIDTH, Later, Plain, layers, taking, told, told_strategy
from tests.strategies.cases import Case, assert_all_same, each
from tests.strategies.zero_runs import trainer, weights

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

CLASSES: dict[str, type] = {
    "ddp": DDPStrategy,
    "zero2": ZeROStrategy,
    "zero3_offload": ZeROStrategy,
    "fsdp2": FSDP2Strategy,
    "fsdp2_offload": FSDP2Strategy,
    "pipeline_1f1b": PipelineStrategy,
}


def batches(count: int = 4, rows: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(rows, WIDTH, generator=generator) for _ in range(count)]


def loader(rows: int = 32) -> "DataLoader[Any]":
    return DataLoader(torch.cat(batches(rows // 8)), batch_size=4)  # type: ignore[arg-type]


# --- it is the chosen strategy ---------------------------------------------------------------------------------------


def test_it_trains_as_one_process_whatever_it_becomes() -> None:
    kinds: dict[str, Callable[[], pl.LightningModule]] = {"layers": Plain, "configure_model": Later}
    cases = {
        f"{name}, {kind}": Case(
            make=make,
            batches=batches(),
            strategy=taking(name, {"microbatches": 2} if "pipeline" in name else None),
            settings={"gradient_clip_val": 0.1},
        )
        for name in CLASSES
        for kind, make in kinds.items()
        if name not in ("zero2", "fsdp2_offload") or kind == "layers"
    }
    assert_all_same(cases)


def test_the_trainer_holds_the_chosen_class_and_its_precision_plugin() -> None:
    def become(name: str) -> Any:
        run = trainer(told_strategy(name), precision="bf16-mixed", max_steps=1)
        before = run.strategy
        run.fit(Plain(), loader())
        strategy = run.strategy
        assert type(before) is AutoShardStrategy and before.lightning_module is None
        assert run.precision_plugin is strategy.precision_plugin and strategy.lightning_module is run.lightning_module
        assert strategy.launcher is before.launcher
        assert run.precision == "bf16-mixed" and run.global_step == 1
        return type(strategy), type(run.precision_plugin), getattr(strategy, "stage", None)

    for found in run_distributed(each, 2, CLASSES, become):
        assert {name: kind for name, (kind, _, _) in found.items()} == CLASSES
        for kind, plugin, _ in found.values():
            assert plugin is (DeepSpeedPrecision if kind is ZeROStrategy else MixedPrecision)
        assert (found["zero2"][2], found["zero3_offload"][2]) == (2, 3)


def test_settings_of_the_plan_and_arguments_of_its_own_reach_the_chosen_strategy() -> None:
    def become() -> Any:
        run = trainer(told_strategy("fsdp2", {"activation_checkpointing": True}, process_group_backend="gloo"))
        run.fit(Plain(), loader())
        assert isinstance(run.strategy, FSDP2Strategy)
        return run.strategy._activation_checkpointing, run.strategy.process_group_backend

    assert run_distributed(become, 2) == [(True, "gloo")] * 2


def test_loaders_get_samplers_for_the_replicas_of_the_chosen_strategy() -> None:
    class Asks(Plain):
        def setup(self, stage: str) -> None:
            self.trainer.fit_loop.setup_data()  # what `trainer.estimated_stepping_batches` does

    def replicas(name: str) -> int:
        run = trainer(told_strategy(name), use_distributed_sampler=True)
        run.fit(Asks(), loader())
        sampler = run.train_dataloader.sampler
        assert isinstance(sampler, DistributedSampler)
        return sampler.num_replicas

    for found in run_distributed(each, 2, ["fsdp2", "pipeline_1f1b"], replicas):
        assert found == {"fsdp2": 2, "pipeline_1f1b": 1}


def test_the_choice_is_kept_in_whatever_the_trainer_does_next() -> None:
    def all_of_it(name: str) -> list[Any]:
        planner = told(name)
        run, module = trainer(AutoShardStrategy(), max_epochs=1), Plain()
        done: list[Any] = []
        for do in (run.validate, run.fit, run.test, run.predict, run.fit):
            do(module, loader())
            done.append((do.__name__, type(run.strategy)))
        assert len(planner.asked) == (run.global_rank == 0)
        return done

    names = ["ddp", "zero3", "fsdp2"]
    for found in run_distributed(each, 2, names, all_of_it):
        for name in names:
            kind = {"ddp": DDPStrategy, "zero3": ZeROStrategy, "fsdp2": FSDP2Strategy}[name]
            assert found[name] == [(do, kind) for do in ("validate", "fit", "test", "predict", "fit")]


def test_random_numbers_are_those_of_a_run_whose_strategy_was_named() -> None:
    class Draws(Later):
        def setup(self, stage: str) -> None:
            self.drawn = torch.rand(3)

    def start(strategy: str) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        pl.seed_everything(5, verbose=False)
        module = Draws()
        run = trainer(told_strategy("ddp") if strategy == "auto_shard" else strategy, max_steps=0)
        run.fit(module, loader())
        return module.drawn, weights(run), torch.rand(3)

    for found in run_distributed(each, 2, ["ddp", "auto_shard"], start):
        torch.testing.assert_close(found["auto_shard"], found["ddp"], rtol=0, atol=0)


def test_a_checkpoint_goes_on_under_another_choice(tmp_path: Path) -> None:
    def save() -> None:
        run = trainer(told_strategy("zero3"), max_epochs=1)
        run.fit(Plain(), loader())
        run.save_checkpoint(tmp_path / "there")

    def resume(name: str) -> Any:
        run = trainer(told_strategy(name), max_epochs=2)
        run.fit(Plain(), loader(), ckpt_path=tmp_path / "there")
        return run.global_step, weights(run)

    run_distributed(save, 2)
    found = run_distributed(each, 2, ["fsdp2", "zero1"], resume)
    for rank in found:
        assert [steps for steps, _ in rank.values()] == [16, 16]
        torch.testing.assert_close(rank["fsdp2"][1], rank["zero1"][1], rtol=1e-5, atol=1e-6)


# --- what the planner is told ----------------------------------------------------------------------------------------


def test_the_planner_sees_layers_and_a_batch_and_leaves_the_module_alone() -> None:
    class Watches(pl.Callback):
        def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
            assert type(trainer.strategy) is AutoShardStrategy and trainer.strategy.broadcast(7) == 7

    def ask() -> Any:
        planner = told("ddp")
        strategy = AutoShardStrategy(device="t4", margin=0.2, simulate=1, strategies=["ddp", "zero1"])
        module = Later()
        run = trainer(strategy, max_steps=1, callbacks=[Watches()], gradient_clip_val=0.5, accumulate_grad_batches=2)
        run.fit(module, loader())
        if run.global_rank:
            return not planner.asked
        (asked,) = planner.asked
        copy = asked.pop("module")
        assert copy is not module and type(copy) is Later
        assert all(parameter.is_meta for parameter in copy.parameters())
        assert [name for name, _ in copy.named_parameters()] == [name for name, _ in module.named_parameters()]
        torch.testing.assert_close(asked.pop("batch"), batches()[0][:4])
        assert asked.pop("device").name == "t4"
        return asked

    asked, others_were_not = run_distributed(ask, 2)
    assert others_were_not is True
    assert asked == {
        "devices": 2,
        "nodes": 1,
        "precision": "32-true",
        "simulate": 1,
        "margin": 0.2,
        "strategies": ("ddp", "zero1"),
        "gradient_clip_val": 0.5,
        "accumulate_grad_batches": 2,
    }


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.cat(batches()))


def test_without_a_batch_it_says_what_it_goes_by() -> None:
    def ask() -> tuple[str, list[Any]]:
        said: list[str] = []
        auto.rank_zero_info = said.append  # type: ignore[assignment]
        planner = told("ddp")
        stream = DataLoader(Stream(), batch_size=4)
        trainer(AutoShardStrategy(), max_steps=1).fit(Plain(), stream)
        example = Plain()
        example.example_input_array = batches()[0]
        trainer(AutoShardStrategy(), max_steps=1).fit(example, stream)
        trainer(AutoShardStrategy()).validate(Plain(), loader())
        return "\n".join(said), [asked["batch"] for asked in planner.asked]

    said, asked = run_distributed(ask, 2)[0]
    assert asked[0] is asked[2] is None
    torch.testing.assert_close(asked[1], batches()[0])
    assert "the train loader gives no batch without drawing it" in said and "only model states are counted" in said
    assert "activations are those of the module's example_input_array" in said
    assert "this run has no train loader (validate)" in said
    assert said.count("auto_shard is ddp from now on.") == 3


def test_a_loader_that_can_be_read_once_is_not_touched_by_schedulers_that_ask_for_its_length() -> None:
    class Scheduled(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = int(self.trainer.estimated_stepping_batches)
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]

    def train() -> Any:
        seen: list[float] = []

        class Counts(pl.Callback):
            def on_train_batch_end(
                self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Tensor, idx: int
            ) -> None:
                seen.append(batch.sum().item())

        run = trainer(told_strategy("ddp"), max_steps=4, callbacks=[Counts()])
        run.fit(Scheduled(), iter(batches()))
        return seen

    expected = [batch.sum().item() for batch in batches()]
    assert run_distributed(train, 2) == [expected] * 2


def test_the_smallest_memory_of_all_ranks_counts() -> None:
    def ask() -> float:
        import os

        planner = told("ddp")
        memory = 2e9 if os.environ["RANK"] == "1" else 3e9
        trainer(AutoShardStrategy(memory=memory), max_steps=1).fit(Plain(), loader())
        return planner.asked[0]["device"].memory_bytes if planner.asked else 0.0

    assert run_distributed(ask, 2) == [2e9, 0.0]


def test_groups_are_hidden_while_one_rank_plans_and_work_again_afterwards() -> None:
    def hide() -> Any:
        dist.init_process_group("gloo")
        apart, mesh = dist.new_group([0, 1]), init_device_mesh("cpu", (2,))
        rank = dist.get_rank()
        with groups_hidden():
            assert not dist.is_initialized()
            if rank == 0 and not os.fork():
                dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
                dist.all_reduce(torch.ones(1))
                os._exit(0 if dist.get_world_size() == 8 else 1)
        if rank == 0:
            assert os.wait()[1] == 0
        total = torch.ones(1)
        for group in (None, apart, mesh.get_group(), dist.new_group([0, 1])):
            dist.all_reduce(total, group=group)
        return total.item(), functional.all_reduce(torch.ones(1), "sum", mesh).item(), dist.get_rank() == rank

    assert run_distributed(hide, 2) == [(16.0, 2.0, True)] * 2


def test_planning_may_take_longer_than_a_collective() -> None:
    def train() -> Any:
        planner = told("ddp")

        def slowly(*args: Any, **options: Any) -> Any:
            time.sleep(2.5)
            return planner(*args, **options)

        search.plan_module = slowly
        run = trainer(AutoShardStrategy(timeout=timedelta(seconds=1)), max_steps=1)
        run.fit(Plain(), loader())
        assert isinstance(run.strategy, DDPStrategy)
        return run.strategy._timeout

    assert run_distributed(train, 2) == [timedelta(seconds=1)] * 2


# --- what is no candidate --------------------------------------------------------------------------------------------


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layers(batch).square().mean())
        optimizer.step()


class Unlogged(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()


class Two(Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layers.parameters(), lr=0.1), torch.optim.SGD(self.layers.parameters(), lr=0.1)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        return None


def test_strategies_that_would_refuse_the_run_are_not_considered() -> None:
    settings: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (Plain, {}),
        "manual": (Manual, {}),
        "two optimizers": (Two, {}),
        "fp64": (Plain, {"precision": "64-true"}),
        "clip by value": (Plain, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        "swa": (Plain, {"callbacks": [StochasticWeightAveraging(swa_lrs=0.1)]}),
        "compiled": (lambda: torch.compile(Unlogged(), backend="eager"), {}),
        "bare": (Plain, {"barebones": True}),
    }

    def left(case: str) -> set[str]:
        make, more = settings[case]
        planner = told("ddp")
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"))
        more = {**quiet, **more} if "barebones" in more else more
        trainer(AutoShardStrategy(memory="1GB"), max_steps=1, **more).fit(make(), loader())
        return {name.split("_")[0][:4] for asked in planner.asked for name in asked["strategies"]}

    assert run_distributed(each, 2, settings, left)[0] == {
        "plain": {"ddp", "zero", "fsdp", "pipe"},
        "manual": {"ddp", "zero", "fsdp"},
        "two optimizers": {"ddp", "fsdp"},
        "fp64": {"ddp", "pipe"},
        "clip by value": {"ddp", "fsdp", "pipe"},
        "swa": {"ddp"},
        "compiled": {"ddp"},
        "bare": {"ddp", "zero", "fsdp", "pipe"},
    }


def test_nothing_is_chosen_that_makes_no_sense_here() -> None:
    def left(memory: str | None) -> set[str]:
        planner = told("ddp")
        trainer(AutoShardStrategy(memory=memory), max_steps=1).fit(Plain(), loader())
        return {name for asked in planner.asked for name in asked["strategies"]}

    (alone,) = run_distributed(each, 1, [None, "1GB"], left)
    assert alone[None] == {"ddp"}  # the host's memory is the device's
    assert alone["1GB"] == {
        "ddp", "zero1_offload", "zero2_offload", "zero3_offload", "zero3_offload_params", "fsdp2_offload"
    }  # fmt: skip
    two = run_distributed(each, 2, [None, "1GB"], left)[0]
    assert not [name for name in two[None] if "offload" in name] and {"zero3", "fsdp2", "pipeline_zbv"} <= two[None]
    assert "zero3_nvme" not in two["1GB"] and "zero3_offload" in two["1GB"]


# --- refusals --------------------------------------------------------------------------------------------------------


def test_if_nothing_fits_every_rank_says_so_before_anything_runs() -> None:
    class Tells(Plain):
        def configure_model(self) -> None:
            if not next(self.parameters()).is_meta and self.trainer.strategy.lightning_module is self:
                raise AssertionError("it went on")

    def refused() -> str:
        run = trainer(told_strategy(None, memory="1kB", margin=0.5))
        with pytest.raises(pl.utilities.exceptions.MisconfigurationException) as caught:
            run.fit(Tells(), loader())
        assert run.global_step == 0
        return str(caught.value)

    first, second = run_distributed(refused, 2)
    assert first == second
    assert "1 kB, of which 500 B may be used (margin=0.5)" in first
    nearest = [line.strip() for line in first.splitlines() if line.startswith("  ")]
    assert len(nearest) == 3 and nearest[0].startswith("ddp") and "needs 2 kB, 1.5 kB too much" in nearest[0]
    for remedy in ("more devices", "smaller batch", "activation checkpointing", "zero3_nvme"):
        assert remedy in first


def test_layers_that_need_values_are_refused_on_every_rank() -> None:
    class Reads(Later):
        def configure_model(self) -> None:
            self.layers = layers()
            if next(self.layers.parameters()).sum().item() > 1e9:
                raise AssertionError

    def fail() -> None:
        trainer(told_strategy("ddp")).fit(Reads(), loader())

    with pytest.raises(RankFailed, match=r"Reads\.configure_model is run on a copy on the meta device first") as caught:
        run_distributed(fail, 2)
    assert set(caught.value.ranks) == {0, 1}


def test_an_error_of_the_planner_ends_all_ranks() -> None:
    def fail() -> None:
        def broken(*args: Any, **kwargs: Any) -> None:
            raise KeyError("lost")

        told("ddp")
        search.plan_module = broken
        trainer(AutoShardStrategy()).fit(Plain(), loader())

    with pytest.raises(RankFailed, match="lost") as caught:
        run_distributed(fail, 2)
    assert set(caught.value.ranks) == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "h1000"}, r"device='h1000'.*There is no device 'h1000'.*h100"),
        ({"memory": "2 lots"}, r"memory='2 lots'.*is no size"),
        ({"memory": 0}, r"memory=0.*more than 0"),
        ({"margin": 1.0}, r"margin=1.0.*in \[0, 1\)"),
        ({"margin": float("nan")}, r"margin=nan"),
        ({"simulate": -1}, r"simulate=-1.*0 or more"),
        ({"simulate": True}, r"simulate=True"),
        ({"strategies": []}, r"strategies=\[\].*a list of names"),
        ({"strategies": "ddp"}, r"strategies='ddp'.*a list of names"),
        ({"strategies": ["zero33"]}, r"'zero33' cannot be chosen\. Did you mean 'zero3'\?"),
        ({"strategies": ["auto_shard"]}, r"'auto_shard' cannot be chosen\. There are ddp, zero1"),
        ({"strategies": ["ddp", "ddp"]}, r"twice"),
    ],
)
def test_impossible_arguments_are_refused_where_they_are_given(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match=words):
        AutoShardStrategy(**arguments)


# --- modules in the place of modules ---------------------------------------------------------------------------------


class Keywords(pl.LightningModule):
    """A module that is called by keyword, and returns more than a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, 3)
        self.example_input_array = {"x": torch.ones(2, WIDTH), "scale": 2.0}
        self.automatic_optimization = False

    def forward(self, x: Tensor, scale: float) -> dict[str, Any]:
        assert self.layer.weight.numel()
        return {"logits": [self.layer(x) * scale], "index": torch.zeros(2, dtype=torch.long)}


def test_a_forward_stands_for_the_step_where_there_is_only_an_example() -> None:
    module = Keywords()
    copy = with_forward_as_step(module)
    with fake_mode():
        loss = copy.training_step({"x": torch.ones(2, WIDTH, device=copy.layer.weight.device), "scale": 2.0}, 0)
    assert loss.shape == () and loss.requires_grad
    assert copy.automatic_optimization and not module.automatic_optimization
    assert module.layer.weight.grad is None and "training_step" not in vars(module)


def test_layers_are_made_in_the_dtype_of_the_run_and_not_twice() -> None:
    class Unguarded(Plain):
        def first(self) -> Any:
            return torch.nn.Identity()

        def configure_model(self) -> None:
            assert isinstance(self.layers, torch.nn.Identity)
            self.layers = layers()

    module = Unguarded()
    state = torch.get_rng_state()
    copy = with_layers(module, HalfPrecision("bf16-true"))
    copy.configure_model()
    assert {(p.device.type, p.dtype) for p in copy.parameters()} == {("meta", torch.bfloat16)}
    assert not list(module.parameters()) and torch.equal(torch.get_rng_state(), state)
    assert with_layers(Plain(), HalfPrecision("bf16-true")).layers[0][0].weight.dtype == torch.float32


# --- a script that starts its own ranks ------------------------------------------------------------------------------

SCRIPT = """
import sys

import lightning.pytorch as pl

from tests.strategies.auto_runs import WIDTH, Plain, told
from torch.utils.data import DataLoader
import torch


if __name__ == "__main__":
    told(sys.argv[1] if sys.argv[1] != "none" else None)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="auto_shard", fast_dev_run=True, enable_progress_bar=False
    )
    rows = DataLoader(torch.randn(16, WIDTH), batch_size=2)
    module = Plain()
    trainer.fit(module, rows, rows)
    trainer.test(module, rows, verbose=False)
    open(f"{type(trainer.strategy).__name__} on rank {trainer.global_rank} of {trainer.world_size}", "w").close()
"""


def run_script(folder: Path, name: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(SCRIPT)
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "script.py", name],
        cwd=folder,
        env={**env, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        start_new_session=True,  # a failing rank kills the process that started it, not this one
    )


def test_a_script_starts_its_own_ranks(tmp_path: Path) -> None:
    done = run_script(tmp_path, "zero2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} >= {f"ZeROStrategy on rank {rank} of 2" for rank in (0, 1)}
    said = done.stdout + done.stderr
    assert said.count("auto_shard is zero2 from now on") == 1, said


def test_a_script_that_is_refused_ends_and_says_why(tmp_path: Path) -> None:
    done = run_script(tmp_path, "none")
    assert done.returncode, done.stdout + done.stderr
    assert "No strategy fits" in done.stderr and "more devices" in done.stderr

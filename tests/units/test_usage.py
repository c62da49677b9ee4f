"""What a dry run of a step sees, and that it leaves no trace."""

import copy
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_shard.config import SizeUnits
from lightning_shard.testing import run_distributed
from lightning_shard.units import Usage, find_units, merge, watch_step

IMAGES = torch.randn(2, 3, 8, 8)
TOKENS = torch.randint(11, (2, 5))
ROWS = torch.randn(4, 8)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())

    def encode(self, x: Tensor) -> Tensor:
        return self.up(x)


class Of(pl.LightningModule):
    """A module whose training step is a function of itself and the batch."""

    def __init__(self, step: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.step = step
        for name, part in parts.items():
            setattr(self, name, part)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self, batch)

    validation_step = test_step = training_step

    def predict_step(self, batch: Any) -> Tensor:
        return self.step(self, batch)

    def forward(self, batch: Any) -> Tensor:
        return self.step(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def attached(module: pl.LightningModule, **options: Any) -> pl.LightningModule:
    defaults = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module.trainer = pl.Trainer(**{**defaults, **options, "enable_model_summary": False})
    return module


def watched(module: pl.LightningModule, batch: Any, step: str = "training_step") -> Usage:
    return watch_step(attached(module), step, batch)


def blocks(n: int = 2) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(n))


def through(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = block(x)
    return x.sum()


def names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_modules()}


def test_a_plain_stack() -> None:
    module = Of(through, blocks=blocks())
    usage = watched(module, ROWS)
    assert usage == Usage(
        ran=frozenset(names(module) - {"blocks"}),
        outside={"blocks": "blocks.0.norm.weight"},
        complete=True,
        reason="",
    )


STEPS = ["training_step", "validation_step", "test_step", "predict_step"]


@pytest.mark.parametrize("step", STEPS)
def test_every_step_can_be_watched(step: str) -> None:
    def mode(self: Any, x: Tensor) -> Tensor:
        assert torch.is_grad_enabled() == self.training == (step == "training_step")
        trainer = self.trainer
        flags = [trainer.training, trainer.validating, trainer.testing, trainer.predicting]
        assert flags == [step == each for each in STEPS]
        assert self.device == x.device
        return through(self, x)

    usage = watched(Of(mode, blocks=blocks()), ROWS, step)
    assert usage.complete, usage.reason


def test_modules_that_never_run() -> None:
    usage = watched(Of(through, blocks=blocks(), spare=nn.Linear(8, 8)), ROWS)
    assert usage.complete and "spare" not in usage.ran and "spare" not in usage.outside


class UNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)) for _ in range(2))
        self.up = nn.ModuleList(nn.Sequential(nn.Conv2d(6, 3, 3, padding=1), nn.BatchNorm2d(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = block(torch.cat([x, skips.pop()], 1))
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch), batch)


def test_a_unet_with_skips_and_running_statistics() -> None:
    module = UNet()
    before = copy.deepcopy(module.state_dict())
    usage = watched(module, IMAGES)
    assert usage.complete and find_units(module, "blocks", usage).names == ("down.0", "down.1", "up.0", "up.1")
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


class EncoderDecoder(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 2, 2, 8, batch_first=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.transformer(batch, batch).sum()

    validation_step = training_step


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_torchs_encoder_and_decoder(step: str) -> None:
    module = EncoderDecoder()
    usage = watched(module, torch.randn(2, 3, 8), step)
    assert usage.complete, usage.reason
    assert usage.outside["transformer.encoder.layers.0.self_attn.out_proj"]
    assert find_units(module, "blocks", usage).names == tuple(
        f"transformer.{stack}.layers.{i}" for stack in ("encoder", "decoder") for i in (0, 1)
    )


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, bos_token_id=0, eos_token_id=0))


def test_a_hugging_face_model_with_a_tied_embedding() -> None:
    def step(self: Any, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch, labels=batch["input_ids"]).loss

    module = Of(step, model=gpt2())
    usage = watched(module, {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)})
    assert usage.complete, usage.reason
    assert usage.outside["model.lm_head"] == usage.outside["model.transformer.wte"] == "model.transformer.wte.weight"
    assert find_units(module, "blocks", usage).names == ("model.transformer.h.0", "model.transformer.h.1")


OUTSIDE: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "a weight in a function": (lambda self, x: F.linear(x, self.a.up.weight).sum(), "a.up", "a.up.weight"),
    "a method that is not forward": (lambda self, x: self.a.encode(x).sum(), "a", "a.up.weight"),
    "forward without the call": (lambda self, x: self.a.forward(x).sum(), "a", "a.norm.weight"),
    "a weight's transpose": (lambda self, x: (x @ self.a.up.weight.T).sum(), "a.up", "a.up.weight"),
    "a weight's data": (lambda self, x: (x @ self.a.down.weight.data).sum(), "a.down", "a.down.weight"),
    "a detached weight": (lambda self, x: (x @ self.a.down.weight.detach()).sum(), "a.down", "a.down.weight"),
    "weights in a list": (lambda self, x: torch.cat([self.a.up.bias, x.sum(1)]).sum(), "a.up", "a.up.bias"),
    "a keyword": (lambda self, x: F.linear(x, weight=self.a.up.weight).sum(), "a.up", "a.up.weight"),
    "a regulariser": (lambda self, x: sum(p.pow(2).sum() for p in self.a.up.parameters()), "a.up", "a.up.weight"),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_uses_outside_the_forward(case: str) -> None:
    step, culprit, parameter = OUTSIDE[case]
    usage = watched(Of(step, a=Block(), b=Block()), ROWS)
    assert usage.complete, usage.reason
    assert usage.outside[culprit] == parameter
    assert not any(name.startswith("b") for name in usage.outside)


def test_what_only_describes_a_weight_is_no_use() -> None:
    def step(self: Any, x: Tensor) -> Tensor:
        weight = self.a.up.weight
        assert weight.shape == (16, 8) and weight.dtype == torch.float32 and weight.requires_grad and weight.is_leaf
        assert (weight.size(0), weight.dim(), weight.numel(), weight.grad, len(weight)) == (16, 2, 128, None, 16)
        assert weight.device == x.device and weight in {weight} and isinstance(weight, nn.Parameter)
        weight.register_hook(lambda gradient: gradient)
        return self.a(x.to(weight.dtype)).sum()

    usage = watched(Of(step, a=Block()), ROWS)
    assert usage.complete and not usage.outside, usage


def test_a_bound_forward_that_was_saved() -> None:
    module = Of(lambda self, x: self.saved(x).sum(), a=Block())
    module.saved = module.a.forward
    usage = watched(module, ROWS)
    assert usage.outside["a"] == "a.norm.weight" and "a" not in usage.ran and "a.norm" in usage.ran


def test_a_parameter_list_and_a_compiled_module() -> None:
    def step(self: Any, x: Tensor) -> Tensor:
        return self.net(x * self.scales[0]).sum()

    compiled = torch.compile(Block(), backend="eager")
    module = Of(step, net=compiled, scales=nn.ParameterList([nn.Parameter(torch.ones(8))]))
    usage = watched(module, ROWS)
    assert usage.complete, usage.reason
    assert usage.outside == {"scales": "scales.0"} and {"net", "net._orig_mod", "net._orig_mod.up"} <= usage.ran
    assert find_units(module, SizeUnits(min_params=200), usage).names == ("net",)


def test_a_normed_weight() -> None:
    module = Of(lambda self, x: self.a(x).sum(), a=weight_norm(nn.Linear(8, 8)))
    usage = watched(module, ROWS)
    assert usage.complete and "a" in usage.ran and "a" not in usage.outside
    read = Of(lambda self, x: F.linear(x, self.a.weight).sum(), a=weight_norm(nn.Linear(8, 8)))
    assert watched(read, ROWS).outside["a"].startswith("a.parametrizations.weight.original")


def test_weights_that_change_in_place_are_told_and_are_no_use() -> None:
    def average(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, new in zip(self.mean.parameters(), self.net.parameters(), strict=True):
                mean.data.mul_(0.9).add_(new.data, alpha=0.1)
                mean.lerp_(new, 0.1)
        return F.mse_loss(self.net(x), self.mean(x))

    usage = watched(Of(average, net=nn.Linear(8, 8), mean=nn.Linear(8, 8).requires_grad_(False)), ROWS)
    assert usage.complete and not usage.outside
    assert set(usage.changed) == {"mean.weight", "mean.bias"}


def test_heads_chosen_by_the_batch() -> None:
    def step(self: Any, batch: dict[str, Any]) -> Tensor:
        return self.heads[batch["task"]](batch["x"]).sum()

    module = Of(step, heads=nn.ModuleDict({"cat": Block(), "dog": Block()}))
    usage = watched(module, {"task": "dog", "x": ROWS})
    assert usage.complete and "heads.dog" in usage.ran and "heads.cat" not in usage.ran
    assert find_units(module, "blocks", usage).names == ()


def test_activation_checkpointing_runs() -> None:
    def step(self: Any, x: Tensor) -> Tensor:
        loss = checkpoint(self.a, x, use_reentrant=False).sum()
        loss.backward()
        return loss

    usage = watched(Of(step, a=Block()), ROWS)
    assert usage.complete and "a" in usage.ran and not usage.outside


class GAN(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for_generator, for_critic = self.optimizers()
        self.toggle_optimizer(for_generator)
        loss = -self.critic(self.generator(torch.randn_like(batch))).mean()
        for_generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(for_generator, 1.0, "norm")
        nn.utils.clip_grad_norm_(self.generator.parameters(), 1.0)
        for_generator.step()
        self.untoggle_optimizer(for_generator)

        def closure() -> Tensor:
            fake = self.generator(torch.randn_like(batch)).detach().requires_grad_()
            score = self.critic(fake)
            (slope,) = torch.autograd.grad(score.sum(), fake, create_graph=True)
            loss = score.mean() - self.critic(batch).mean() + slope.norm(2, 1).sub(1).pow(2).mean()
            for_critic.zero_grad()
            self.manual_backward(loss)
            return loss

        with for_critic.toggle_model():
            for_critic.step(closure)
        self.lr_schedulers().step()
        self.print(self.all_gather(loss).mean())
        self.log_dict({"loss": loss}, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        generator = torch.optim.Adam(self.generator.parameters())
        critic = torch.optim.Adam(self.critic.parameters())
        return [generator, critic], [torch.optim.lr_scheduler.StepLR(generator, 1)]


def test_a_gan_under_manual_optimization() -> None:
    module = GAN()
    before = copy.deepcopy(module.state_dict())
    usage = watched(module, ROWS)
    assert usage.complete, usage.reason
    assert usage.ran >= {"generator", "critic", "critic.1"} and not usage.outside and not usage.changed
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())
    assert not module.trainer.strategy.optimizers


class Careless(pl.LightningModule):
    """Changes everything that a step can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.accuracy = MulticlassAccuracy(4)
        self.metrics = MetricCollection({"acc": MulticlassAccuracy(4), "f1": MulticlassF1Score(4)})
        self.register_buffer("mean", torch.zeros(4))
        self.bank = torch.zeros(4)
        self.table = np.zeros(4)
        self.draws = np.random.default_rng(0)
        self.state: dict[str, Any] = {"steps": 0, "losses": []}
        self.kept: list[Tensor] = []
        self.net[0].register_forward_hook(lambda *_: self.kept.append(_[-1]))
        features = self.features = []
        self.net[1].register_forward_hook(lambda *_: features.append(_[-1]))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x.mul_(2)
        random.random(), np.random.rand(), torch.rand(1), self.draws.random()
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        self.accuracy(out, y)
        self.metrics.update(out, y)
        self.log("accuracy", self.accuracy)
        self.log_dict(self.metrics.compute())
        self.log("loss", loss)
        self.logger.experiment.add_scalar("loss", loss, 0)
        self.logger.log_metrics({"loss": loss})
        self.mean.mul_(0.9).add_(out.mean(0).detach())
        self.bank = out.detach().mean(0)
        self.bank[0] = 3.0
        self.state["steps"] += 1
        self.state["losses"].append(loss)
        self.trainer.should_stop = True
        self.extra = loss
        self.net[0].weight.note = "changed"
        loss.backward()
        print("never shown")
        return loss


def picture(module: Careless) -> Any:
    return copy.deepcopy(
        (
            {name: value.clone() for name, value in module.state_dict().items()},
            [module.bank, module.table, module.draws.bit_generator.state, module.state, module.kept, module.features],
            sorted(vars(module)),
            {name: len(vars(part)["_forward_hooks"]) for name, part in module.named_modules()},
            [(metric.update_count, metric.tp.sum()) for metric in (module.accuracy, module.metrics["acc"])],
            (module.trainer.should_stop, module.trainer.state.stage, module.trainer.loggers[0].experiment.metrics),
            vars(module.net[0].weight),
            [parameter.grad for parameter in module.parameters()],
            [part.training for part in module.modules()],
        )
    )


def test_a_dry_run_leaves_no_trace(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = attached(Careless(), logger=CSVLogger(tmp_path))
    batch = torch.randn(6, 8), torch.randint(4, (6,))
    inputs = copy.deepcopy(batch)
    before = picture(module)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    usage = watch_step(module, "training_step", batch)
    assert usage.complete, usage.reason
    assert str(picture(module)) == str(before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert all(torch.equal(one, other) for one, other in zip(batch, inputs, strict=True))
    assert capsys.readouterr().out == ""
    module.trainer.should_stop = False
    module.accuracy(torch.randn(6, 4), batch[1])  # the real ones still count
    assert module.accuracy.update_count == 1 and module.accuracy.tp.sum() >= 0


def by_item(self: Any, x: Tensor) -> Tensor:
    loss = self.a(x).sum()
    if loss.item() > 0:
        loss = loss + self.b.forward(x).sum()
    return loss


def by_bool(self: Any, x: Tensor) -> Tensor:
    loss = self.a(x).sum()
    while not bool(loss > 1e9):
        loss = loss * 2
    return loss


def by_mask(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return self.b.forward(y[y > 0].new_zeros(4, 8)).sum()


DATA_DEPENDENT = {"item": by_item, "__getitem__": by_mask}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_a_step_that_wants_values_goes_on_with_made_up_ones_and_is_not_complete(name: str) -> None:
    module = Of(DATA_DEPENDENT[name], a=Block(), b=Block(), spare=nn.ModuleList([Block(), Block()]))
    usage = watched(module, ROWS)
    assert not usage.complete
    assert usage.reason.startswith(f"in the step: {name} wants values of a tensor") and "\n" not in usage.reason
    assert "a" in usage.ran and usage.outside["b"] == "b.norm.weight"
    # Nothing can be said of what did not run.
    assert find_units(module, "blocks", usage).names == ("spare.0", "spare.1")


def test_a_loop_that_waits_for_a_value_ends() -> None:
    start = time.monotonic()
    usage = watched(Of(by_bool, a=Block()), ROWS)
    assert not usage.complete and "a" in usage.ran and time.monotonic() - start < 20


def failing(self: Any, x: Tensor) -> Tensor:
    self.a(x)
    raise KeyError("no such thing\nin the batch")


def test_what_fails_ends_the_run_with_what_was_seen() -> None:
    usage = watched(Of(failing, a=Block()), ROWS)
    assert not usage.complete and "a" in usage.ran
    assert usage.reason.startswith("in the step: KeyError: ") and "\n" not in usage.reason
    inside = watched(Of(lambda self, x: self.a(x.numpy()), a=Block()), ROWS)
    assert not inside.complete and inside.reason.startswith("in the step: ")
    wrong = watched(Of(lambda self, x: self.a(x[:, :3]), a=Block()), ROWS)
    assert wrong.reason.startswith("in the forward of 'a.norm': ")


def test_an_iterator_is_not_advanced() -> None:
    numbers = iter([1.0, 2.0])
    usage = watched(Of(lambda self, x: self.a(x * next(self.numbers)).sum(), a=Block(), numbers=numbers), ROWS)
    assert not usage.complete and "must not advance" in usage.reason
    assert next(numbers) == 1.0


def test_a_step_that_draws_its_own_batches_is_not_run() -> None:
    class Drawing(Of):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
            raise AssertionError

    usage = watched(Drawing(through, blocks=blocks()), ROWS)
    assert not usage.complete and "dataloader_iter" in usage.reason


def test_a_module_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = UNet()
    usage = watched(module, IMAGES)
    assert usage.complete, usage.reason
    assert all(parameter.is_meta for parameter in module.parameters())
    assert find_units(module, "blocks", usage).names == ("down.0", "down.1", "up.0", "up.1")


def test_a_large_module_takes_no_memory() -> None:
    with torch.device("meta"):
        module = Of(through, blocks=nn.ModuleList([Block(20_000), Block(20_000)]))  # 12.8 GB
    assert watched(module, torch.empty(10**6, 20_000, device="meta")).complete


def test_a_real_tensor_in_a_closure_is_read_and_never_changed() -> None:
    table = torch.ones(8)
    net = nn.Linear(8, 8)
    module = Of(lambda self, x: F.linear(x.add(table.mul_(2)), net.weight).sum(), net=net)
    usage = watched(module, ROWS)
    assert usage.complete, usage.reason
    assert usage.outside == {"net": "net.weight"} and table.tolist() == [1.0] * 8


def test_autocast() -> None:
    def step(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return through(self, x)

    assert watched(Of(step, blocks=blocks()), ROWS).complete


def test_a_lazy_module_is_told() -> None:
    usage = watched(Of(lambda self, x: self.a(x).sum(), a=nn.LazyLinear(3)), ROWS)
    assert not usage.complete and "lazy" in usage.reason


def test_runs_merge() -> None:
    one = Usage(ran=frozenset({"a"}), outside={"x": "x.w"}, changed={"w": frozenset({"v"})}, complete=True, reason="")
    other = Usage(ran=frozenset({"b"}), outside={"x": "x.v", "y": "y.w"}, complete=False, reason="it failed")
    both = merge([one, other, other])
    assert (
        both.ran == {"a", "b"} and both.outside == {"x": "x.w", "y": "y.w"} and both.changed == {"w": frozenset({"v"})}
    )
    assert not both.complete and both.reason == "it failed"
    assert merge([one, one]).complete


def after_b(step: Callable[..., Tensor], self: Any, x: Tensor) -> Tensor:
    return step(self, self.b(x))


def call_all(self: Any, x: Tensor) -> Tensor:
    for part in self.children():
        x = part(x)
    return x.sum()


def attend(self: Any, x: Tensor) -> Tensor:
    return self.transformer(x.reshape(1, 4, 8), x.reshape(1, 4, 8)).sum()


def scaled(self: Any, x: Tensor) -> Tensor:
    return (self.a(x) * self.scales[0]).sum()


def tied_output(self: Any, x: Tensor) -> Tensor:
    tokens = x.argmax(-1)
    return F.cross_entropy(F.linear(self.a(self.embed(tokens)), self.embed.weight), tokens)


def recurrent() -> nn.Module:
    return nn.LSTM(8, 8, batch_first=True)


ODD: dict[str, Callable[[], Of]] = {
    **{case: partial(Of, partial(after_b, step), a=Block(), b=Block()) for case, (step, *_) in OUTSIDE.items()},
    "attention": lambda: Of(attend, transformer=nn.Transformer(8, 2, 2, 2, 8, dropout=0.0, batch_first=True)),
    "normed weights": lambda: Of(call_all, a=weight_norm(nn.Linear(8, 8)), b=weight_norm(nn.Linear(8, 8))),
    "compiled": lambda: Of(call_all, a=torch.compile(Block(), backend="eager"), b=Block()),
    "recurrent": lambda: Of(lambda self, x: self.a(x)[0].sum(), a=recurrent()),
    "parameter list": lambda: Of(scaled, a=Block(), scales=nn.ParameterList([nn.Parameter(torch.ones(8))])),
    "functional tie": lambda: Of(tied_output, embed=nn.Embedding(8, 8), a=Block()),
    "blocks": lambda: Of(through, blocks=blocks(3)),
}


def communicating(self: Any, x: Tensor) -> Tensor:
    loss = self.a(x).sum()
    dist.all_reduce(loss)
    dist.barrier()
    return self.trainer.strategy.reduce(loss)


def alone() -> Usage | None:
    """A dry run on one rank only, which waits for no other."""
    dist.init_process_group("gloo")
    return watched(Of(communicating, a=Block()), ROWS) if dist.get_rank() == 0 else None


@pytest.mark.ranks
def test_a_dry_run_communicates_nothing() -> None:
    usage, nothing = run_distributed(alone, 2)
    assert usage is not None and usage.complete and nothing is None


def compare_all() -> dict[str, str]:
    """The loss in training and evaluation, and the gradients, of each odd module in the smallest units there can be."""
    dist.init_process_group("gloo")
    wrong = {}
    for case, make in ODD.items():
        try:
            torch.manual_seed(1)
            x, plain = torch.randn(4, 8), make()
            sharded = copy.deepcopy(plain)
            usage = merge(watched(sharded, x, step) for step in ("training_step", "validation_step"))
            units = find_units(sharded, SizeUnits(min_params=1), usage).names
            assert usage.complete and units, (units, usage)
            for unit in units:
                fully_shard(sharded.get_submodule(unit), reshard_after_forward=True)
            fully_shard(sharded, reshard_after_forward=True)
            for _ in range(2):
                expected, loss = plain(x), sharded(x)
                torch.testing.assert_close(loss, expected)
                expected.backward(), loss.backward()
            gradients = {name: p.grad for name, p in sharded.named_parameters()}
            for name, parameter in plain.named_parameters():
                found = gradients[name]
                torch.testing.assert_close(None if found is None else found.full_tensor(), parameter.grad)
            with torch.no_grad():
                torch.testing.assert_close(sharded.eval()(x), plain.eval()(x))
        except Exception as error:
            wrong[case] = f"{type(error).__name__}: {error}"
    return wrong


@pytest.mark.ranks
def test_units_by_what_was_seen_are_whole_wherever_their_weights_are_used() -> None:
    assert run_distributed(compare_all, 2) == [{}, {}]


class FewArguments(Of):
    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return self.step(self, batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:  # type: ignore[override]
        assert (batch_idx, dataloader_idx) == (0, 0)
        return self.step(self, batch)

    def test_step(self, *args: Any) -> Tensor:
        batch, batch_idx = args
        assert batch_idx == 0
        return self.step(self, batch)


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_steps_take_what_they_name(step: str) -> None:
    usage = watched(FewArguments(through, blocks=blocks()), ROWS, step)
    assert usage.complete, usage.reason

"""All stages of a step, one after the other in one process, against the whole step."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_shard.pipeline.absent import is_absent
from lightning_shard.pipeline.boundary import Boundary
from lightning_shard.pipeline.cuts import Cut, parameter_stages
from lightning_shard.pipeline.find_cuts import CutFinder
from lightning_shard.pipeline.layout import Layout
from lightning_shard.pipeline.ownership import keep_own
from lightning_shard.pipeline.recompute import Recompute
from lightning_shard.pipeline.record import record_step
from lightning_shard.pipeline.replay import Replay
from lightning_shard.pipeline.seeds import mix, seed_everything
from lightning_shard.pipeline.split_backward import backward_inputs, backward_weights
from lightning_shard.pipeline.stages import StagePlan, plan_stages
from lightning_shard.pipeline.trace import Trace

CPU = torch.device("cpu")
SEED = 7


@dataclass(kw_only=True)
class Case:
    """A module, and what it is run on."""

    make: Callable[[], pl.LightningModule]
    microbatches: list[Any]
    cuts: int
    """How many cuts there must be at least."""

    fake: bool = True
    precision: Precision = field(default_factory=Precision)
    tolerance: float = 2e-6
    recompute: bool = True
    """Whether forwards may be run again in backward."""

    def build(self) -> pl.LightningModule:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.make()

    def trace(self, step: str = "training_step") -> Trace:
        return record_step(self.build(), step, self.microbatches[0], CPU, self.precision, fake=self.fake)


@dataclass(kw_only=True)
class Outcome:
    """What a run of all microbatches gives."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    modules: list[pl.LightningModule]


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trace_of(
    module: pl.LightningModule, batch: Any, step: str = "training_step", *, fake: bool = True, guess: bool = False
) -> Trace:
    return record_step(module, step, batch, CPU, Precision(), fake=fake, guess=guess)


def cuts_of(trace: Trace) -> list[Cut]:
    return CutFinder(trace).find()[0]


def whole(case: Case) -> Outcome:
    """The step as one process runs it, on one microbatch after the other."""
    module = case.build()
    losses = []
    for number, microbatch in enumerate(case.microbatches):
        seed_everything(mix(SEED, number))
        with case.precision.forward_context():
            loss = loss_of(module.training_step(microbatch, number))
        (loss / len(case.microbatches)).backward()
        losses.append(loss.detach())
    gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    return Outcome(losses=losses, gradients=gradients, modules=[module])


def staged(case: Case, trace: Trace, cuts: Sequence[Cut], backward: str = "full") -> Outcome:
    """The step stage by stage, each on a module with its own parameters only.

    Args:
        case: The case.
        trace: Of its step.
        cuts: Where stages end.
        backward: ``full``, ``split`` (inputs first, weights at the end) or ``again`` (the forward is recomputed).

    """
    plans, modules, replays = stages_of(case, trace, cuts)
    count = len(case.microbatches)
    crossing: list[list[Tensor]] = [[] for _ in range(count)]
    graphs: dict[tuple[int, int], tuple[Sequence[Tensor], list[Tensor]]] = {}
    losses: list[Tensor] = []
    for stage, plan in enumerate(plans):
        for number in range(count):
            received = [
                tensor.detach().clone().requires_grad_(wire.gradient)
                for wire, tensor in zip(plan.receives, crossing[number], strict=True)
            ]
            run = partial(_stage, case, modules[stage], replays[stage], plan, number)
            if backward != "again":
                found = run(*received)
            elif plan.is_last:
                found = run(*received, recompute=Recompute(modules[stage]))
            else:
                found = Recompute(modules[stage])(run, *received)
            if plan.is_last:
                losses.append(loss_of(found).detach())
                found = (loss_of(found) / count,)
            needed = [tensor for tensor in received if tensor.requires_grad]
            outputs = Boundary.apply(len(needed), *needed, *found)
            graphs[stage, number] = (outputs, received)
            crossing[number] = list(outputs)
    for number in range(count):
        gradients: list[Tensor | None] = [None]
        for stage in reversed(range(len(plans))):
            outputs, received = graphs[stage, number]
            gradients = _backward(outputs, gradients, received, modules[stage], backward)
            gradients = [
                None if not wire.gradient else torch.zeros(wire.shape, dtype=wire.dtype) if each is None else each
                for wire, each in zip(plans[stage].receives, gradients, strict=True)
            ]
    summed: dict[str, Tensor] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                assert not is_absent(parameter), name
                summed[name] = summed[name] + parameter.grad if name in summed else parameter.grad
    for replay in replays:
        replay.unwrap()
    return Outcome(losses=losses, gradients=summed, modules=modules)


def stages_of(case: Case, trace: Trace, cuts: Sequence[Cut]) -> tuple[list[StagePlan], list[Any], list[Replay]]:
    """For each stage its plan, and a module that has its own parameters only; in a group of one rank."""
    plans = plan_stages(trace, cuts)
    uses = parameter_stages(trace, cuts)
    modules, replays = [], []
    for plan in plans:
        module = case.build()
        owners = {name: tuple(sorted(uses.get(name, {0}))) for name, _ in module.named_parameters()}
        layout = Layout(cuts=[cut.keys for cut in cuts], owners=owners)
        keep_own(module, layout, [plan.stage], CPU)
        replay = Replay(module)
        replay.wrap(plan.modules)
        modules.append(module)
        replays.append(replay)
    return plans, modules, replays


def evaluated(case: Case, trace: Trace, cuts: Sequence[Cut]) -> list[Any]:
    """What the evaluation step returns for each microbatch, stage by stage."""
    plans, modules, replays = stages_of(case, trace, cuts)
    results = []
    with torch.no_grad():
        for number in range(len(case.microbatches)):
            found: Any = ()
            for plan, module, replay in zip(plans, modules, replays, strict=True):
                found = _stage(case, module.eval(), replay, plan, number, *(each.clone() for each in found))
            results.append(found)
    return results


def _stage(
    case: Case, module: Any, replay: Replay, plan: StagePlan, number: int, *received: Tensor, recompute: Any = None
) -> Any:
    seed = mix(SEED, number)
    seed_everything(seed)

    def step() -> Any:
        with case.precision.forward_context():
            return getattr(module, plan.step)(case.microbatches[number], number)

    return replay.run(plan, step, received, CPU, lambda point: seed_everything(mix(seed, point)), recompute)


def _backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], received: list[Tensor], module: Any, how: str
) -> list[Tensor | None]:
    reached = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    if not reached:
        return [None] * len(received)
    if how == "split" and any(tensor.requires_grad for tensor in received):
        own = [parameter for parameter in module.parameters() if not is_absent(parameter)]
        found, part = backward_inputs(outputs, gradients, received, own)
        backward_weights(part)
        return list(found)
    torch.autograd.backward([output for output, _ in reached], [gradient for _, gradient in reached])
    return [tensor.grad for tensor in received]


def loss_of(result: Any) -> Tensor:
    loss: Tensor = result["loss"] if isinstance(result, dict) else result
    return loss


def assert_same(case: Case, expected: Outcome, found: Outcome, what: str) -> None:
    """Losses, gradients and, on one of the stages, buffers agree; what has no gradient has none."""
    for number, (loss, other) in enumerate(zip(expected.losses, found.losses, strict=True)):
        assert torch.allclose(loss, other, atol=case.tolerance, rtol=1e-5), (what, number, loss, other)
    assert expected.gradients.keys() == found.gradients.keys(), (
        what,
        expected.gradients.keys() ^ found.gradients.keys(),
    )
    for name, buffer in expected.modules[0].named_buffers():
        assert any(torch.allclose(buffer, module.get_buffer(name)) for module in found.modules), (what, name)
    for name, gradient in expected.gradients.items():
        difference = (gradient - found.gradients[name]).abs().max().item()
        scale = max(1.0, gradient.abs().max().item())
        assert difference <= case.tolerance * scale, (what, name, difference)


def splits_of(cuts: Sequence[Cut], three: int = 3, four: int = 1) -> list[tuple[Cut, ...]]:
    """Every cut for two stages, and some choices of cuts for three and four stages."""
    chosen: list[tuple[Cut, ...]] = [(cut,) for cut in cuts]
    for number, most in ((2, three), (3, four)):
        every = list(itertools.combinations(cuts, number))
        chosen += every[:: max(1, len(every) // max(1, most))][:most]
    return chosen


def assert_replays(case: Case) -> None:
    """The step gives the same gradients at every allowed cut, whichever way its backward goes."""
    trace = case.trace()
    cuts, refused = CutFinder(trace).find()
    names = [cut.call.name for cut in cuts]
    assert len(cuts) >= case.cuts, (names, [(each.name, each.reason) for each in refused])
    expected = whole(case)
    assert expected.gradients, "nothing is trained"
    with alone():
        for place, chosen in enumerate(splits_of(cuts)):
            how = ("full", "split", "again" if case.recompute else "full")[place % 3]
            what = f"cut behind {[cut.call.key for cut in chosen]}, {how} backward"
            try:
                found = staged(case, trace, chosen, how)
            except Exception as error:
                error.add_note(what)
                raise
            assert_same(case, expected, found, what)


def assert_evaluates(case: Case) -> None:
    """The evaluation step returns the same at every allowed cut."""
    trace = case.trace("validation_step")
    cuts = cuts_of(trace)
    assert len(cuts) >= case.cuts, [cut.call.name for cut in cuts]
    module, expected = case.build().eval(), []
    with torch.no_grad(), case.precision.forward_context():
        for number, microbatch in enumerate(case.microbatches):
            seed_everything(mix(SEED, number))
            expected.append(loss_of(module.validation_step(microbatch, number)))
    with alone():
        for chosen in splits_of(cuts, three=2, four=0):
            what = f"cut behind {[cut.call.key for cut in chosen]}"
            try:
                found = evaluated(case, trace, chosen)
            except Exception as error:
                error.add_note(what)
                raise
            for one, other in zip(expected, found, strict=True):
                assert torch.allclose(one, loss_of(other), atol=case.tolerance, rtol=1e-5), (what, one, other)

"""A pipeline at work: the microbatches of a batch through this rank's stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from lightning_shard._compat.pipelining import (
    ReplayStage,
    make_fill_drain,
    make_schedule,
    meet_neighbours,
    place_stages,
    run_forward_only,
)
from lightning_shard.pipeline.absent import AbsentTensor, absent_of
from lightning_shard.pipeline.boundary import Boundary
from lightning_shard.pipeline.digest import batch_digest, check_same_batch
from lightning_shard.pipeline.effects import Effects
from lightning_shard.pipeline.exchange import Exchange
from lightning_shard.pipeline.logs import LogRecorder, fetch_elsewhere
from lightning_shard.pipeline.metrics import MetricSync
from lightning_shard.pipeline.microbatch import Microbatch, join_outputs, split_batch
from lightning_shard.pipeline.plans import Plans
from lightning_shard.pipeline.recompute import Recompute
from lightning_shard.pipeline.replay import Replay
from lightning_shard.pipeline.schedule import per_rank, why_impossible
from lightning_shard.pipeline.seeds import mix, own_numbers, seed_everything
from lightning_shard.pipeline.setting import Setting
from lightning_shard.pipeline.stages import StagePlan
from lightning_shard.pipeline.structure import map_leaves


@dataclass(kw_only=True)
class _Batch:
    """The batch that runs at the moment."""

    step: str
    microbatches: list[Microbatch]
    weights: list[float]
    plans: list[list[StagePlan]]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    seed: int
    scale: float
    losses: dict[int, Tensor]
    outputs: dict[int, Any]


class Pipeline:
    """Runs steps of a module in microbatches.

    Args:
        module: The LightningModule, of which this rank has its own stages' parameters.
        setting: What to run with.
        plans: Plans of stages.
        replay: Runs stages.
        precision: In whose context steps run.
        owned: Gives the parameters of a stage.

    """

    def __init__(
        self,
        module: "pl.LightningModule",
        setting: Setting,
        plans: Plans,
        replay: Replay,
        precision: Precision,
        owned: Callable[[int], Sequence[nn.Parameter]],
    ) -> None:
        self.setting = setting
        self.on_backward: Callable[[Tensor], None] = lambda loss: None
        self._module = module
        self._plans = plans
        self._replay = replay
        self._precision = precision
        self._exchange = Exchange(setting.group, setting.last_rank, setting.device)
        self._logs = LogRecorder(module)
        self._effects = Effects(module, setting.device)
        self._schedules: dict[int, Any] = {}
        self._wires: Any = None
        self._batch: _Batch | None = None
        self._recompute = Recompute(module) if setting.activation_checkpointing else None
        self._announced = False
        per = per_rank(setting.schedule, setting.stages_per_rank)
        self._stages = [
            ReplayStage(
                self._runner(stage),
                self._owned(owned, stage),
                stage,
                setting.ranks * per,
                setting.device,
                setting.group,
            )
            for stage in setting.own_stages
        ]
        place_stages(self._stages, setting.schedule, setting.ranks, setting.stages_per_rank)
        for stage in self._stages:
            stage.on_backward = self._first_backward
        meet_neighbours(self._stages)

    def watch_metrics(self, replicas: Any) -> MetricSync:
        """Let metrics be computed on all ranks."""
        self.metrics = MetricSync(self._module, self._exchange, replicas)
        return self.metrics

    def broadcast_from_last(self, channel: str, value: Any) -> Any:
        """``value`` of the last stage, on every rank of the pipeline. Collective."""
        return self._exchange.broadcast(channel, value)

    # --- steps ---

    def train(self, batch: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], seed: int, scale: float) -> Any:
        """Forward and backward of all microbatches; gradients are added to the parameters here.

        Args:
            batch: The batch, whole, on this rank's device.
            arguments: Further positional arguments of the step.
            keywords: Further keyword arguments of the step.
            seed: Seed of the batch's random numbers, the same on all ranks.
            scale: Factor of the loss, besides the microbatches' weights.

        Returns:
            What one process' step would return for the batch: the mean loss, and what else it returns.

        """
        current = self._begin("training_step", batch, arguments, keywords, seed, scale)
        count = len(current.microbatches)
        schedule = self._schedule(count)
        self._announced = False
        with own_numbers(), self._logs.recording(), self.metrics.in_step(), torch.enable_grad():
            numbers = torch.arange(count)
            if self.setting.has_last_stage:
                schedule.step(target=numbers, losses=[], return_outputs=False)
            else:
                schedule.step()
            # What a failed or finished step leaves must not keep activations alive.
            for stage in self._stages:
                stage.clear_runtime_states()
        if not self._announced:
            self._first_backward(None)
        return self._finish(current)

    def evaluate(self, step: str, batch: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], seed: int) -> Any:
        """Forward of all microbatches; returns what one process' step would return, on every rank."""
        current = self._begin(step, batch, arguments, keywords, seed, 1.0)
        with own_numbers(), self._logs.recording(), self.metrics.in_step(), torch.no_grad():
            run_forward_only(self._stages, len(current.microbatches))
        return self._finish(current)

    def _begin(
        self, step: str, batch: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], seed: int, scale: float
    ) -> _Batch:
        microbatches = split_batch(batch, self.setting.microbatches)
        plans = self._plans.find(step, [microbatch.batch for microbatch in microbatches])
        wires = [
            ([plan[stage.stage_index].receives for plan in plans], [plan[stage.stage_index].sends for plan in plans])
            for stage in self._stages
        ]
        if wires != self._wires:
            for stage, (receives, sends) in zip(self._stages, wires, strict=True):
                stage.prepare(receives, sends)
            self._wires = wires
        self._effects.begin()
        self._batch = _Batch(
            step=step,
            microbatches=microbatches,
            weights=self._weights(microbatches),
            plans=plans,
            arguments=arguments,
            keywords=keywords,
            seed=seed,
            scale=scale,
            losses={},
            outputs={},
        )
        return self._batch

    def _weights(self, microbatches: list[Microbatch]) -> list[float]:
        """Each microbatch's share of the batch's mean: by rows, or as the module says."""
        weigh = getattr(self._module, "microbatch_weight", None)
        amounts = [float(weigh(each.batch)) if weigh is not None else float(each.rows) for each in microbatches]
        total = sum(amounts)
        if any(not amount >= 0 for amount in amounts) or not 0 < total < float("inf"):
            raise MisconfigurationException(
                f"{type(self._module).__name__}.microbatch_weight returned {amounts} for the microbatches of a batch;"
                " the weights must be numbers of at least 0, and not all 0."
            )
        return [amount / total for amount in amounts]

    def _finish(self, current: _Batch) -> Any:
        known = None
        digest = batch_digest([microbatch.batch for microbatch in current.microbatches], self.setting.device)
        rows = [microbatch.rows for microbatch in current.microbatches]
        entries = self._logs.merged(current.weights, rows)
        if self.setting.has_last_stage:
            order = range(len(current.microbatches))
            self._effects.join_lists(rows)
            outputs = None
            if len(current.outputs) == len(rows) and all(current.outputs[number] is not None for number in order):
                outputs = join_outputs([current.outputs[number] for number in order], rows)
            loss = sum(current.losses[n] * current.weights[n] for n in order) if current.losses else None
            missing = [place for place, entry in enumerate(entries) if isinstance(entry[1], AbsentTensor)]
            shown = [(name, None if place in missing else value, kw) for place, (name, value, kw) in enumerate(entries)]
            known = (loss, outputs, shown, missing, self._effects.changed(), digest)
        self._batch = None
        loss, outputs, shown, missing, changes, theirs = self._exchange.broadcast(current.step, known)
        check_same_batch(current.step, digest, theirs)
        if not self.setting.has_last_stage:
            self._effects.apply(changes)
        shown = fetch_elsewhere(shown, entries, missing, self.setting.group, self.setting.device)
        self._logs.log(shown, sum(rows))
        if current.step != "training_step":
            return outputs
        return {**outputs, "loss": loss} if isinstance(outputs, dict) else loss

    # --- schedules ---

    def _schedule(self, count: int) -> Any:
        if count not in self._schedules:
            name, ranks = self.setting.schedule, self.setting.ranks
            if why_impossible(name, ranks, self.setting.stages_per_rank, count) is None:
                made = make_schedule(name, self._stages, count, _loss_of)
            else:  # a short batch
                made = make_fill_drain(self._stages, count, _loss_of)
            self._schedules[count] = made
        # A schedule of another length may have told the stages another length.
        place_stages(self._stages, self.setting.schedule, self.setting.ranks, self.setting.stages_per_rank)
        return self._schedules[count]

    # --- one stage ---

    def _owned(
        self, owned: Callable[[int], Sequence[nn.Parameter]], stage: int
    ) -> Callable[[], Sequence[nn.Parameter]]:
        return lambda: owned(stage)

    def _runner(self, stage: int) -> Callable[[int, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        def run(chunk: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            assert self._batch is not None
            plan = self._batch.plans[chunk][stage]
            trains = torch.is_grad_enabled()
            if trains and self._recompute is not None and not plan.is_last:
                found = self._run_again_in_backward(plan, chunk, received)
            else:
                found = self._run(self._batch, plan, chunk, received)
            if plan.is_last:
                self._effects.after_microbatch(chunk)
                found = self._last(self._batch, chunk, found)
            if not trains or not found:
                return tuple(tensor.contiguous() for tensor in found)
            needed = [tensor for tensor in received if tensor.requires_grad]
            return tuple(Boundary.apply(len(needed), *needed, *found))  # type: ignore[no-untyped-call]

        return run

    def _run(self, batch: _Batch, plan: StagePlan, chunk: int, received: Sequence[Tensor]) -> Any:
        """The user's step on one microbatch, as far as this stage goes."""
        seed = mix(batch.seed, chunk)
        seed_everything(seed)
        self._logs.begin(chunk)
        method = getattr(self._module, batch.step)
        # A batch of its own for every run: a step may take things out of it, or change it in place.
        microbatch = map_leaves(batch.microbatches[chunk].batch, Tensor, torch.clone if plan.writes_batch else _same)

        def step() -> Any:
            with self._precision.forward_context():
                return method(microbatch, *batch.arguments, **batch.keywords)

        return self._replay.run(
            plan,
            step,
            received,
            self.setting.device,
            lambda point: seed_everything(mix(seed, point)),
            # The last stage's step has a loss, metrics and logs behind its modules, which must happen once.
            self._recompute if plan.is_last and torch.is_grad_enabled() else None,
        )

    def _run_again_in_backward(self, plan: StagePlan, chunk: int, received: tuple[Tensor, ...]) -> Any:
        batch = self._batch
        assert batch is not None and self._recompute is not None
        first = True

        def forward(*inputs: Tensor) -> Any:
            nonlocal first
            self._logs.muted, first = not first, False
            try:
                return self._run(batch, plan, chunk, inputs)
            finally:
                self._logs.muted = False

        return self._recompute(forward, *received)

    def _last(self, batch: _Batch, chunk: int, result: Any) -> tuple[Tensor, ...]:
        if batch.step != "training_step":
            batch.outputs[chunk] = result
            return ()
        loss = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(loss, Tensor) or isinstance(loss, AbsentTensor):
            what = f"a value from {loss.origin!r}, of another stage," if isinstance(loss, AbsentTensor) else "no tensor"
            raise MisconfigurationException(
                f"{type(self._module).__name__}.training_step returned {what} as its loss for microbatch {chunk}; a"
                " pipeline needs a loss tensor for every microbatch (None, to skip a batch, is not possible)."
            )
        if not loss.requires_grad:
            raise RuntimeError(
                f"The loss that {type(self._module).__name__}.training_step returned for microbatch {chunk} does not"
                " require gradients; it must be computed from the module's parameters."
            )
        batch.losses[chunk] = loss.detach()
        if isinstance(result, dict):
            batch.outputs[chunk] = {key: value for key, value in result.items() if key != "loss"}
        return (loss * (batch.weights[chunk] * batch.scale),)

    def _first_backward(self, loss: Tensor | None) -> None:
        if not self._announced:
            self._announced = True
            if loss is None:
                loss = absent_of((), torch.get_default_dtype(), self.setting.device, "the last stage's loss")
            self.on_backward(loss)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _loss_of(output: Any, target: Any) -> Tensor:
    """The schedule's loss function: the last stage returns its loss already."""
    loss: Tensor = output[0]
    return loss

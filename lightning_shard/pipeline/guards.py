"""Refusals and warnings before the first step."""

from typing import Any, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer

from lightning_shard._compat.pipelining import has_gradient_hooks, has_tensor_hooks
from lightning_shard.pipeline.layout import is_laid_out
from lightning_shard.pipeline.recompute import BATCH_NORMS
from lightning_shard.pipeline.schedule import SCHEDULES, ScheduleName, per_rank, why_impossible
from lightning_shard.pipeline.trace import Trace
from lightning_shard.trial import differs, distinct_settings, train_copy, trial_problem

_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")
_KNOWN = frozenset("SGD ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop Adafactor Muon".split())
"""Classes of torch.optim that treat every parameter by itself."""


def check_arguments(
    stages: Any, microbatches: Any, schedule: Any, stages_per_rank: Any, split: Any, balance: Any, data_parallel: Any
) -> None:
    """Refuse arguments that are impossible by themselves.

    Raises:
        MisconfigurationException: Naming the argument, its value and what it may be.

    """
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value != "auto" and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            raise MisconfigurationException(
                f"PipelineStrategy({name}={value!r}): a whole number of at least 1, or 'auto'."
            )
    if schedule not in get_args(ScheduleName):
        raise MisconfigurationException(
            f"PipelineStrategy(schedule={schedule!r}): choose one of {', '.join(get_args(ScheduleName))}."
        )
    if not isinstance(stages_per_rank, int) or isinstance(stages_per_rank, bool) or stages_per_rank < 1:
        raise MisconfigurationException(
            f"PipelineStrategy(stages_per_rank={stages_per_rank!r}): a whole number of at least 1."
        )
    fixed = SCHEDULES[schedule].stages_per_rank
    if fixed == 2 and stages_per_rank != 2:
        raise MisconfigurationException(
            f"PipelineStrategy(schedule={schedule!r}, stages_per_rank={stages_per_rank}): this schedule has exactly 2"
            " stages on each rank."
        )
    if split != "auto" and not (isinstance(split, list) and split and all(isinstance(name, str) for name in split)):
        raise MisconfigurationException(
            f"PipelineStrategy(split={split!r}): 'auto', or a list of names of modules at whose ends the stages end."
        )
    if balance not in ("flops", "parameters", "memory"):
        raise MisconfigurationException(
            f"PipelineStrategy(balance={balance!r}): choose 'flops', 'parameters' or 'memory'."
        )
    if data_parallel not in ("replicate", "shard"):
        raise MisconfigurationException(
            f"PipelineStrategy(data_parallel={data_parallel!r}): choose 'replicate' or 'shard'."
        )


def check_precision(precision: str) -> None:
    """Refuse precisions that a pipeline cannot have.

    Raises:
        MisconfigurationException: Naming it.

    """
    if precision == "16-mixed":
        raise MisconfigurationException(
            "PipelineStrategy does not support precision='16-mixed': a loss scaler decides on each rank by that rank's"
            " gradients whether to skip a step, so stages would part. Use 'bf16-mixed', which needs no scaler."
        )
    if precision not in _PRECISIONS:
        raise MisconfigurationException(
            f"PipelineStrategy does not support precision={precision!r}. Choose one of {', '.join(_PRECISIONS)}."
        )


def check_schedule(schedule: ScheduleName, ranks: int, stages_per_rank: int, microbatches: int, split: Any) -> None:
    """Refuse numbers that a schedule cannot run with.

    Raises:
        MisconfigurationException: With the numbers and the rule.

    """
    if (reason := why_impossible(schedule, ranks, stages_per_rank, microbatches)) is not None:
        raise MisconfigurationException(f"PipelineStrategy(schedule={schedule!r}): {reason}")
    stages = ranks * per_rank(schedule, stages_per_rank)
    if split != "auto" and len(split) != stages - 1:
        raise MisconfigurationException(
            f"PipelineStrategy(split=[...]) has {len(split)} names, but {ranks} ranks with"
            f" {per_rank(schedule, stages_per_rank)} stage(s) each make {stages} stages, which end at {stages - 1}"
            " modules (the last one ends with the step)."
        )


def check_module(trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
    """Refuse modules, callbacks and settings that a pipeline cannot run; warn of what means something else in one.

    Raises:
        MisconfigurationException: Naming the culprit.

    """
    fits = trainer.state.fn == TrainerFn.FITTING
    kind = type(module).__name__
    if fits and not module.automatic_optimization:
        raise MisconfigurationException(
            f"{kind} optimizes manually (automatic_optimization=False), but in a pipeline the schedule runs the"
            " backwards. Return the loss from training_step instead, with one optimizer, or use strategy='fsdp2'."
        )
    if fits and is_overridden("backward", module, pl.LightningModule):
        raise MisconfigurationException(
            f"{kind} overrides `backward`, but in a pipeline the schedule runs the backwards. Leave it out, or use"
            " strategy='fsdp2'."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise MisconfigurationException(
                f"The callback {type(callback).__name__} does not go with a pipeline: it averages and swaps whole"
                " modules, and each rank has its own stages' weights only. Leave it out, or use strategy='fsdp2'."
            )
    if fits:
        _check_gradient_hooks(trainer, module)
    if not any(True for _ in module.parameters()):
        raise MisconfigurationException(
            f"{kind} has no parameters, so there is nothing to divide. Use strategy='auto'."
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise MisconfigurationException(
                f"Parameter {name!r} has no shape yet: a lazy module gets it at its first forward. Run the module on"
                " one batch before `fit`, or name the sizes (nn.Linear for nn.LazyLinear)."
            )
    for name, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule) and any(True for _ in submodule.parameters()):
            raise MisconfigurationException(
                f"The module {name!r} is compiled to TorchScript, which holds its parameters where stand-ins cannot"
                " take their place. Use the module that it was compiled from."
            )
        sharded_here = is_laid_out(module)
        if not sharded_here and isinstance(submodule, FSDPModule | FullyShardedDataParallel):
            raise MisconfigurationException(
                f"The module {name or '(root)'!r} is sharded already ({type(submodule).__name__}). Give a plain module"
                " to PipelineStrategy; data_parallel='shard' shards its stages."
            )
    if fits:
        _warn_about_batch_norm(module)


def check_changes(changed: dict[str, str], kind: str) -> None:
    """Refuse a step that changes parameters by itself: it runs once for every microbatch.

    Raises:
        MisconfigurationException: Naming a parameter and the line.

    """
    for name, source in changed.items():
        raise MisconfigurationException(
            f"{kind}.training_step changes the parameter {name!r} in place (at {source}), which a pipeline would do"
            " once for every microbatch. Do it in `on_train_batch_end` or `on_before_zero_grad`."
        )


def check_loss(trace: Trace, kind: str) -> None:
    """Refuse a training_step that gives no loss to train on.

    Raises:
        MisconfigurationException: Naming the module's class.

    """
    if trace.loss is None:
        raise MisconfigurationException(
            f"{kind}.training_step returned no loss tensor for the first microbatch; a pipeline needs one for every"
            " microbatch (None, to skip a batch, is not possible)."
        )
    if not trace.loss.depends:
        raise MisconfigurationException(
            f"{kind}.training_step returned a loss that does not depend on any of the module's parameters."
        )


def check_recomputation(trace: Trace) -> None:
    """Refuse to run a step again in backward that has a backward of its own.

    Raises:
        MisconfigurationException: Naming the line.

    """
    for operation in trace.operations:
        if operation.name == "grad":
            raise MisconfigurationException(
                "PipelineStrategy(activation_checkpointing=True) runs a stage's forward again in backward, which"
                f" cannot be done for a step that calls torch.autograd.grad (at {operation.source}). Switch it off."
            )


def check_optimizers(optimizers: list[Optimizer], schedule: ScheduleName, module: nn.Module) -> None:
    """Refuse optimizers that would train otherwise than in one process.

    Raises:
        MisconfigurationException: Naming the optimizer.

    """
    if len(optimizers) > 1:
        raise MisconfigurationException(
            f"`configure_optimizers` returned {len(optimizers)} optimizers; a pipeline trains with one optimizer. Put"
            " the parameters into groups of one, or use strategy='fsdp2'."
        )
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        kind = type(optimizer)
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationException(
                "LBFGS runs its closure several times and needs the whole gradient at once, which no rank of a pipeline"
                " has. Use a first-order optimizer such as AdamW."
            )
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise MisconfigurationException(
                        f"{kind.__name__} holds a tensor of shape {list(parameter.shape)} (group {number}, place"
                        f" {place})"
                        " that is no parameter of the module: it was probably taken before the stages were laid out,"
                        " and another stage has it now. Collect the parameters inside `configure_optimizers`, from"
                        " `self.parameters()`."
                    )
        if not (kind.__name__ in _KNOWN and kind is getattr(torch.optim, kind.__name__, None)):
            _try_apart(optimizer)
    if SCHEDULES[schedule].splits_backward:
        for name, parameter in module.named_parameters():
            if has_gradient_hooks(parameter):
                raise MisconfigurationException(
                    f"Parameter {name!r} has a hook that runs after its gradient is accumulated, which schedule="
                    f"{schedule!r} does not run: it computes gradients of weights apart. Use schedule='1f1b'."
                )


def _try_apart(optimizer: Optimizer) -> None:
    """Let a copy train two small tensors, together and each by itself, and compare: stages step apart.

    Raises:
        MisconfigurationException: If they end up otherwise, or the optimizer fails.

    """
    name = type(optimizer).__name__
    for settings in distinct_settings(optimizer):
        with torch.random.fork_rng(devices=[]):
            start, gradients = trial_problem(torch.float32)
            try:
                together = train_copy(optimizer, settings, start, gradients, torch.clone)
                apart = [
                    train_copy(optimizer, settings, [tensor], [[step[place]] for step in gradients], torch.clone)[0]
                    for place, tensor in enumerate(start)
                ]
            except Exception:
                # Some take matrices only, and there is one: nothing can differ that was not looked at together.
                continue
        for found, expected, before in zip(apart, together, start, strict=True):
            if (wrong := differs(found, expected, before)) is not None:
                raise MisconfigurationException(
                    f"{name} looks at all parameters together: two small tensors that it trains together move by up to"
                    f" {wrong[1]:.1e}, and apart, as the stages of a pipeline are, by an amount that differs by"
                    f" {wrong[0]:.1e}. Choose an optimizer that treats each parameter by itself, such as AdamW."
                )


_GRADIENT_HOOKS = "configure_gradient_clipping on_before_optimizer_step on_after_backward optimizer_step".split()


def _check_gradient_hooks(trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
    """Norms that torch or Lightning takes of the gradients here are those of this rank's stages only."""
    if named := [name for name, parameter in module.named_parameters() if has_tensor_hooks(parameter)]:
        rank_zero_warn(
            f"Parameter {named[0]!r} has a gradient hook, which in a pipeline runs once for every microbatch, with that"
            " microbatch's part of the gradient: one that is not linear (clamping, say) gives something else than in"
            " one"
            " process. Do it in `on_before_optimizer_step`."
        )
    for owner in (module, *trainer.callbacks):  # type: ignore[attr-defined]
        for name in _GRADIENT_HOOKS:
            used = getattr(getattr(getattr(owner, name, None), "__code__", None), "co_names", ())
            if norm := {"clip_grad_norm_", "get_total_norm", "clip_grad_norm"} & set(used):
                raise MisconfigurationException(
                    f"{type(owner).__name__}.{name} calls {min(norm)}, which on each rank sees the gradients of that"
                    " rank's stages only, so stages would be clipped apart. Use Trainer(gradient_clip_val=...), or"
                    " `self.clip_gradients(optimizer, ...)` of the LightningModule, which take the norm over all"
                    " stages."
                )
            if "grad_norm" in used:
                rank_zero_warn(
                    f"{type(owner).__name__}.{name} calls grad_norm, which on each rank sees the gradients of that"
                    " rank's stages only. `trainer.strategy.gradient_norm()`, called on all ranks, is that of all."
                )


def warn_about_state(trace: Trace, kind: str) -> None:
    """Tell of attributes and buffers that the step itself changes."""
    if own := [name for name in trace.settings if not name.startswith("_")]:
        rank_zero_warn(
            f"{kind}.{trace.step} changes self.{own[0]}, which a pipeline does once for every microbatch, not once for"
            " every batch. If the step reads it, too, do it in `on_train_batch_start` or `on_train_batch_end`."
        )
    for name, value in trace.buffers.items():
        if any(
            o.writes and o.call is None and value.tensor is o.inputs[0].tensor for o in trace.operations if o.inputs
        ):
            rank_zero_warn(
                f"{kind}.{trace.step} changes buffer {name!r} in place, which a pipeline does once for every"
                " microbatch, not once for every batch. Do it in `on_train_batch_end` if that matters."
            )


def _warn_about_batch_norm(module: nn.Module) -> None:
    names = [name for name, each in module.named_modules() if isinstance(each, BATCH_NORMS)]
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        rank_zero_warn(
            "In a pipeline, batch normalisation sees microbatches: it normalises by the statistics of one microbatch"
            " at a"
            f" time, and its running statistics move once for each. That concerns {shown}. Use GroupNorm or LayerNorm"
            " to train as in one process, or few, large microbatches."
        )

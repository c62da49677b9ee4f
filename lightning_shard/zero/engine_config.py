"""From the strategy's arguments, the Trainer and the user's own DeepSpeed settings to one engine configuration.

The arguments and the Trainer own what they set. A user setting that says the same passes, one that says otherwise is an
error that names both, and everything else is merged on top.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard.config import ActivationCheckpointing, Offload, ZeroPlusPlus
from lightning_shard.zero.arguments import check_effective
from lightning_shard.zero.merge import AUTO, Config, Merge
from lightning_shard.zero.sizing import Sizes
from lightning_shard.zero.user_config import check_with_engine, spell_as_engine


@dataclass(frozen=True, kw_only=True)
class ZeROOptions:
    """What the strategy's arguments say; ``None`` leaves a setting to ``config`` or to the default."""

    stage: Literal[1, 2, 3]
    offload: Offload | None
    zero_plus_plus: ZeroPlusPlus | None
    bucket_elements: int | None
    overlap_comm: bool | None
    contiguous_gradients: bool | None
    prefetch_elements: int | None
    persistence_elements: int | None
    reshard_after_forward: bool | None
    activation_checkpointing: ActivationCheckpointing | None


@dataclass(frozen=True, kw_only=True)
class TrainerFacts:
    """What the Trainer says about the run."""

    world_size: int
    """Ranks, all of them data-parallel."""

    precision: str
    """The Trainer's precision, for example ``"bf16-mixed"``."""

    accumulate_grad_batches: int
    """Batches per optimizer step."""

    gradient_clip_val: float | None
    """Largest gradient norm, or ``None``."""

    batch_size: int | None
    """Rows per rank and batch of the train loader, when it is known."""

    automatic_optimization: bool
    """Whether the Trainer runs backward and step."""

    device_type: str
    """``"cpu"`` or ``"cuda"``."""

    total_steps: int | None = None
    """Optimizer steps of the whole run, when it is known."""


def build_engine_config(options: ZeROOptions, facts: TrainerFacts, sizes: Sizes, user: Mapping[str, Any]) -> Config:
    """The configuration that the engine gets.

    Args:
        options: The strategy's arguments.
        facts: The Trainer's settings.
        sizes: Bucket sizes for this model, in elements.
        user: The user's own DeepSpeed settings; not changed.

    Raises:
        MisconfigurationException: If a user setting contradicts an argument or the Trainer, is unknown to DeepSpeed or
            refused by it, cannot work at this stage or on this device, or is an ``"auto"`` that nobody knows. The
            message names the key and the values.

    """
    merged = Merge(user)
    spell_as_engine(merged)
    _own_batch_sizes(merged, facts)
    _own_clipping(merged, facts)
    _own_precision(merged, facts)
    _own_zero_section(merged, options, facts, sizes)
    _own_activation_checkpointing(merged, options)
    # The strategy has tried the optimizer on flat partitions itself (see `zero.optimizers`).
    merged.default("zero_allow_untested_optimizer", True)
    # The strategy has chosen the optimizer for offload; the engine must not insist on its compiled one.
    merged.default("zero_force_ds_cpu_optimizer", False)
    # With several backwards for a step (and a manual step may follow any number) the caller knows where the boundary
    # is, and only then does the engine keep the gradients of parameters that the last backward does not reach.
    if facts.accumulate_grad_batches > 1 or not facts.automatic_optimization:
        merged.own("managed_gradient_accumulation", False, "accumulation by the Trainer or by a manual step")
    merged.fill("scheduler.params.total_num_steps", facts.total_steps)
    merged.refuse_left_over_auto()
    check_effective(merged.config["zero_optimization"], options.stage, facts.device_type)
    check_with_engine(merged.config)
    return merged.config


def _own_batch_sizes(merged: Merge, facts: TrainerFacts) -> None:
    """Rows per rank, accumulation and the global batch must fit together and to the Trainer.

    The Trainer counts accumulation, so the engine is always told 1: it then neither divides the loss a second time nor
    keeps a counter that could disagree at the end of an epoch.
    """
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = merged.get(key, AUTO)
        if value != AUTO and (not isinstance(value, int) or value < 1):
            raise MisconfigurationException(f"The DeepSpeed config sets {key}={value!r}: a number from 1 on is needed.")
    accumulate = facts.accumulate_grad_batches
    merged.own("gradient_accumulation_steps", accumulate, f"Trainer(accumulate_grad_batches={accumulate})")
    total, micro = merged.get("train_batch_size", AUTO), merged.get("train_micro_batch_size_per_gpu", AUTO)
    if facts.batch_size is not None:
        merged.own("train_micro_batch_size_per_gpu", facts.batch_size, "the train loader (batch size per rank)")
        micro = facts.batch_size
    elif micro == AUTO:
        micro = 1 if total == AUTO else max(total // (accumulate * facts.world_size), 1)
    product = micro * accumulate * facts.world_size
    if total not in (AUTO, product):
        raise MisconfigurationException(
            f"The DeepSpeed config sets train_batch_size={total}, but batch size per rank * accumulate_grad_batches *"
            f" ranks is {micro}*{accumulate}*{facts.world_size}={product}. Correct one of them, or leave"
            " train_batch_size out."
        )
    merged.set("train_micro_batch_size_per_gpu", micro)
    merged.set("gradient_accumulation_steps", 1)
    merged.pop("train_batch_size")


def _own_clipping(merged: Merge, facts: TrainerFacts) -> None:
    """The engine clips; the Trainer's value, where there is one, is the one that counts."""
    value = facts.gradient_clip_val
    if value is None:
        merged.default("gradient_clipping", 0.0)
    else:
        merged.own("gradient_clipping", float(value), f"Trainer(gradient_clip_val={value})")


def _own_precision(merged: Merge, facts: TrainerFacts) -> None:
    for section, precisions in (("fp16", ("16-mixed", "16-true")), ("bf16", ("bf16-mixed", "bf16-true"))):
        if section in merged.config:
            merged.own(f"{section}.enabled", facts.precision in precisions, f"Trainer(precision={facts.precision!r})")
            if facts.precision not in precisions:
                merged.pop(section)
    for section in ("amp", "torch_autocast"):
        if merged.get(f"{section}.enabled") is True:
            raise MisconfigurationException(
                f"The DeepSpeed config sets {section}.enabled=True, but precision is the Trainer's: it says"
                f" Trainer(precision={facts.precision!r}). Take the section out and set Trainer(precision=...)."
            )


def _own_zero_section(merged: Merge, options: ZeROOptions, facts: TrainerFacts, sizes: Sizes) -> None:
    zero = "zero_optimization."
    merged.own(zero + "stage", options.stage, f"ZeROStrategy(stage={options.stage})")
    merged.argument(zero + "contiguous_gradients", options.contiguous_gradients, "contiguous_gradients", True)
    # Nothing overlaps on a CPU: there are no streams. At stage 1 gradients are reduced at once before the step.
    overlap = facts.device_type != "cpu" and options.stage > 1
    merged.argument(zero + "overlap_comm", options.overlap_comm, "overlap_comm", overlap)
    merged.argument(zero + "reduce_bucket_size", options.bucket_elements, "bucket_elements", sizes.bucket)
    merged.argument(zero + "allgather_bucket_size", _even(options.bucket_elements), "bucket_elements", sizes.bucket)
    # The engine's default reduces a bucket that several ranks own by an all-reduce: 3 psi elements a step, not 2 psi.
    merged.default(zero + "use_multi_rank_bucket_allreduce", False)
    if merged.get(zero + "round_robin_gradients") is True:
        raise MisconfigurationException(
            "The DeepSpeed config sets zero_optimization.round_robin_gradients=True: the engine then reorders"
            " parameters in their partitions but not what maps them to names, so that gathered and saved weights would"
            " be mixed up. Take it out."
        )
    if options.stage == 3:
        _own_stage3(merged, options, sizes)
    _own_offload(merged, options.offload)
    if options.zero_plus_plus is not None:
        plus = options.zero_plus_plus
        merged.own(zero + "zero_hpz_partition_size", plus.hpz_partition_size, "ZeroPlusPlus")
        merged.own(zero + "zero_quantized_weights", plus.quantized_weights, "ZeroPlusPlus")
        merged.own(zero + "zero_quantized_gradients", plus.quantized_gradients, "ZeroPlusPlus")


def _own_stage3(merged: Merge, options: ZeROOptions, sizes: Sizes) -> None:
    prefix = "zero_optimization.stage3_"
    merged.argument(prefix + "prefetch_bucket_size", options.prefetch_elements, "prefetch_elements", sizes.prefetch)
    merged.argument(
        prefix + "param_persistence_threshold", options.persistence_elements, "persistence_elements", sizes.persistence
    )
    # A parameter is released after its forward only if its next use is farther away than the reuse distance, so 0 gives
    # the ZeRO-3 of the paper (gathered twice, 3 psi) and a distance beyond the model keeps it until backward (2 psi).
    reshard = options.reshard_after_forward
    distance = sizes.all_live if reshard is False else 0
    if reshard is None:
        merged.default(prefix + "max_reuse_distance", distance)
    else:
        merged.own(prefix + "max_reuse_distance", distance, f"reshard_after_forward={reshard}")
    # Prefetching goes on at every module, also at those without parameters, and keeps what it finds still there: only
    # this limit keeps it from holding the whole model. Two windows: one in use, one on its way.
    window = merged.get(prefix + "prefetch_bucket_size")
    limit = 2 * int(window) if isinstance(window, (int, float)) else 2 * sizes.prefetch
    merged.default(prefix + "max_live_parameters", sizes.all_live if reshard is False else limit)


def _own_offload(merged: Merge, offload: Offload | None) -> None:
    if offload is None:
        return
    for section, device in (("offload_optimizer", offload.optimizer), ("offload_param", offload.parameters)):
        key = f"zero_optimization.{section}"
        if device is None:
            if merged.get(f"{key}.device") not in (None, "none"):
                merged.own(f"{key}.device", "none", repr(offload))
            continue
        merged.own(f"{key}.device", device, repr(offload))
        merged.own(f"{key}.pin_memory", offload.pin_memory, repr(offload))
        if device == "nvme":
            merged.own(f"{key}.nvme_path", offload.nvme_path, repr(offload))
            # A parameter, its gradient and up to three states (AMSGrad's) are in memory at once; the engine's default
            # of four would stop the first step of such an optimizer.
            merged.default(f"{key}.buffer_count", 5)
    if offload.optimizer is not None and offload.ratio < 1.0:
        merged.own("zero_optimization.offload_optimizer.ratio", offload.ratio, repr(offload))


def _own_activation_checkpointing(merged: Merge, options: ZeROOptions) -> None:
    checkpointing = options.activation_checkpointing
    if checkpointing is None:
        return
    owner = repr(checkpointing)
    merged.own("activation_checkpointing.partition_activations", checkpointing.partition, owner)
    merged.own("activation_checkpointing.cpu_checkpointing", checkpointing.cpu, owner)
    merged.own("activation_checkpointing.contiguous_memory_optimization", checkpointing.contiguous_memory, owner)


def _even(elements: int | None) -> int | None:
    """The engine aligns all-gather buffers to two elements."""
    return None if elements is None else elements + elements % 2

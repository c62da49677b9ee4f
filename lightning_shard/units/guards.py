"""Refusals before the first step, and settings of Lightning's that units do not go with."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parameter import UninitializedParameter

from lightning_shard.config import ClassUnits, SizeUnits


def check_arguments(
    units: Any, reshard_after_forward: bool | int, replicas: int, activation_checkpointing: bool | list[str]
) -> None:
    """Refuse arguments that are impossible by themselves.

    Raises:
        MisconfigurationException: Naming the argument, its value and what it may be.

    """
    if units != "blocks" and not isinstance(units, (SizeUnits, ClassUnits)):
        raise MisconfigurationException(
            f"FSDP2Strategy(units={units!r}): choose 'blocks', SizeUnits(min_params=...) or ClassUnits(classes=[...])."
        )
    if not isinstance(replicas, int) or replicas < 1:
        raise MisconfigurationException(f"FSDP2Strategy(replicas={replicas!r}): groups of ranks, at least 1.")
    if not isinstance(reshard_after_forward, bool) and reshard_after_forward < 2:
        raise MisconfigurationException(
            f"FSDP2Strategy(reshard_after_forward={reshard_after_forward}): True, False, or a number of ranks, at least"
            " 2."
        )
    if isinstance(activation_checkpointing, list) and not activation_checkpointing:
        raise MisconfigurationException(
            "FSDP2Strategy(activation_checkpointing=[]): name at least one class, or say True for every unit."
        )


def check_module(module: "pl.LightningModule", device: torch.device, sync_batchnorm: bool) -> None:
    """Refuse a module that cannot be sharded, or is sharded already, by something else.

    Args:
        module: The module.
        device: The training device.
        sync_batchnorm: Whether the Trainer was told so.

    Raises:
        MisconfigurationException: Naming the submodule or the parameter.

    """
    if sync_batchnorm and device.type == "cpu":
        raise MisconfigurationException(
            "Trainer(sync_batchnorm=True) needs GPUs: torch's SyncBatchNorm does not run on the CPU. Leave it out; each"
            " rank then normalises by its own rows."
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise MisconfigurationException(
                f"Parameter {name!r} has no shape yet: a lazy module gets it at its first forward, which comes after"
                " sharding. Run the module on one batch before `fit`, or name the sizes (nn.Linear for nn.LazyLinear)."
            )
    if not any(True for _ in module.parameters()):
        raise MisconfigurationException(
            f"{type(module).__name__} has no parameters, so there is nothing to shard. Use strategy='auto'."
        )
    for name, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule) and any(True for _ in submodule.parameters()):
            raise MisconfigurationException(
                f"The module {name!r} is compiled to TorchScript, which holds its parameters where they cannot be"
                " replaced by shards. Use the module that it was compiled from, or strategy='ddp'."
            )
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.max_norm is not None:
            raise MisconfigurationException(
                f"The module {name!r} is an {type(submodule).__name__} with max_norm={submodule.max_norm}: its forward"
                " rescales the rows that it looks up, on each rank those of its own batch, so the ranks' weights would"
                " part. Normalise in the step, or use strategy='auto' on one device."
            )
        if isinstance(submodule, (FSDPModule, FullyShardedDataParallel)):
            raise MisconfigurationException(
                f"The module {name or '(root)'!r} is sharded already ({type(submodule).__name__}). FSDP2Strategy shards"
                " a plain module by itself: leave the call in `configure_model` out, or use Lightning's"
                " ModelParallelStrategy. A module that an earlier Trainer has sharded can be used on under a strategy"
                " with the same settings; for others make a new one."
            )
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            raise MisconfigurationException(
                "The callback StochasticWeightAveraging copies the whole module before it is sharded, and swaps whole"
                " tensors. Use lightning.pytorch.callbacks.WeightAveraging, which works on shards."
            )


def no_inference_mode(trainer: "pl.Trainer") -> None:
    """Evaluate without gradients, but not in inference mode: units keep gathered tensors to use them again in training.

    Lightning makes the same choice for its own FSDP strategy, by its class.
    """
    for loop in (
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
    ):
        loop.inference_mode = False

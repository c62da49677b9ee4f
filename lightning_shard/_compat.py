"""The only room that touches private API of torch, Lightning or DeepSpeed. Each use says why it is needed.

When one of these libraries moves something, this is the file to mend.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Lightning's checks that its DeepSpeedStrategy runs; the CPU path replaces the methods that call them.
from lightning.fabric.strategies.deepspeed import (
    _format_precision_config,
    _validate_device_index_selection,
)
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.exceptions import MisconfigurationException

# The Trainer's own reading of `configure_optimizers`, with all its forms and warnings: there is no public name for it.
from lightning.pytorch.core.optimizer import (
    _init_optimizers_and_lr_schedulers,
    _MockOptimizer,
)
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.overrides import TorchFunctionMode

StrategyRegistryType = _StrategyRegistry
format_precision_config = _format_precision_config
init_optimizers_and_lr_schedulers = _init_optimizers_and_lr_schedulers
validate_device_index_selection = _validate_device_index_selection

__all__ = [
    "StrategyRegistryType",
    "default_pg_timeout",
    "format_precision_config",
    "init_optimizers_and_lr_schedulers",
    "validate_device_index_selection",
]


# --- Lightning ---


def is_mock_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether Lightning stands in for a ``configure_optimizers`` that returned nothing."""
    return isinstance(optimizer, _MockOptimizer)


def train_batch_size_per_rank(trainer: Any) -> int | None:
    """Rows per rank and batch of the train loader, or ``None`` when the loader does not say.

    The loop's data source is private, but it is the only way to the loader before the loop starts.
    """
    source = trainer.fit_loop._data_source
    if not source.is_defined():
        return None
    batch_size = getattr(getattr(source.dataloader(), "batch_sampler", None), "batch_size", None)
    return batch_size if isinstance(batch_size, int) else None


# --- DeepSpeed: process-wide state ---


class _UntestedOptimizerFilter(logging.Filter):
    """Drops the engine's 'untested optimizer' line: `zero.optimizers` has tested it before the engine sees it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "with an untested optimizer" not in record.getMessage()


@contextmanager
def quiet_engine_import() -> Iterator[None]:
    """Import deepspeed without its device guess.

    Without a GPU the import would warn that none was found; naming the CPU through the environment avoids that. The
    variable is taken back, because child processes may have another device.
    """
    name_cpu = "deepspeed" not in sys.modules and "DS_ACCELERATOR" not in os.environ and not torch.cuda.is_available()
    if name_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        yield
        from deepspeed.accelerator import get_accelerator

        get_accelerator()
    finally:
        if name_cpu:
            os.environ.pop("DS_ACCELERATOR", None)
    logger = logging.getLogger("DeepSpeed")
    if not any(isinstance(entry, _UntestedOptimizerFilter) for entry in logger.filters):
        logger.addFilter(_UntestedOptimizerFilter())


def set_engine_device(device: torch.device) -> None:
    """Make DeepSpeed's process-wide accelerator the one of this run, whatever it guessed when it was imported."""
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if device.type == "cpu" and get_accelerator().device_name() != "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
    elif device.type == "cuda" and not get_accelerator().device_name().startswith("cuda"):
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        set_accelerator(CUDA_Accelerator())
    # These calls live in the engine and can only be silenced from outside; the renaming in torch changes no behaviour.
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
        category=FutureWarning,
    )


@contextmanager
def without_shm_op() -> Iterator[None]:
    """Initialise ``deepspeed.comm`` without its shared-memory op.

    ``init_distributed`` compiles that op (a minute when cold) although only inference collectives use it. The module
    must come from ``sys.modules``: inside ``deepspeed.comm`` the attribute ``torch`` is the real torch.
    """
    import deepspeed.comm  # noqa: F401

    module = sys.modules["deepspeed.comm.torch"]
    build = module.build_shm_op
    module.build_shm_op = lambda: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.build_shm_op = build  # type: ignore[attr-defined]


class _BytesOfScalars(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.view and args[1:] == (torch.uint8,):
            tensor = args[0]
            if tensor.dim() == 0:
                return tensor.reshape(1).view(torch.uint8)
            if not tensor.is_contiguous():
                raise MisconfigurationException(
                    f"A parameter of shape {tuple(tensor.shape)} that is built in configure_model is not contiguous,"
                    " and the DeepSpeed engine cannot send it to the other ranks. Make it contiguous:"
                    " nn.Parameter(tensor.contiguous())."
                )
        return func(*args, **(kwargs or {}))


def scalars_as_bytes() -> TorchFunctionMode:
    """Let the engine broadcast 0-dimensional parameters.

    It sends every parameter as ``parameter.data.view(torch.uint8)``, which torch refuses for 0 dimensions; the same
    memory seen as one element can be sent.
    """
    return _BytesOfScalars()


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` came from ``torch.compile``; the wrapper's class is not public."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def restore_linear() -> None:
    """Undo stage 3's replacement of ``torch.nn.functional.linear``, which would outlive the run."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    original = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if original is not None:
        torch.nn.functional.linear = original


def end_training(engine: Any) -> None:
    """Take the engine's gradient hooks off the parameters, so that the module can train elsewhere.

    ``engine.destroy()`` would do so too, but also forgets what a checkpoint after the run needs.
    """
    for hook in getattr(engine.optimizer, "_grad_acc_hooks", []):
        hook.remove()
    vars(engine.module).pop("zero_grad", None)  # from `discard_at_zero_grad`


_HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def remove_engine_hooks(module: nn.Module) -> None:
    """Take the engine's hooks off ``module`` and leave the user's.

    The engine does not remove all of its hooks when it is destroyed, and a second engine on the same module (a
    validation after a fit) would run them twice. Lightning drops *every* hook instead, the user's own included. torch
    offers no public list of a module's hooks.
    """
    for submodule in module.modules():
        for table in _HOOK_TABLES:
            hooks = getattr(submodule, table, None)
            if not hooks:
                continue
            for key, hook in list(hooks.items()):
                owner = getattr(getattr(hook, "hook", hook), "__module__", None) or ""
                if owner.startswith("deepspeed."):
                    del hooks[key]


# --- DeepSpeed: the engine's partitions ---


def partition_groups(zero_optimizer: Any) -> list[list[nn.Parameter]]:
    """The optimized parameters, a list for each flat partition. Attribute names differ between the stages."""
    groups = getattr(zero_optimizer, "fp16_groups", None)
    found: list[list[nn.Parameter]] = zero_optimizer.bit16_groups if groups is None else groups
    return found


def own_elements(parameter: Any) -> int:
    """Elements of a stage-3 parameter that this rank holds, padding included."""
    return int(parameter.ds_tensor.ds_numel)


def partition_process_group(parameter: Any) -> Any:
    """The ranks over which a stage-3 parameter is partitioned."""
    return parameter.ds_process_group


def flat_partitions(zero_optimizer: Any) -> list[torch.Tensor]:
    """This rank's flat fp32 slice of each partition group: what the inner optimizer updates."""
    flat = getattr(zero_optimizer, "fp32_partitioned_groups_flat", None)
    found: list[torch.Tensor] = zero_optimizer.single_partition_of_fp32_groups if flat is None else flat
    return found


def inner_optimizer(zero_optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that updates the flat partitions."""
    inner: torch.optim.Optimizer = zero_optimizer.optimizer
    return inner


@contextmanager
def adagrad_left_alone() -> Iterator[None]:
    """Keep the engine from rebuilding the user's Adagrad.

    It would replace it by one from the class's defaults, in a single group: the groups' learning rates would be lost,
    schedulers would steer the old object, and several groups would crash. `state_for_partitions` makes the accumulators
    that the rebuilding was for.
    """
    adagrad = torch.optim.Adagrad
    torch.optim.Adagrad = type("HiddenAdagrad", (), {})  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch.optim.Adagrad = adagrad  # type: ignore[misc]


def state_for_partitions(zero_optimizer: Any, optimizer: torch.optim.Optimizer) -> None:
    """Give Adagrad, which makes its state at construction, state for the flat partitions instead."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return
    start = optimizer.defaults["initial_accumulator_value"]
    steps = next((state["step"] for state in optimizer.state.values()), torch.tensor(0.0))
    optimizer.state.clear()
    for flat in flat_partitions(zero_optimizer):
        optimizer.state[flat] = {"step": steps.clone(), "sum": torch.full_like(flat.detach(), start)}


def pretend_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell torch's schedulers that ``optimizer`` steps, where a copy of it or a replacement does."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def without_step_wrapper(optimizer: torch.optim.Optimizer) -> None:
    """Drop the wrapper that a scheduler put around an instance's ``step``: in a copy it would step the original."""
    vars(optimizer).pop("step", None)


def link_optimizer_states(zero_optimizer: Any) -> None:
    """Map optimizer states to parameters at stages 1 and 2.

    The engine does so once, inside its first step and after the first group only, so that the states of further groups
    stay unknown.
    """
    link = getattr(zero_optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:
        zero_optimizer._hp_optimizer_states_linked = False
        link()


def clear_stale_gradients(zero_optimizer: Any) -> None:
    """Zero the gradients of parameters that no backward since the last step has reached.

    Stage 3 and every offload keep gradients in buffers that are only ever overwritten: a parameter without a gradient
    in this step would be updated with the one of an earlier step. The norm for clipping would count it too.
    """
    if hasattr(zero_optimizer, "fp16_groups"):
        _clear_stale_stage3(zero_optimizer)
    elif zero_optimizer.cpu_offload:
        active = set(zero_optimizer.norm_for_param_grads) | zero_optimizer._offload_accumulated_param_ids
        for group, flat in zip(
            zero_optimizer.params_in_partition, zero_optimizer.single_partition_of_fp32_groups, strict=True
        ):
            for parameter in group:
                key = zero_optimizer.get_param_id(parameter)
                if key not in active:
                    _, _, offset, elements = zero_optimizer.grad_position[key]
                    flat.grad.view(-1).narrow(0, offset, elements).zero_()


def _clear_stale_stage3(zero_optimizer: Any) -> None:
    active = zero_optimizer._offload_boundary_param_ids
    partitions = zero_optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    gradients: dict[int, list[torch.Tensor]] = {}
    offsets: dict[int, list[int]] = {}
    for group in zero_optimizer.fp16_groups:
        for parameter in group:
            if parameter.ds_id in active:
                continue
            partition = partitions[parameter.ds_id]
            partition.zero_()
            if zero_optimizer.offload_optimizer:
                zero_optimizer._offload_grad_partition_at_boundary(parameter, partition, gradients, offsets)
    zero_optimizer._swap_out_offload_fp32_gradients(gradients, offsets)


def forget_gradients(zero_optimizer: Any) -> None:
    """Start a window of several backwards from nothing.

    Stage 3 copies only the first backward's gradients and adds all later ones, so what a parameter that the first one
    does not reach holds from an earlier window would be added to.
    """
    if hasattr(zero_optimizer, "fp16_groups"):
        zero_optimizer.grad_partitions_flat_buffer.zero_()
        zero_optimizer._offload_boundary_param_ids.clear()
        return
    zero_optimizer.all_grad_tensors.clear()
    zero_optimizer.averaged_gradients.clear()
    if zero_optimizer.cpu_offload:
        zero_optimizer._offload_accumulated_param_ids.clear()
        zero_optimizer.norm_for_param_grads.clear()
        for gradient in zero_optimizer.accumulated_grads_in_cpu.values():
            gradient.zero_()


def discard_at_zero_grad(engine: Any, strategy: Any) -> None:
    """Let ``zero_grad`` between two backwards discard what the engine has accumulated, as it does in one process.

    The engine clears the parameters' own gradients only, but stages 2 and 3 have moved those to their partitions. It
    also calls ``zero_grad`` inside its step, where the partitions still hold what is about to be used.
    """
    zero, module = engine.optimizer, engine.module
    clear_parameters = zero.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        clear_parameters(set_to_none)
        # Without managed accumulation, the boundary is the step itself.
        if not engine.is_gradient_accumulation_boundary():
            forget_gradients(zero)

    # Lightning's wrapper inherits from the optimizer's class, so that it has a `zero_grad` of its own.
    for entry in (zero, module, *strategy._lightning_optimizers):
        entry.zero_grad = zero_grad


def before_reduction(zero_optimizer: Any, check: Callable[[], None], every_bucket: bool) -> None:
    """Call ``check`` before gradients are reduced: at the end of a backward, or at stage 2 before every bucket.

    Stage 1 reduces all buckets in one go, after its last backward.
    """
    name = "independent_gradient_partition_epilogue"
    # The attribute is there at stages 1 (false) and 2 (true) only.
    partitions_gradients = getattr(zero_optimizer, "partition_gradients", None)
    if partitions_gradients is False:
        name = "reduce_gradients"
    elif partitions_gradients and every_bucket:
        name = "reduce_ipg_grads"
    reduce = getattr(zero_optimizer, name)

    def checked(*args: Any, **kwargs: Any) -> None:
        check()
        reduce(*args, **kwargs)

    setattr(zero_optimizer, name, checked)


def begin_backward(zero_optimizer: Any) -> None:
    """Tell the engine that another backward begins.

    It counts backwards at forward, and one ``training_step`` is one forward to it: stage 3 would let the second
    backward of a step overwrite the gradients of the first.
    """
    zero_optimizer.clear_backward_seen_flag()


def skipped_step(zero_optimizer: Any) -> bool:
    """Whether the engine left its last step out because a gradient was infinite or not a number."""
    return bool(getattr(zero_optimizer, "overflow", False))


# --- C++ ops ---


def op_build_directory(name: str) -> str:
    """Where torch compiles the op ``name``; torch has no public name for the folder that holds its lock file."""
    from torch.utils.cpp_extension import _get_build_directory

    return _get_build_directory(name, False)


def load_op(name: str) -> None:
    """Load DeepSpeed's op ``name``, compiling it when it is not cached.

    Raises:
        RuntimeError: If it cannot be built.

    """
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(_OP_BUILDERS[name]).load(verbose=False)


def op_is_loaded(name: str) -> bool:
    """Whether this process has the op already."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    return name in OpBuilder._loaded_ops


_OP_BUILDERS = {"async_io": "AsyncIOBuilder", "cpu_adam": "CPUAdamBuilder"}


# --- DeepSpeed: NVMe ---


@contextmanager
def swapped_in(zero_optimizer: Any, group: int, write_back: bool) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """One partition group's flat fp32 slice and its optimizer state in memory, whether or not it lives on NVMe.

    With ``write_back`` the changed values go to NVMe and to the parameters. The engine has public getters and setters
    for single states that exist already, but none for a whole group or a state that is new.
    """
    swappable = zero_optimizer._swappable_optimizer_subgroup(group)
    flat = zero_optimizer.fp32_partitioned_groups_flat[group]
    if swappable:
        zero_optimizer._optimizer_states_and_gradient_swap_in(group)
    try:
        yield flat, zero_optimizer.optimizer.state[flat]
        if write_back:
            zero_optimizer._reassign_or_swap_out_partitioned_parameters(group)
    finally:
        if swappable and write_back:
            # What the swapper knew about earlier state tensors does not hold for the new ones.
            info = zero_optimizer.optimizer_swapper.swap_params_info[flat.ds_id]
            del info.tensors[1:]
            info.has_state_tensors = False
            zero_optimizer._optimizer_states_and_gradient_swap_out(group)
        elif swappable:
            zero_optimizer._release_swap_buffers(group)


def gather_persistent(zero_optimizer: Any) -> None:
    """Refresh the parameters that stage 3 keeps whole, as the engine does at the end of a step."""
    if zero_optimizer.persistent_parameters:
        zero_optimizer.persistent_parameters[0].all_gather(zero_optimizer.persistent_parameters)


def keep_gradients_in_memory(zero_optimizer: Any) -> None:
    """Leave gradients in the CPU buffer that holds them anyway, instead of writing them to NVMe and reading them back.

    The engine reads a parameter's gradient to its place in the flat gradient by direct I/O. Where that place is no
    multiple of a disk block (any parameter behind one of odd size), the read goes wrong without an error and the run
    trains on other gradients.
    """
    swapper = getattr(zero_optimizer, "optimizer_swapper", None)
    if swapper is None:
        return

    def keep(parameter: Any, gradient_offsets: list[int], gradient_tensors: list[torch.Tensor]) -> None:
        info = swapper.swap_params_info.get(parameter.ds_id)
        if info is not None:
            info.unswapped_gradients.update(zip(gradient_offsets, gradient_tensors, strict=True))

    swapper.swap_out_gradients = keep

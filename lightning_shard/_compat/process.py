"""What DeepSpeed does to the whole process or to the user's module, and how it is undone."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.overrides import TorchFunctionMode


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
    # torch remembers its factory functions at the first use of a device context. Inside `zero.Init`, which replaces
    # them for its time, it would remember the replacements, and `torch.device("meta")` would do nothing from then on.
    with torch.device("cpu"):
        torch.empty(0)
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

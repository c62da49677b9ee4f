"""DeepSpeed's builders of C++ ops."""


def op_build_directory(name: str) -> str:
    """Where torch compiles the op ``name``; torch has no public name for the folder that holds its lock file."""
    from torch.utils.cpp_extension import _get_build_directory

    return _get_build_directory(name, False)


_OP_BUILDERS = {"async_io": "AsyncIOBuilder", "cpu_adam": "CPUAdamBuilder"}


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

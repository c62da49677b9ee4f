"""Private names of torch.distributed.checkpoint and of DTensor."""

import pickle
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata as names
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

# Where a rank's block of a DTensor lies has no public function.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_ALLOWED = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "builtins": {"set", "frozenset", "complex", "slice"},
    names.__name__: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads what torch pickles as ``.metadata``, and nothing that could run code: torch itself has no safe way."""

    def find_class(self, module: str, name: str) -> Any:
        # A name with a dot in it reaches through a module to what that has imported.
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        value = vars(torch).get(name) if module == "torch" else None
        if value is torch.Size or isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return value
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def read_metadata(file: IO[bytes]) -> Metadata:
    """What tensors a folder of shards holds, and where.

    Raises:
        Exception: Of whatever kind, if the file is damaged.

    """
    metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    return metadata


class _NoRename(FileSystem):
    """torch renames the metadata when it is whole, which object stores cannot."""

    def rename(self, path: Any, new_path: Any) -> None:
        assert self.fs is not None
        self.fs.pipe_file(new_path, self.fs.cat_file(path))
        self.fs.rm(path)


class RemoteWriter(FsspecWriter):
    """Writes shards to any file system that fsspec knows; torch's own class for that is private."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.fs: Any = _NoRename()
        self.path = self.fs.init_path(url)


def local_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's block of a sharded tensor begins, in elements along each dimension."""
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets)


def file_offset(fake: torch.Tensor) -> int:
    """Where in its file the storage of a tensor lies, in bytes, of a tensor that was loaded as a fake one.

    torch documents it as the way to read a checkpoint piece by piece, under a private name.
    """
    offset = fake.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset


def fake_mode() -> Any:
    """A mode under which `torch.load` reads shapes and places, and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def is_fake(value: Any) -> bool:
    """Whether a tensor was loaded under `fake_mode`."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)

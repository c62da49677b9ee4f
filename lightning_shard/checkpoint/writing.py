"""Every rank writes its own boxes, at once; the writing itself is torch.distributed.checkpoint's."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_shard._compat.dcp import RemoteWriter
from lightning_shard.checkpoint.boxes import Held
from lightning_shard.checkpoint.progress import Progress


class BoxPlanner(DefaultSavePlanner):
    """Tells torch which boxes this rank has, and gives them one by one when they are written.

    torch decides who writes a box that several ranks have, and checks that the boxes of all ranks make whole tensors.

    Args:
        tensors: What this rank holds, by key.
        paths: Where each key's tensor would be in a nested dict, for torch's own tools.
        progress: Is told of the bytes.

    """

    def __init__(
        self, tensors: Mapping[str, Held], paths: Mapping[str, tuple[str | int, ...]], progress: Progress
    ) -> None:
        super().__init__()
        self._tensors, self._paths, self._progress = tensors, paths, progress
        self._boxes: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the tensors are known."""

    def create_local_plan(self) -> SavePlan:
        """An item for each box that this rank would write."""
        items = []
        for key, held in self._tensors.items():
            for box in held.boxes if held.writes else ():
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.shape)
                index = MetadataIndex(key, chunk.offsets)
                data = TensorWriteData(chunk, TensorProperties(dtype=held.dtype), torch.Size(held.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self._boxes[index] = box.tensor
        self.plan = SavePlan(items, planner_data={key: self._paths.get(key, (key,)) for key in self._tensors})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """A box's values."""
        tensor = self._boxes[write_item.index]
        self._progress.advance(tensor.numel() * tensor.element_size())
        return tensor.contiguous()


class _RootCause:
    """Tells why writing failed: torch's zip writer hides a full disk, or an interrupt, behind an error of its own.

    What torch passes on to other ranks has lost the chain of errors.
    """

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)  # type: ignore[misc]
        except BaseException as error:
            root = _root_of(error)
            if root is error:
                raise
            raise root from None


class _LocalWriter(_RootCause, FileSystemWriter):
    """Writes to a path."""


class _UrlWriter(_RootCause, RemoteWriter):
    """Writes to a URL."""


def _root_of(error: BaseException) -> BaseException:
    """The first of a chain of errors that is the system's or the user's doing; else the error itself."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    return next((each for each in reversed(chain) if isinstance(each, (OSError, KeyboardInterrupt))), error)


def write_tensors(
    folder: str,
    remote: bool,
    tensors: Mapping[str, Held],
    paths: Mapping[str, tuple[str | int, ...]],
    group: Any,
    progress: Progress,
) -> None:
    """Write what all ranks hold to one folder. Collective in ``group``.

    Args:
        folder: An empty folder, as a path or URL.
        remote: Whether it is a URL.
        tensors: What this rank holds.
        paths: Where each key's tensor would be in a nested dict.
        group: The ranks; ``None`` for all.
        progress: Is told of the bytes.

    Raises:
        RuntimeError: On every rank, if writing failed on any, naming it and the cause.
        KeyboardInterrupt: On every rank, if one was interrupted.

    """
    writer: FileSystemWriter = _UrlWriter(folder) if remote else _LocalWriter(folder)
    try:
        save(
            {},
            storage_writer=writer,
            planner=BoxPlanner(tensors, paths, progress),
            process_group=group,
            no_dist=not torch.distributed.is_initialized(),
        )
    except CheckpointException as error:
        if any(isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()):
            raise KeyboardInterrupt from error
        raise RuntimeError(_causes(error)) from error


def _causes(error: CheckpointException) -> str:
    """Each rank's failure in one line."""
    causes = [f"rank {rank} failed with {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
    return "; ".join(causes[:4]) + (f"; and {len(causes) - 4} more" if len(causes) > 4 else "")

"""Hand what the last stage knows after a batch to the other ranks of its pipeline, in one message where possible."""

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.pipeline.structure import Slot, map_leaves


class Exchange:
    """Broadcasts structures of values; a structure that is the same as last time is not sent again.

    Args:
        group: The ranks of a pipeline.
        source: Global rank of the last stage.
        device: Of the group's messages.

    """

    def __init__(self, group: "dist.ProcessGroup | None", source: int, device: torch.device) -> None:
        self._group = group
        self._source = source
        self._device = device
        self._known: dict[str, tuple[bytes, Any, list[tuple[tuple[int, ...], torch.dtype]]]] = {}

    def broadcast(self, channel: str, value: Any) -> Any:
        """What the last stage passed as ``value``, on every rank. Collective.

        Args:
            channel: Which of several kinds of messages this is: each keeps its own last structure.
            value: On the last stage, a structure that can be pickled once its tensors are taken out; ignored elsewhere.

        """
        if dist.get_world_size(self._group) == 1:
            return value
        sends = dist.get_rank() == self._source
        blob, tensors = _pack(value) if sends else (b"", [])
        known = self._known.get(channel)
        scalars = 0 if known is None else sum(_slots(*entry) for entry in known[2])
        same = known is not None and known[0] == blob
        message = torch.zeros(1 + scalars, dtype=torch.float64, device=self._device)
        if sends:
            message[0] = 0 if same else len(blob)
            if same:
                _fill(message[1:], tensors)
        dist.broadcast(message, src=self._source, group=self._group)
        if int(message[0]):
            self._learn(channel, blob if sends else None, int(message[0]))
            count = sum(_slots(*entry) for entry in self._known[channel][2])
            message = torch.zeros(1 + count, dtype=torch.float64, device=self._device)
            if sends:
                _fill(message[1:], tensors)
            dist.broadcast(message, src=self._source, group=self._group)
        received = self._tensors(channel, message[1:], tensors if sends else None)
        if sends:
            return value
        template = self._known[channel][1]
        return map_leaves(template, Slot, lambda slot: received[slot.key])

    def _learn(self, channel: str, blob: bytes | None, length: int) -> None:
        data = torch.zeros(length, dtype=torch.uint8, device=self._device)
        if blob is not None:
            data.copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
        dist.broadcast(data, src=self._source, group=self._group)
        if blob is None:
            blob = bytes(data.cpu().numpy().tobytes())
        template, shapes = pickle.loads(blob)
        self._known[channel] = (blob, template, shapes)

    def _tensors(self, channel: str, scalars: Tensor, own: list[Tensor] | None) -> list[Tensor]:
        received: list[Tensor] = []
        place = 0
        for number, (shape, dtype) in enumerate(self._known[channel][2]):
            if slots := _slots(shape, dtype):
                numbers = scalars[place : place + slots]
                received.append(numbers[0].to(dtype) if slots == 1 else _whole(numbers).to(dtype))
                place += slots
                continue
            tensor = own[number] if own is not None else torch.empty(shape, dtype=dtype)
            tensor = tensor.detach().to(self._device).contiguous()
            raw = tensor.view(torch.uint8) if dtype == torch.bool else tensor
            dist.broadcast(raw, src=self._source, group=self._group)
            received.append(tensor)
        return received


def _slots(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """How many numbers of type fp64 carry a tensor exactly; 0 for one that travels by itself."""
    if shape or dtype.is_complex:
        return 0
    return 2 if dtype in (torch.int64, torch.uint64) else 1


def _pack(value: Any) -> tuple[bytes, list[Tensor]]:
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> Slot:
        tensors.append(tensor.detach())
        return Slot(len(tensors) - 1)

    template = map_leaves(value, Tensor, take)
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    return pickle.dumps((template, shapes)), tensors


def _fill(message: Tensor, tensors: list[Tensor]) -> None:
    numbers: list[Tensor] = []
    for tensor in tensors:
        slots = _slots(tuple(tensor.shape), tensor.dtype)
        if slots == 2:  # fp64 holds 53 bits
            whole = tensor.to(message.device, torch.int64)
            numbers += [(whole >> 32).double(), (whole & 0xFFFFFFFF).double()]
        elif slots:
            numbers.append(tensor.to(message.device, torch.float64))
    if numbers:
        message.copy_(torch.stack(numbers))


def _whole(halves: Tensor) -> Tensor:
    parts = halves.to(torch.int64)
    return torch.bitwise_or(parts[0] << 32, parts[1])

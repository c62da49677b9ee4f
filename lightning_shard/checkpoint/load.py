"""Put a checkpoint of any kind into a training that is set up, cut as the strategy cuts it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard.checkpoint.assemble import whole
from lightning_shard.checkpoint.boxes import Held, cut
from lightning_shard.checkpoint.dtensors import hold_shards
from lightning_shard.checkpoint.fitting import check_kind, check_number, check_weights, fit_optimizers
from lightning_shard.checkpoint.format import OPTIMIZERS, WEIGHTS, is_extra_state, plain_name
from lightning_shard.checkpoint.plain import put_back
from lightning_shard.checkpoint.progress import Progress
from lightning_shard.checkpoint.reading import Stored
from lightning_shard.checkpoint.sources import Source
from lightning_shard.checkpoint.states import SavedOptimizer, TrainingStates
from lightning_shard.checkpoint.together import together


class Loading:
    """One checkpoint on its way into a training. Every method is collective.

    Args:
        source: The checkpoint.
        states: The training's states.
        with_optimizers: Whether optimizer states are loaded too.
        groups_later: Whether callbacks may still add parameter groups before optimizer states are loaded.
        shown: Whether a bar is shown here when it takes long.

    Raises:
        MisconfigurationException: If the optimizer states are not this training's.

    """

    def __init__(
        self, source: Source, states: TrainingStates, *, with_optimizers: bool, groups_later: bool, shown: bool
    ) -> None:
        self._source, self._states, self._shown = source, states, shown
        self._fitted: list[SavedOptimizer] = []
        self._stand_ins: dict[int, str] = {}
        self._alive: list[Tensor] = []
        optimizers = states.optimizers() if with_optimizers else []
        self.has_optimizers = bool(optimizers)
        if self.has_optimizers:
            check_number(source, len(optimizers))
        if self.has_optimizers and not groups_later:
            self.fit_optimizers()

    def fit_optimizers(self) -> None:
        """Find the states of this training's parameters.

        Raises:
            MisconfigurationException: If groups have other parameters, or the strategy cannot hold the states.

        """
        held, own = self._states.weights(), self._states.optimizers()
        # Another module has other optimizer states too, but its weights say better what is wrong.
        stored = {name: self._source.weight(name) for name in self._source.weights}
        check_weights(self._source.path, stored, held, strict=False)
        for number, each in enumerate(own):
            check_kind(self._source, number, each.kind, each.groups)
        named = self._states.module.named_parameters()
        frozen = {plain_name(name) for name, parameter in named if not parameter.requires_grad}
        names = [[group["params"] for group in each.groups] for each in own]
        try:
            self._fitted = fit_optimizers(self._source, names, held, frozen)
        except MisconfigurationException:
            check_weights(self._source.path, stored, held, strict=self._states.module.strict_loading)
            raise
        for number, saved in enumerate(self._fitted):
            self._states.check(self._source.path, number, saved)

    def checkpoint(self) -> dict[str, Any]:
        """Lightning's part, with a stand-in of its shape and dtype for each weight: hooks may drop or rename them."""
        checkpoint = dict(self._source.lightning)
        if self._source.nested:
            checkpoint = put_back(checkpoint, self._nested())
        weights: dict[str, Any] = dict(self._source.extra_state)
        for name in self._source.weights:
            stored = self._source.weight(name)
            stand_in = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            self._stand_ins[id(stand_in)] = name
            self._alive.append(stand_in)  # an identity must not be used again
            weights[name] = stand_in
        checkpoint[WEIGHTS] = weights
        if self._source.optimizers is not None:
            groups = [each.groups for each in self._fitted or self._source.optimizers]
            checkpoint[OPTIMIZERS] = [{"state": {}, "param_groups": each} for each in groups]
        return checkpoint

    def _nested(self) -> dict[tuple[Any, ...], Tensor]:
        """Tensors of callbacks that were saved as shards, cut like the weight of the same name if there is one."""
        weights = {plain_name(name): value for name, value in self._states.state_dict().items()}
        found: dict[tuple[Any, ...], Tensor] = {}
        wanted: dict[str, list[Held]] = {}
        for path, key in self._source.nested.items():
            stored = self._source.reader.stored[key]
            like = weights.get(plain_name(str(path[-1])))
            if isinstance(like, DTensor) and stored.shape == tuple(like.shape):
                found[path] = torch.empty_like(like, dtype=stored.dtype).detach()
            else:
                found[path] = torch.empty(stored.shape, dtype=stored.dtype)
            wanted[key] = [hold_shards(found[path])]
        self._read(wanted, "Loading callbacks' tensors")
        return found

    def weights(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load weights as the hooks left them in the checkpoint.

        Raises:
            MisconfigurationException: If they are another module's; nothing was loaded then.

        """
        held = self._states.weights()
        keys, given, extra = self._edited(checkpoint[WEIGHTS])
        for name in self._states.extra_state():
            if name in keys:
                extra[name] = whole(self._source.reader, keys.pop(name))
            elif name in given:
                extra[name] = given.pop(name)
        stored = {name: self._source.reader.stored[key] for name, key in keys.items()}
        stored |= {name: Stored(shape=tuple(value.shape), dtype=value.dtype) for name, value in given.items()}
        manifest = self._source.manifest
        left_out = manifest.left_out if manifest is not None else []
        absent = check_weights(self._source.path, stored, held, strict, left_out)
        if absent:
            rank_zero_warn(
                f"{self._source.path} was saved without its {len(absent)} frozen parameters ({absent[0]!r} among them):"
                " they keep the values that the module has now."
            )
        last: dict[int, str] = {}  # of tied names the last one counts, as when a plain module loads
        for name in [name for name in stored if name in held]:
            last[id(held[name])] = name
        wanted: dict[str, list[Held]] = defaultdict(list)
        for name in last.values():
            if name in keys:
                wanted[keys[name]].append(held[name])
        with torch.no_grad():
            self._read(wanted, "Loading weights")
            for name in last.values():
                if name in given:
                    _fill(held[name], given[name])
        self._states.weights_loaded()
        self._states.set_extra_state(extra)

    def _edited(self, weights: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Tensor], dict[str, Any]]:
        """What a hook left: names of weights to read and their keys, tensors of the hook's own, and other entries."""
        keys: dict[str, str] = {}
        given: dict[str, Tensor] = {}
        extra: dict[str, Any] = {}
        for raw_name, value in weights.items():
            name = plain_name(raw_name)
            if not isinstance(value, Tensor) or is_extra_state(name):
                extra[name] = value
            elif id(value) in self._stand_ins and not value._version:
                keys[name] = self._source.weights[self._stand_ins[id(value)]]
            elif value.is_meta or type(value).__name__ == "AbsentTensor":
                raise MisconfigurationException(
                    f"on_load_checkpoint computed {name!r} from weights of the checkpoint, which are stand-ins there:"
                    " each rank reads its own part later. Drop or rename entries there, change weights after they are"
                    " loaded (on_fit_start), or change the checkpoint itself: lightning-shard convert PATH FILE --to"
                    " lightning."
                )
            else:
                given[name] = value
        return keys, given, extra

    def optimizers(self) -> None:
        """Load optimizer states."""
        if self.has_optimizers and not self._fitted:
            self.fit_optimizers()
        wanted: dict[str, list[Held]] = defaultdict(list)
        with torch.no_grad():
            for number, saved in enumerate(self._fitted):
                places = self._states.allocate(number, saved)
                for state, held in places.items():
                    wanted[saved.tensors[state][0]].append(held)
                self._read(wanted, "Loading optimizer states")
                self._states.put_in_place(number, saved)
                wanted.clear()
        self._states.set_own_state(self._source.own_state)

    def _read(self, wanted: Mapping[str, Sequence[Held]], what: str) -> None:
        total = sum(held.bytes for holders in wanted.values() for held in holders)
        with Progress(what, total, self._shown) as progress:
            together(f"Reading {self._source.path}", lambda: self._source.reader.read(wanted, progress))


def _fill(held: Held, value: Tensor) -> None:
    """Take this rank's blocks out of a whole tensor, or of one that is cut in the same way."""
    if isinstance(value, DTensor):
        own = {box.offsets: box.tensor for box in hold_shards(value).boxes}
        for box in held.boxes:
            box.tensor.copy_(own[box.offsets])
        return
    for box in held.boxes:
        box.tensor.copy_(cut(value.detach(), (0,) * value.dim(), box.offsets, tuple(box.tensor.shape)))

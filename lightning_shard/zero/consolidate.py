"""One plain Lightning file of weights from a checkpoint folder, without any rank running."""

import io
import os
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.convert import write
from lightning_shard.checkpoint.format import MANIFEST
from lightning_shard.checkpoint.places import LocalPlace
from lightning_shard.checkpoint.sources import open_source
from lightning_shard.zero import checkpoint as format
from lightning_shard.zero.nvme import read_nvme_weights

_ENGINE_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler"
    " data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size"
    " mp_world_size ds_config ds_version".split()
)


def consolidate_checkpoint(source: str | Path, target: str | Path) -> Path:
    """Write the weights of a checkpoint folder, and Lightning's part of it, to one plain ``.ckpt`` file.

    The file holds every parameter in fp32 (tied names, frozen ones and persistent buffers included), the loops',
    callbacks' and schedulers' states and the hyper-parameters, but no optimizer states. It loads with
    ``LightningModule.load_from_checkpoint`` and under any strategy.

    `lightning_shard.convert_checkpoint` can do more: optimizer states, other formats and dtypes.

    Args:
        source: A portable folder, or one in the engine's own format.
        target: The file to write; it appears only when it is whole.

    Returns:
        ``target`` as a path.

    Raises:
        FileNotFoundError: If ``source`` is no whole checkpoint.
        MisconfigurationException: If ``source`` is portable and holds more than plain data.

    """
    source, target = Path(source), Path(target)
    if (source / MANIFEST).is_file():
        place = LocalPlace(target)
        write(replace(open_source(LocalPlace(source), trusted=False), optimizers=None), place, "lightning", None, True)
        return target
    contents = read_checkpoint(source, lazy=False)
    contents["state_dict"] = _own_memory(contents["state_dict"])
    partial = target.with_name(f".{target.name}.partial")
    try:
        torch.save(contents, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def read_checkpoint(source: Path, lazy: bool) -> dict[str, Any]:
    """Lightning's part of a checkpoint folder, with whole weights as its ``state_dict``.

    Args:
        source: The folder that a ZeRO run saved, at whatever stage and world size.
        lazy: Whether a weight is a stand-in that is put together by its ``contiguous()`` only.

    Raises:
        FileNotFoundError: If ``source`` is no whole checkpoint of a ZeRO run.

    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint, get_model_state_file

    if not source.exists():
        raise FileNotFoundError(f"There is no checkpoint at {source}.")
    written = format.written_by(source)
    # The engine's conversion reports its progress on stdout, from every rank.
    folder = source / format.TAG
    with redirect_stdout(io.StringIO()):
        if written.nvme_optimizer:
            weights = read_nvme_weights(folder, written.world_size)
        else:
            weights = get_fp32_state_dict_from_zero_checkpoint(str(source), tag=format.TAG, lazy_mode=lazy)
        model_file = torch.load(
            get_model_state_file(str(folder), written.stage), map_location="cpu", weights_only=False
        )
    whole = model_file["module"]
    if written.stage < 3:
        # Rank 0's file holds the whole module there; the engine's conversion leaves frozen parameters out at stage 1.
        weights.update({name: value for name, value in whole.items() if name not in weights})
    # The conversion makes every buffer fp32.
    weights.update({name: whole[name] for name in model_file.get("buffer_names", ())})
    for name, owner in dict(model_file.get("shared_params") or {}).items():
        if owner in weights:
            weights.setdefault(name, weights[owner])
    contents = {key: value for key, value in model_file.items() if key not in _ENGINE_KEYS}
    contents["state_dict"] = weights
    return contents


def _own_memory(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor with memory of its own, tied ones shared; a slice of a flat partition would drag all of it along."""
    made: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    result = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in made or not tensor.numel():
            made[key] = tensor.detach().clone()
        result[name] = made[key]
    return result

"""Checkpoints in the engine's own format: whole or absent, and refused in plain words where they cannot be loaded.

A checkpoint is a folder: the engine's files under ``checkpoint/``, one or more for each rank, and
``lightning_shard.json``, which says who wrote it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

TAG = "checkpoint"
_FACTS_FILE = "lightning_shard.json"


@dataclass(frozen=True, kw_only=True)
class WrittenBy:
    """Who wrote a checkpoint."""

    stage: int
    """The ZeRO stage."""

    world_size: int
    """The number of ranks."""

    precision: str
    """The Trainer's precision."""

    nvme_optimizer: bool
    """Whether the optimizer states lived on NVMe: they are then in files of ours, one for each rank."""


def store_facts(folder: Path, facts: WrittenBy) -> None:
    """Write who wrote a checkpoint into its folder."""
    (folder / _FACTS_FILE).write_text(json.dumps(asdict(facts), indent=1))


def check_loadable(path: Path, stage: int, world_size: int) -> None:
    """Refuse to train on from a checkpoint that the engine would fail on, or load wrongly, before it touches anything.

    Args:
        path: The checkpoint's folder.
        stage: The ZeRO stage of this run.
        world_size: The number of ranks of this run.

    Raises:
        FileNotFoundError: If there is no checkpoint at ``path``.
        MisconfigurationException: If another stage or number of ranks wrote it.

    """
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    written = written_by(path)
    if written.stage != stage:
        raise MisconfigurationException(
            f"{path} was written by ZeRO stage {written.stage} and cannot be loaded at stage {stage}. Use stage"
            f" {written.stage}, or convert it: lightning-shard convert {path} {path}-portable"
        )
    if written.world_size != world_size:
        raise MisconfigurationException(
            f"{path} was written by {written.world_size} ranks and cannot be loaded on {world_size}: the engine's"
            f" format holds one partition for each rank. Use {written.world_size} ranks, or convert it: lightning-shard"
            f" convert {path} {path}-portable"
        )


def written_by(path: Path) -> WrittenBy:
    """Who wrote the checkpoint at ``path``; read off the engine's file names where our own file is not there.

    Raises:
        FileNotFoundError: If ``path`` is no checkpoint folder of the engine, or not a whole one; the message says which
            folder to name when ``path`` lies inside one.

    """
    if (path / TAG).is_dir():
        facts = path / _FACTS_FILE
        if facts.is_file():
            return WrittenBy(**json.loads(facts.read_text()))
        files = sorted((path / TAG).glob("*_optim_states.pt"))
        if not files:
            raise FileNotFoundError(f"{path} holds no optimizer states of the DeepSpeed engine: it is not whole.")
        # Memory-mapped: only the entry that is read is fetched.
        optimizer = torch.load(files[0], map_location="cpu", mmap=True, weights_only=False)["optimizer_state_dict"]
        stage = int(optimizer["zero_stage"])
        return WrittenBy(stage=stage, world_size=len(files), precision="", nvme_optimizer=False)
    for parent in path.parents[:2]:
        if (parent / TAG).is_dir():
            raise FileNotFoundError(f"{path} lies inside the checkpoint {parent}. Give that folder's path instead.")
    raise FileNotFoundError(
        f"{path} is no checkpoint of a ZeRO run: a folder with the engine's files under '{TAG}/' was expected"
        f" ({'it is empty' if path.is_dir() and not any(path.iterdir()) else 'it is something else'})."
    )

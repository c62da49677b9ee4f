"""The ranks as a mesh: ``dp_shard``, inside ``dp_replicate`` where the model is held several times."""

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def make_mesh(device: torch.device, world_size: int, replicas: int, reshard_after_forward: bool | int) -> DeviceMesh:
    """The mesh of a run. Collective.

    Args:
        device: The training device of this rank.
        world_size: Ranks in all.
        replicas: Groups that each hold the whole model.
        reshard_after_forward: The strategy's argument, for its rule on numbers of ranks.

    Returns:
        ``(dp_shard,)``, or ``(dp_replicate, dp_shard)``: ranks of one shard group are neighbours.

    Raises:
        MisconfigurationException: If the ranks cannot be divided so.

    """
    check_ranks(world_size, replicas, reshard_after_forward)
    if replicas == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp_shard",))
    shape = (replicas, world_size // replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def check_ranks(world_size: int, replicas: int, reshard_after_forward: bool | int) -> None:
    """Refuse numbers of ranks that do not divide each other.

    Raises:
        MisconfigurationException: With the numbers, and those that would do.

    """
    if world_size % replicas:
        divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
        raise MisconfigurationException(
            f"FSDP2Strategy(replicas={replicas}) does not divide the {world_size} ranks into equal groups. Use one of"
            f" {', '.join(map(str, divisors))}, or another number of devices."
        )
    group = world_size // replicas
    if not isinstance(reshard_after_forward, bool):
        fitting = [number for number in range(2, group) if group % number == 0]
        if reshard_after_forward not in fitting:
            remedy = f"one of {', '.join(map(str, fitting))}, or " if fitting else ""
            raise MisconfigurationException(
                f"FSDP2Strategy(reshard_after_forward={reshard_after_forward}) must be a proper divisor, above 1, of"
                f" the {group} ranks that share one model. Use {remedy}True or False."
            )

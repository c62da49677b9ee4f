"""The checkpoint format: a folder that says who wrote it, keyed by the names of the plain model.

====================  ==============================================================================================
``manifest.json``     Who wrote it, the step, the names: `Manifest`. Written last; a folder without it is no checkpoint.
``.metadata``         torch.distributed.checkpoint: which tensors there are, and where each block of them lies.
``__0_0.distcp`` ...  The blocks, one file for each rank that wrote.
``lightning.pt``      Lightning's part (loops, callbacks, schedulers, hyper-parameters) and the optimizers' groups:
                      plain data, loaded with ``weights_only=True``.
``pickled.pt``        What of Lightning's part is no plain data. Only there if needed, only read where it is trusted.
====================  ==============================================================================================

Tensors are keyed ``state_dict.<name>`` and ``optimizer_<number>.state.<parameter name>.<state name>``. On a file system
without rename all but the manifest lies in a folder below, which the manifest names.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lightning_shard._compat.reading import MANIFEST as MANIFEST

FORMAT = "lightning-shard checkpoint"
VERSION = 1

METADATA = ".metadata"
LIGHTNING = "lightning.pt"
PICKLED = "pickled.pt"

WEIGHTS = "state_dict"
OPTIMIZERS = "optimizer_states"


@dataclass(frozen=True, kw_only=True)
class WrittenBy:
    """The run that wrote a checkpoint."""

    strategy: str
    """The strategy's class."""

    settings: dict[str, Any] = field(default_factory=dict)
    """What of its settings says how the states were cut: the ZeRO stage, the schedule."""

    world_size: int = 1
    """Number of ranks."""

    mesh: dict[str, int] = field(default_factory=dict)
    """Ranks along each axis: ``pp``, ``dp_replicate``, ``dp_shard``."""

    precision: str = ""
    """The Trainer's precision."""

    versions: dict[str, str] = field(default_factory=dict)
    """Of lightning-shard, torch and lightning."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What ``manifest.json`` holds."""

    written_by: WrittenBy
    """Who wrote it."""

    saved_at: str
    """When, as ISO 8601 with the time zone."""

    epoch: int | None = None
    """Lightning's epoch."""

    global_step: int | None = None
    """Lightning's count of optimizer steps."""

    aliases: dict[str, str] = field(default_factory=dict)
    """Names of tied weights, and the name that the tensor is stored under."""

    left_out: list[str] = field(default_factory=list)
    """Frozen parameters that were left out on purpose."""

    optimizers: list[dict[str, Any]] | None = None
    """Of each optimizer its class and, group by group, its parameters' names; ``None`` for weights alone."""

    pickled: list[str] = field(default_factory=list)
    """Entries of Lightning's part that are no plain data, and so lie in ``pickled.pt``."""

    data: str = "."
    """The folder of all other files, from the manifest's own."""

    format: str = FORMAT
    """What this is."""

    version: int = VERSION
    """The format's version."""

    def to_json(self) -> str:
        """The manifest as it is stored."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, path: str) -> "Manifest":
        """Read a manifest.

        Raises:
            ValueError: If it is damaged, or of a later version of the format.

        """
        version = 0
        try:
            contents: dict[str, Any] = json.loads(text)
            if contents.get("format") != FORMAT:
                raise ValueError(f"its format is {contents.get('format')!r}")
            version = int(contents["version"])
            if version > VERSION:
                raise ValueError("it is later")
            contents["written_by"] = WrittenBy(**contents["written_by"])
            return cls(**contents)
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            if version > VERSION:
                raise ValueError(
                    f"{path} has version {version} of the checkpoint format; this version of lightning-shard reads up"
                    f" to {VERSION}. Install a later lightning-shard."
                ) from None
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path}/{MANIFEST} is no manifest of a checkpoint, or is damaged: {reason}") from None


def versions() -> dict[str, str]:
    """Versions of what writes a checkpoint."""
    import lightning

    import lightning_shard

    return {
        "lightning_shard": lightning_shard.__version__,
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
    }


def lightning_part(
    lightning: Mapping[str, Any],
    optimizers: Iterable[tuple[list[dict[str, Any]], Mapping[Any, dict[str, Any]]]],
    extra_state: Mapping[str, Any],
    own_state: Mapping[str, Any],
) -> dict[str, Any]:
    """What ``lightning.pt`` and ``pickled.pt`` hold.

    Args:
        lightning: Lightning's part.
        optimizers: Of each optimizer its groups and its states without dimensions; names of parameters are elsewhere.
        extra_state: Entries of the state dict that are none of the module's tensors.
        own_state: Numbers of the strategy's own.

    """
    return {
        "lightning": lightning,
        "optimizers": [
            {"groups": [hyper_parameters(group) for group in groups], "values": values} for groups, values in optimizers
        ],
        "extra_state": extra_state,
        "own_state": own_state,
    }


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def weight_at(path: tuple[Any, ...]) -> str | None:
    """The plain name of the weight that lies at a place of the nested dict; ``None`` if there is something else.

    Lightning's FSDPStrategy has them under ``"model"``.
    """
    return plain_name(str(path[1])) if len(path) == 2 and path[0] in (WEIGHTS, "model") else None


def state_at(path: tuple[Any, ...]) -> tuple[int, Any, str] | None:
    """The optimizer's number, the parameter and the name of the state that lies at a place of the nested dict."""
    number = optimizer_at(path)
    if number is None or len(path) != 4 or path[1] != "state":
        return None
    # A portable checkpoint that was made of a plain file counts parameters, as the file does.
    return number, path[2] if isinstance(path[2], int) else plain_name(str(path[2])), str(path[3])


def optimizer_at(path: tuple[Any, ...]) -> int | None:
    """The number of the optimizer that a place of the nested dict belongs to."""
    head, _, number = str(path[0]).partition("_")
    return int(number) if head == "optimizer" and number.isdecimal() else None


def weight_key(name: str) -> str:
    """The key of a weight."""
    return f"{WEIGHTS}.{name}"


def state_key(number: int, parameter: str, state: str) -> str:
    """The key of an optimizer's state."""
    return f"optimizer_{number}.state.{parameter}.{state}"


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is what ``get_extra_state`` of a module gave, be it a tensor or not."""
    return name.rpartition(".")[2] == "_extra_state"


def plain_name(name: str) -> str:
    """A name as the plain model has it: compiled and checkpointed modules put parts of their own in between."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")

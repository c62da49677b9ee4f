"""Making a module out of the hyper-parameters in a checkpoint.

Lightning does so only inside of the private function that loads the weights too, from memory.
"""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.core import saving
from lightning.pytorch.utilities.migration.utils import migrate_checkpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

Module = TypeVar("Module", bound="pl.LightningModule")

_CLI = "lightning.pytorch.cli.instantiate_module"
"""How a module that LightningCLI made is made again; the one way that Lightning itself allows."""


def build_module(module_class: type[Module], checkpoint: Mapping[str, Any], given: Mapping[str, Any]) -> Module:
    """The module as Lightning's `load_from_checkpoint` makes it, before weights are loaded.

    Args:
        module_class: Its class.
        checkpoint: Lightning's part of the checkpoint.
        given: Arguments of the constructor that count before those of the checkpoint.

    Raises:
        ValueError: If the checkpoint wants another way of making it, or a class that was not imported.

    """
    if "pytorch-lightning_version" in checkpoint:
        checkpoint, _ = migrate_checkpoint({**checkpoint, "state_dict": {}})
    stored = {**(checkpoint.get(module_class.CHECKPOINT_HYPER_PARAMS_KEY) or {}), **given}
    parameters = inspect.signature(module_class.__init__).parameters
    arguments = saving._convert_loaded_hparams(stored, checkpoint.get(module_class.CHECKPOINT_HYPER_PARAMS_TYPE))
    name = checkpoint.get(module_class.CHECKPOINT_HYPER_PARAMS_NAME)
    if name and name in parameters:  # one argument takes them all
        arguments = {name: arguments}
    arguments = {**arguments, **given}
    instantiator = arguments.pop("_instantiator", None)
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        known = [*parameters, "_class_path"] if instantiator else parameters
        arguments = {key: value for key, value in arguments.items() if key in known}
    module = _by_cli(module_class, instantiator, arguments) if instantiator else module_class(**arguments)
    if is_overridden("configure_model", module):
        module.configure_model()
    return module


def _by_cli(module_class: type[Module], instantiator: Any, arguments: dict[str, Any]) -> Module:
    from lightning.pytorch.cli import instantiate_module

    if instantiator != _CLI:
        raise ValueError(f"The checkpoint asks for {instantiator!r} to make the module; only {_CLI!r} may do that.")
    path = arguments.get("_class_path")
    if path is not None and not saving._is_imported_subclass(path, module_class):
        raise ValueError(
            f"The checkpoint asks for the class {path!r}, which is no imported subclass of {module_class.__name__}."
            " Import the module that defines it first, if you trust the checkpoint."
        )
    made: Module = instantiate_module(module_class, arguments)
    return made


def own_strictness(module: "pl.LightningModule") -> bool | None:
    """What the module says of ``strict_loading``; ``None`` if nothing. The property itself says ``True`` then."""
    return module._strict_loading

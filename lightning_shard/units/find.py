"""Which modules become FSDP units.

FSDP gathers a unit's parameters before the forward of its module and frees them after it, so a unit must own every use
of each of its parameters. What no unit takes belongs to the root.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from lightning_shard import _compat
from lightning_shard.config import ClassUnits, SizeUnits
from lightning_shard.units.usage import Usage

_LISTS = (nn.ModuleList, nn.ModuleDict)
_USE_CHILDRENS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True, kw_only=True)
class Units:
    """The modules to shard, besides the root."""

    names: tuple[str, ...]
    """Names of the modules, children before their parents."""

    rejected: dict[str, str] = field(default_factory=dict)
    """Name of a module that was wanted -> why it is no unit. Its parameters belong to a unit around it, or the root."""


def find_units(
    module: nn.Module, wanted: Literal["blocks"] | SizeUnits | ClassUnits, usage: Usage | None = None
) -> Units:
    """Choose the modules that become units.

    Args:
        module: The root; it is never among the result.
        wanted: ``"blocks"`` for the repeated entries of the outermost lists of modules (single layers where no list
            has larger entries; ``SizeUnits()`` where nothing is repeated); or by size; or by class.
        usage: What dry runs of the steps saw; ``None`` to go by structure alone.

    Raises:
        MisconfigurationException: If ``ClassUnits`` names a class that cannot be imported, or that no module has.

    """
    tree = _Tree(module, usage)
    if isinstance(wanted, ClassUnits):
        classes = resolve_classes(wanted.classes, "units")
        _check_present(classes, module)
        return tree.close(name for name, each in tree.bottom_up if isinstance(_plain(each), classes))
    if isinstance(wanted, SizeUnits):
        return tree.close_by_size(wanted.min_params)
    blocks = tree.close(_blocks(tree))
    return blocks if blocks.names else tree.close_by_size(SizeUnits().min_params)


def resolve_classes(classes: Sequence[type[nn.Module] | str], argument: str) -> tuple[type[nn.Module], ...]:
    """Classes of modules from classes and import paths.

    Args:
        classes: Classes, or paths such as ``"torch.nn.Linear"``.
        argument: Where the user wrote them, for the error.

    Raises:
        MisconfigurationException: Naming a path at which there is no class of modules.

    """
    return tuple(_import(each, argument) if isinstance(each, str) else each for each in classes)


def why_not_a_unit(module: nn.Module, name: str, usage: Usage | None = None) -> str | None:
    """Why the submodule ``name`` cannot be a unit that holds all of its parameters; ``None`` if it can."""
    tree = _Tree(module, usage)
    if name not in tree.by_name:
        return "is the inside of a compiled module, or a parametrization"
    if not any(True for _ in tree.by_name[name].parameters()):
        return "has no parameters"
    return tree.close([name]).rejected.get(name)


class _Tree:
    """The modules of a root by name, and the rules by which one may be a unit."""

    def __init__(self, root: nn.Module, usage: Usage | None) -> None:
        self.bottom_up = list(_bottom_up("", root, set()))
        self.by_name = dict(self.bottom_up)
        self._usage = usage
        self._units: dict[str, None] = {}
        self._rejected: dict[str, str] = {}
        self._claimed: set[nn.Parameter] = set()
        self._inside = dict(_inside_fused(self.bottom_up))
        self._paths: dict[int, list[str]] = {}
        self._owners: dict[nn.Parameter, list[tuple[str, str]]] = {}
        for path, each in root.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(each), []).append(path)
            for name, parameter in each.named_parameters(recurse=False, remove_duplicate=False):
                self._owners.setdefault(parameter, []).append((path, _join(path, name)))

    def close(self, names: Iterable[str]) -> Units:
        """Make units of those modules that may be one; ``names`` go from the bottom up."""
        for name in names:
            self._try(name)
        return Units(names=tuple(self._units), rejected=self._rejected)

    def close_by_size(self, min_params: int) -> Units:
        """Make a unit of each module, from the bottom up, whose unclaimed parameters reach ``min_params`` elements."""
        for name, each in self.bottom_up:
            if name not in self._inside and sum(p.numel() for p in self._unclaimed(each)) >= min_params:
                self._try(name)
        return Units(names=tuple(self._units), rejected=self._rejected)

    def _unclaimed(self, module: nn.Module) -> set[nn.Parameter]:
        return set(module.parameters()) - self._claimed

    def _try(self, name: str) -> None:
        each = self.by_name[name]
        parameters = self._unclaimed(each)
        if not name or not parameters:
            return
        why = self._objection(name, each, parameters)
        if why:
            self._rejected[name] = why
        else:
            self._rejected.pop(name, None)
            self._units[name] = None
            self._claimed |= parameters

    def _objection(self, name: str, each: nn.Module, parameters: set[nn.Parameter]) -> str:
        """Why a module is no unit; empty if it may be one."""
        if name in self._inside:
            return self._inside[name]
        if isinstance(each, torch.jit.ScriptModule):
            return "is compiled to TorchScript"
        each = _plain(each)
        if type(each).forward is nn.Module.forward and "forward" not in vars(each):
            return f"is a {type(each).__name__}, a container without a forward of its own"
        for parameter in parameters:
            for path, place in self._owners[parameter]:
                if not any(_within(path, own) for own in self._paths[id(each)]):
                    inner = next(at for owner, at in self._owners[parameter] if _within(owner, name))
                    return f"shares parameter {inner!r} with {place!r}"
        return self._objection_of_usage(name)

    def _objection_of_usage(self, name: str) -> str:
        usage = self._usage
        if usage is None:
            return ""
        if name in usage.outside:
            return f"its parameter {usage.outside[name]!r} is used outside its forward"
        if usage.complete and name not in usage.ran:
            return "its forward is never run"
        parent = self.by_name.get(name.rpartition(".")[0])
        if usage.complete and isinstance(parent, nn.ModuleDict):
            start = name.rpartition(".")[0]
            idle = [key for key in parent if f"{start}.{key}" not in usage.ran and _is_layer(parent[key])]
            if idle:
                return f"is chosen by its key, and the entry {idle[0]!r} of {start!r} did not run: ranks may differ"
        return ""


def _blocks(tree: _Tree) -> list[str]:
    """Repeated entries of lists of modules: larger ones, or else single layers."""
    for fits in (_is_block, _is_layer):
        found: dict[str, None] = {}
        _search("", tree.by_name[""], fits, found)
        if found:
            return [name for name in found if name in tree.by_name]
    return []


def _search(name: str, module: nn.Module, fits: Callable[[nn.Module], bool], found: dict[str, None]) -> None:
    """Collect the repeated entries of lists, from the top down and not inside one another."""
    if isinstance(_plain(module), (*_LISTS, nn.Sequential)):
        found.update(dict.fromkeys(_repeated(name, module, fits)))
    for inner, child in _children(name, module):
        if inner not in found:
            _search(inner, child, fits, found)


def _repeated(name: str, module: nn.Module, fits: Callable[[nn.Module], bool]) -> list[str]:
    """Entries of a list of which another one has the same class."""
    fitting = {inner: type_before_parametrizations(entry) for inner, entry in _entries(name, module, fits)}
    times = Counter(fitting.values())
    return [inner for inner, kind in fitting.items() if times[kind] > 1]


def _entries(name: str, module: nn.Module, fits: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Fitting entries of a list; those of a list inside it, and of a sequence that itself repeats, in its place."""
    for inner, child in _children(name, module):
        entry = _plain(child)
        if isinstance(entry, _LISTS) or (isinstance(entry, nn.Sequential) and _repeated(inner, child, fits)):
            yield from _entries(inner, child, fits)
        elif fits(entry):
            yield inner, entry


def _is_block(module: nn.Module) -> bool:
    """Whether a module is more than a single layer: it has submodules, or several weight matrices of its own."""
    matrices = [p for p in module.parameters(recurse=False) if p.ndim > 1]
    parts = [name for name, _ in module.named_children() if name != "parametrizations"]
    return _is_layer(module) and (bool(parts) or len(matrices) > 1)


def _is_layer(module: nn.Module) -> bool:
    return any(parameter.ndim > 1 for parameter in module.parameters())


def _bottom_up(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, under its first name, children before parents."""
    seen.add(module)
    for inner, child in _children(name, module):
        if child not in seen:
            yield from _bottom_up(inner, child, seen)
    yield name, module


def _children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a module, with their full names, that could be units.

    The inside of a compiled module is left out: its wrapper stands for it, whose hooks run outside the compiled code.
    So are parametrizations, which run wherever the weight that they make is read.
    """
    plain = _plain(module)
    if isinstance(plain, torch.jit.ScriptModule):
        return
    while module is not plain:
        name, module = _join(name, "_orig_mod"), module.get_submodule("_orig_mod")
    for key, child in plain.named_children():
        if not (key == "parametrizations" and is_parametrized(plain)):
            yield _join(name, key), child


def _inside_fused(modules: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, str]]:
    """Modules whose weights are used by a module around them, without their forward, and why."""
    for outer, module in modules:
        kind = type(_plain(module))
        if issubclass(kind, _USE_CHILDRENS_WEIGHTS):
            for name, _ in modules:
                if name != outer and _within(name, outer):
                    yield name, f"is inside the {kind.__name__} {outer!r}, which uses its weights directly"


def _plain(module: nn.Module) -> nn.Module:
    """What a compiled module was made from; any other module itself."""
    while _compat.is_compiled(module):
        module = module.get_submodule("_orig_mod")
    return module


def _check_present(classes: tuple[type[nn.Module], ...], root: nn.Module) -> None:
    present = [type(_plain(module)) for module in root.modules()]
    for kind in classes:
        if not any(issubclass(each, kind) for each in present):
            names = sorted({_path(type(each)) for each in root.modules() if any(True for _ in each.parameters())})
            raise MisconfigurationException(
                f"ClassUnits(classes=[{_path(kind)!r}]): no module of {type(root).__name__} is of this class. Its"
                f" modules with parameters are of the classes {', '.join(names)}."
            )


def _import(path: str, argument: str) -> type[nn.Module]:
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
        break
    raise MisconfigurationException(
        f"{argument} names {path!r}, but there is no class of modules at this import path. Check its spelling, and that"
        " its package is installed and on the Python path."
    )


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _within(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")

"""Objects on their way to another process: functions and classes that plain pickle refuses travel too.

Pickle sends a function or class as a name to import. That fails for what a test defines inside itself (closures,
lambdas, local modules) and for test files that no import path reaches. Here a name travels with its file, and what has
no name travels as code with its closure. Both processes must run the same Python, since code objects differ.
"""

import abc
import importlib
import importlib.util
import io
import marshal
import os
import pickle
import site
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_INSTALLED = tuple(
    str(Path(path).resolve()) + os.sep
    for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    | set(site.getsitepackages())
)
"""Folders whose modules any process of this environment can import by name alone."""

_MADE_BY_TYPE = ("__dict__", "__weakref__", "_abc_impl", "__abstractmethods__", "__parameters__")
"""Class attributes that Python makes anew with the class."""


def dumps(value: Any) -> bytes:
    """Pickle ``value``; tensors go detached, on CPU, by value.

    Raises:
        TypeError: If a part of ``value`` cannot be sent; the message names it.

    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"Cannot be sent to another process: {error}. Make such objects inside the function that runs there, or"
            " define their class at the top level of a file."
        ) from error
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Undo :func:`dumps`. Only for data of this machine's own processes: unpickling runs code."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            by_name = _reduce_named(value)
            return by_name if by_name is not None else _reduce_function(value)
        if isinstance(value, type):
            by_name = _reduce_named(value)
            return by_name if by_name is not None else _reduce_class(value)
        if isinstance(value, types.CellType):
            return _make_cell, (), _contents(value), None, None, _fill_cell
        if isinstance(value, types.ModuleType):
            return _load_module, (value.__name__, _file_of(value))
        if isinstance(value, property):
            return property, (value.fget, value.fset, value.fdel, value.__doc__)
        if isinstance(value, (staticmethod, classmethod)):
            return type(value), (value.__func__,)
        if isinstance(value, torch.Tensor) and (value.requires_grad or value.device.type != "cpu"):
            return _same, (value.detach().cpu(),)
        return NotImplemented


def _contents(cell: types.CellType) -> tuple[Any, ...] | None:
    try:
        return (cell.cell_contents,)
    except ValueError:  # A variable that the outer function has not bound yet.
        return None


def _make_cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    (cell.cell_contents,) = contents


def _same(value: Any) -> Any:
    return value


def _file_of(module: types.ModuleType) -> str | None:
    """The source file of a module that lies outside the environment's own folders and this package, else ``None``."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == __package__:
        return None
    path = str(Path(file).resolve())
    return None if path.startswith(_INSTALLED) else path


def _reduce_named(value: types.FunctionType | type) -> Any:
    """A reference by module and name, ``NotImplemented`` to leave it to pickle, or ``None`` if the name misses it."""
    module = sys.modules.get(value.__module__)
    if module is None:
        return None
    found: Any = module
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not value:
        # Some library classes give a name that is not their own (``type(None)``); pickle knows those.
        return None if _file_of(module) else NotImplemented if isinstance(value, type) else None
    if _file_of(module) is None:
        if module.__name__ == "__main__":
            raise TypeError(
                f"{value.__qualname__!r} was defined in an interactive session, which has no file that another"
                " process could import; put it into a file"
            )
        return NotImplemented
    return _load_named, (module.__name__, _file_of(module), value.__qualname__)


def _reduce_function(function: types.FunctionType) -> Any:
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    if module is None or module.__dict__ is not function.__globals__:
        raise TypeError(f"function {function.__qualname__!r} does not belong to an importable module")
    code = marshal.dumps(function.__code__)
    skeleton = (code, module.__name__, _file_of(module), function.__name__, function.__closure__)
    attributes = {
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
        "__annotations__": function.__annotations__,
        **function.__dict__,
    }
    return _make_function, skeleton, attributes, None, None, _fill_function


def _make_function(
    code: bytes, module: str, file: str | None, name: str, closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    return types.FunctionType(marshal.loads(code), _load_module(module, file).__dict__, name, None, closure)


def _fill_function(function: types.FunctionType, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(function, name, value)


def _reduce_class(cls: type) -> Any:
    if type(cls) not in (type, abc.ABCMeta) or "__slots__" in vars(cls) or "__dataclass_fields__" in vars(cls):
        raise TypeError(
            f"class {cls.__qualname__!r} is defined inside a function and is a dataclass, an enum, or has slots or a"
            " metaclass of its own; move it to the top level of its file"
        )
    attributes = {name: value for name, value in vars(cls).items() if name not in _MADE_BY_TYPE}
    return _make_class, (type(cls), cls.__name__, cls.__bases__), attributes, None, None, _fill_class


def _make_class(metaclass: Callable[..., type], name: str, bases: tuple[type, ...]) -> type:
    return metaclass(name, bases, {})


def _fill_class(cls: type, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(cls, name, value)
    abc.update_abstractmethods(cls)


def _load_named(module: str, file: str | None, qualname: str) -> Any:
    found: Any = _load_module(module, file)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _load_module(name: str, file: str | None) -> types.ModuleType:
    """Import ``name``; from ``file`` where the import path leads elsewhere or nowhere (test files of equal names)."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if file is None or (error.name is not None and not f"{name}.".startswith(f"{error.name}.")):
            raise
    else:
        if file is None or _file_of(module) == file:
            return module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, f"{file} is no Python file"
    assert spec.loader is not None, f"{file} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

"""Lightning's part of a checkpoint: plain data where it is, and the rest apart, to be read only where it is trusted.

torch loads plain data (numbers, strings, tensors, and containers of them) without running any code of the file's. What
else a module's hyper-parameters or a callback's state may hold needs pickle, which can run anything.
"""

import argparse
import datetime
import io
import pathlib
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import IO, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    Tensor,
    nn.Parameter,
)
_SAFE = (
    frozenset,
    argparse.Namespace,
    datetime.timedelta,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    *([pathlib.WindowsPath] if hasattr(pathlib, "WindowsPath") else []),
)
"""Classes that hold plain data, and that hyper-parameters are often made of."""

Path = tuple[Any, ...]


def split_plain(value: Any) -> tuple[Any, dict[Path, Any]]:
    """Take out of nested dicts, lists and tuples what is no plain data.

    Returns:
        The value with ``None`` in the places of what was taken out, and that by its path.

    """
    apart: dict[Path, Any] = {}
    return _plain_of(value, (), apart), apart


def _plain_of(value: Any, path: Path, apart: dict[Path, Any]) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict):
        kept = kind()
        for key, each in value.items():
            if _is_plain(key):
                kept[key] = _plain_of(each, (*path, key), apart)
            else:
                apart[(*path, key)] = each
        return kept
    if kind in (list, tuple):
        return kind(_plain_of(each, (*path, place), apart) for place, each in enumerate(value))
    if _is_plain(value):
        return value
    apart[path] = value
    return None


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN or kind in (_SAFE[2:]):
        return True
    if kind in (set, frozenset, tuple, list):
        return all(map(_is_plain, value))
    if kind in (dict, OrderedDict):
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    return kind is argparse.Namespace and all(map(_is_plain, vars(value).values()))


def put_back(value: Any, apart: Mapping[Path, Any]) -> Any:
    """Undo `split_plain`."""
    for path, each in apart.items():
        value = _with(value, path, each)
    return value


def _with(value: Any, path: Path, each: Any) -> Any:
    if not path:
        return each
    if isinstance(value, (list, tuple)):
        return type(value)(_with(old, path[1:], each) if place == path[0] else old for place, old in enumerate(value))
    value[path[0]] = _with(value.get(path[0]), path[1:], each)
    return value


def spell(path: Path) -> str:
    """A path in words."""
    return ".".join(map(str, path))


def dumped(value: Any) -> bytes:
    """``value`` as `torch.save` writes it, its tensors on the CPU and with memory of their own."""
    buffer = io.BytesIO()
    torch.save(_on_cpu(value), buffer)
    return buffer.getvalue()


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True) if type(value) in (Tensor, nn.Parameter) else value
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _on_cpu(each)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_on_cpu, value))
    return value


def safe_classes() -> AbstractContextManager[None]:
    """Inside, torch takes the classes that hold plain data for safe."""
    return torch.serialization.safe_globals(list(_SAFE))


def load_plain(file: "IO[bytes] | str", path: str, trusted: bool, **options: Any) -> Any:
    """`torch.load` that runs no code of the file's, unless it is trusted.

    Args:
        file: What to read.
        path: As the user knows it, for messages.
        trusted: Whether the file may run code.
        options: More arguments of `torch.load`.

    Raises:
        MisconfigurationException: If the file needs pickle, naming the class that it asks for.
        ValueError: If it is damaged.

    """
    try:
        with safe_classes():
            return torch.load(file, map_location="cpu", weights_only=not trusted, **options)
    except (RuntimeError, EOFError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is damaged, or no checkpoint: {reason}") from error
    except pickle.UnpicklingError as error:
        reason = str(error)
        if not re.search(r"Unsupported (global|class)|GLOBAL |but got <class", reason):
            lines = [line.strip() for line in reason.splitlines() if line.strip()]
            telling = next((line for line in lines if "rror" in line or "nsupported" in line), lines[0])[:200]
            raise ValueError(f"{path} is damaged, or no checkpoint: {telling}") from error
        asked = next((line.strip() for line in reason.splitlines() if "GLOBAL" in line or "class" in line), reason)
        raise MisconfigurationException(
            f"{path} holds more than plain data ({asked[:300]}), and to read that can run any code. {TRUST}"
        ) from error


TRUST = (
    "If you trust the one who wrote it, say so: `trusted=True` on the strategy or function, `--trusted` on the command."
)


def refuse_pickled(path: str, names: list[str]) -> None:
    """Say which entries keep a checkpoint from being loaded safely.

    Raises:
        MisconfigurationException: Always, naming them.

    """
    raise MisconfigurationException(
        f"{path} holds entries that are no plain data: {', '.join(names)}. To read them can run any code. {TRUST}"
    )

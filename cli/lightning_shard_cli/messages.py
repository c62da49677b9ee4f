"""From the argument parser's report to one line.

The parser (jsonargparse) tries every member of a union type and reports each failure as an indented tree. The line that
a user needs is the leaf that lies deepest: there the parser had already understood all but one thing. This file finds
that leaf, the path of option names that leads to it, and the nearest valid choice.
"""

import ast
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_shard_cli.errors import nearest

_BASES: tuple[type, ...] = (Strategy, LightningModule, LightningDataModule, Callback, Logger, Optimizer, LRScheduler)

# Lines of the tree that lead to a leaf or repeat it, but say nothing by themselves.
_NOISE = re.compile(r"Does not validate against|Subtypes:|Errors:|Given value|Expected a path but|$")
_KEY = re.compile(r'Parser key "(?P<key>[^"]+)": ?(?P<rest>.*)')
_CLASS = re.compile(r"Problem with given class_path '(?P<path>[^']+)':")
_EXPECTED = re.compile(r"Expected a (?P<type><class '[^']+'>|typing\.Literal\[.*?\])(?:\. Got value: (?P<value>.*))?$")
_GIVEN = re.compile(r"Given value: (?P<value>.*)")


@dataclass(frozen=True)
class _Leaf:
    """One line of the tree that says something."""

    depth: int
    """Its indentation in characters; a bullet counts as indentation."""

    path: str
    """The option names that lead to it, joined by dots."""

    owner: str
    """Import path of the class whose options were being read, or ``""``."""

    text: str
    """The line itself."""


def one_line(message: str, options: Iterable[str]) -> str:
    """The one line that a user needs.

    Args:
        message: What the parser reported: a sentence, or an indented tree.
        options: All options of the subcommand, without leading dashes, to find the nearest to a misspelt one.

    Returns:
        The option, what is wrong with it and, where there is one, the nearest valid choice. One line.

    """
    leaves, given = _read(message)
    if not leaves:
        return " ".join(message.split())
    deepest = max(leaf.depth for leaf in leaves)
    chosen = [leaf for leaf in leaves if leaf.depth == deepest]
    # "Expected a list" beside a misspelt class only says that the class alone would do too.
    words = _choices(chosen)
    chosen = [leaf for leaf in chosen if not _EXPECTED.match(leaf.text)] or chosen
    said = _type_mismatch(chosen, given) or "; ".join(dict.fromkeys(_explain(leaf, options) for leaf in chosen))
    if words and said.startswith("no class"):
        said += f"; it may also be {' or '.join(map(repr, words))}"
    path = chosen[0].path
    return f"--{path}: {said}" if path and path != "config" else said


def _read(message: str) -> tuple[list[_Leaf], str]:
    """All leaves of the tree, and the given value as text (that of the innermost key)."""
    leaves: list[_Leaf] = []
    keys: list[tuple[int, str]] = []
    owners: list[tuple[int, str]] = []
    given = ""
    for line in filter(str.strip, message.splitlines()):
        text = re.sub(r"^(- )+", "", line.strip())
        depth = len(line) - len(line.lstrip()) + len(line.strip()) - len(text)
        while owners and owners[-1][0] >= depth:
            owners.pop()
        while keys and keys[-1][0] >= depth and keys[-1][0] > 0:
            keys.pop()
        if match := _KEY.match(text):
            keys.append((depth, match["key"]))
            text, depth = match["rest"], depth + 1
        elif match := _CLASS.match(text):
            owners.append((depth, match["path"]))
            continue
        elif match := _GIVEN.match(text):
            given = given or match["value"]
        if not _NOISE.match(text):
            owner = owners[-1][1] if owners else ""
            leaves.append(_Leaf(depth, ".".join(key for _, key in keys), owner, text))
    return leaves, given


def _type_mismatch(leaves: list[_Leaf], given: str) -> str:
    """``"expected 'cpu' or 'nvme', got 'disk'"`` when every leaf is about a type, else ``""``."""
    choices: list[Any] = []
    kinds: list[str] = []
    for leaf in leaves:
        match = _EXPECTED.match(leaf.text)
        if match is None:
            return ""
        given = match["value"] or given
        if match["type"].startswith("typing.Literal"):
            choices += ast.literal_eval(match["type"].removeprefix("typing.Literal"))
        else:
            kinds.append(match["type"].split("'")[1])
    names = list(dict.fromkeys(str(choice) for choice in choices))
    # `int` stands beside a list of numbers only because the parser could not read the text as a number.
    expected = names or [f"a value of type {kind}" for kind in dict.fromkeys(kinds) if kind != "NoneType"]
    expected += ["null"] if "NoneType" in kinds else []
    listed = ", ".join(expected[:-1]) + f" or {expected[-1]}" if len(expected) > 1 else expected[0]
    return f"expected {listed}, got {given!r}{nearest(given, names)}"


def _choices(leaves: list[_Leaf]) -> list[Any]:
    """The values that stand beside a class: ``["blocks"]`` for ``Literal["blocks"] | SizeUnits``."""
    matches = [match for leaf in leaves if (match := _EXPECTED.match(leaf.text))]
    literals = [match["type"].removeprefix("typing.Literal") for match in matches if "Literal" in match["type"]]
    return [choice for literal in literals for choice in ast.literal_eval(literal)]


def _explain(leaf: _Leaf, options: Iterable[str]) -> str:
    """One leaf in words, with the nearest valid choice."""
    text = leaf.text
    if match := re.match(r"Option '([^']+)' is not accepted", text):
        return f"{leaf.owner.rsplit('.', 1)[-1]} has no option {match[1]!r}{nearest(match[1], _parameters(leaf.owner))}"
    if match := re.match(r"Subcommand '[^']+' does not accept option '([^']+)'", text):
        return f"no option --{match[1]}{nearest(match[1], options, prefix='--')}"
    if match := re.match(r"unrecognized arguments: (\S+)", text):
        given = match[1].lstrip("-").split("=")[0]
        if match[1].startswith("-"):
            return f"no option --{given}{nearest(given, options, prefix='--')}"
        return f"{match[1]!r} belongs to no option"
    if match := re.match(r"module '([^']+)' has no attribute '([^']+)'", text):
        return f"no class {match[2]!r} in module {match[1]!r}{nearest(match[2], dir(import_module(match[1])))}"
    if match := re.match(r"No module named '([^']+)'", text):
        return f"no module {match[1]!r} (for class {leaf.owner!r}; looked in the current folder and PYTHONPATH)"
    if match := re.search(r"Expected a dot import path string: (.+)", text):
        return f"no class {match[1]!r}{nearest(match[1], class_names())}"
    if match := re.match(r"the following arguments are required: (.+)", text):
        missing = ", ".join(key.strip() for key in match[1].split(","))
        if leaf.owner:
            return f"{leaf.owner.rsplit('.', 1)[-1]} needs {missing}"
        return f"missing: --{missing.partition('.')[2]} (as an option, or in a file given with --config)"
    return text


def class_names(*bases: type) -> set[str]:
    """Names of all known subclasses of ``bases`` (of everything that a configuration can name, when none is given)."""
    found: set[str] = set()
    left = list(bases or _BASES)
    while left:
        children: list[type] = left.pop().__subclasses__()
        found |= {child.__name__ for child in children}
        left += children
    return {name for name in found if not name.startswith("_")}


def _parameters(class_path: str) -> list[str]:
    """The constructor's arguments of the class at ``class_path``."""
    module, _, name = class_path.rpartition(".")
    return list(inspect.signature(getattr(import_module(module), name)).parameters)

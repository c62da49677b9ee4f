"""The help pages of strategies: all names and classes, and the options inside a strategy's option classes."""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import get_args, get_type_hints

from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy

from lightning_shard.registry import NAMES, strategy_classes


def strategy_help(strategy: type[Strategy], key: str) -> str:
    """What the parser's own help page of a strategy lacks.

    Args:
        strategy: The class that help was asked for; ``Strategy`` itself stands for "which are there?".
        key: The option under which it is given, such as ``"trainer.strategy"``.

    Returns:
        For ``Strategy`` the names and classes of this package, one a line; for a strategy class the options of each
        option class that its constructor takes.

    """
    if strategy is Strategy:
        width = max(map(len, NAMES))
        names = [f"  {name:<{width}}  {row.description}" for name, row in NAMES.items()]
        classes = [f"  --{key}.help={each.__name__}" for each in strategy_classes()]
        return "\n".join([f"Names for --{key}, besides Lightning's own:", *names, "",
                          "Classes, for full control; the options of each:", *classes, ""])  # fmt: skip
    return "".join(_options(kind, f"{key}.{argument}") for argument, kind in _option_classes(strategy))


def _option_classes(strategy: type[Strategy]) -> Iterator[tuple[str, type]]:
    """The constructor's arguments that take a dataclass, with that dataclass."""
    for argument, hint in get_type_hints(strategy.__init__).items():
        for kind in (hint, *get_args(hint)):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                yield argument, kind


def _options(kind: type, key: str) -> str:
    parser = ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_class_arguments(kind, key)
    return "\n" + parser.format_help().lstrip("\n")

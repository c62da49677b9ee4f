"""A user's DeepSpeed settings with ours put under or over them, by dotted key; two that differ are an error."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

Config = dict[str, Any]

AUTO = "auto"
"""What a config says where the value is the Trainer's or the strategy's to fill in."""

_MISSING = object()


class Merge:
    """A copy of the user's settings that grows into the engine's configuration.

    Args:
        user: The user's settings; not changed.

    """

    def __init__(self, user: Mapping[str, Any]) -> None:
        self.config: Config = copy.deepcopy(dict(user))

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key, or ``default``."""
        node: Any = self.config
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    def set(self, key: str, value: Any) -> None:
        """Put ``value`` at a dotted key.

        Raises:
            MisconfigurationException: If the user has something else than a mapping on the way.

        """
        *parents, last = key.split(".")
        node = self.config
        for depth, part in enumerate(parents):
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise MisconfigurationException(
                    f"The DeepSpeed config's {'.'.join(parents[: depth + 1])!r} must be a mapping of settings, got"
                    f" {child!r}."
                )
            node = child
        node[last] = value

    def pop(self, key: str) -> Any:
        """Take a dotted key out; its value, or ``None``."""
        *parents, last = key.split(".")
        node = self.get(".".join(parents)) if parents else self.config
        return node.pop(last, None) if isinstance(node, dict) else None

    def default(self, key: str, value: Any) -> None:
        """Use ``value`` where the user says nothing or ``"auto"``."""
        if self.get(key, AUTO) == AUTO:
            self.set(key, value)

    def own(self, key: str, value: Any, owner: str) -> None:
        """Let ``owner`` decide ``key``.

        Raises:
            MisconfigurationException: If the user sets another value; it names both.

        """
        theirs = self.get(key, AUTO)
        if theirs != AUTO and theirs != value:
            raise MisconfigurationException(
                f"The DeepSpeed config sets {key}={theirs!r}, but {owner} says {value!r}. Set it in one place, or give"
                " both the same value."
            )
        self.set(key, value)

    def argument(self, key: str, value: Any, owner: str, default: Any = _MISSING) -> None:
        """Let an argument decide when it is given, else the user's config, else ``default``."""
        if value is not None:
            self.own(key, value, f"ZeROStrategy({owner}=...)")
        elif default is not _MISSING:
            self.default(key, default)

    def fill(self, key: str, value: Any) -> None:
        """Put ``value``, where it is known, in the place of an ``"auto"``."""
        if self.get(key) == AUTO and value is not None:
            self.set(key, value)

    def refuse_left_over_auto(self) -> None:
        """Refuse what is still ``"auto"``.

        Raises:
            MisconfigurationException: Naming the key.

        """
        for key, value in _leaves(self.config):
            if isinstance(value, str) and value == AUTO:
                section = key.split(".")[0]
                own = f", or take {section!r} out and return it from `configure_optimizers`"
                raise MisconfigurationException(
                    f"The DeepSpeed config sets {key}='auto', but neither the Trainer nor the model knows a value for"
                    f" it. Write the value{own if section in ('optimizer', 'scheduler') else ''}."
                )


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

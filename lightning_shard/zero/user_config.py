"""The user's own DeepSpeed settings: read from where they are, spelt as the engine spells them, and no typo ignored."""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard import _compat
from lightning_shard.zero.merge import Config, Merge

CONFIG_VARIABLE = "PL_DEEPSPEED_CONFIG_PATH"
"""Where Lightning looks for the path of a config when none is given."""


def read_config(source: Mapping[str, Any] | str | Path | None) -> Config:
    """The settings in a mapping, in a JSON file, or in the file that ``PL_DEEPSPEED_CONFIG_PATH`` names.

    Args:
        source: A mapping, the path of a JSON file, or ``None`` to ask the environment.

    Returns:
        The settings, empty where there are none. A mapping's values are shared with the caller.

    Raises:
        MisconfigurationException: If there is no such file, or it holds no JSON mapping; it names the path.

    """
    origin = "ZeROStrategy(config=...)"
    if source is None:
        source = os.environ.get(CONFIG_VARIABLE)
        origin = f"the environment variable {CONFIG_VARIABLE}"
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, Path)):
        raise MisconfigurationException(
            f"ZeROStrategy(config={source!r}): a mapping of DeepSpeed settings or the path of a JSON file is needed."
        )
    if not Path(source).is_file():
        problem = "is a folder, not a JSON file" if Path(source).is_dir() else "does not exist"
        raise MisconfigurationException(f"The DeepSpeed config '{source}' {problem}. Correct the path in {origin}.")
    try:
        settings = json.loads(Path(source).read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except ValueError as error:
        raise MisconfigurationException(f"The DeepSpeed config '{source}' is not valid JSON: {error}.") from error
    if not isinstance(settings, dict):
        raise MisconfigurationException(
            f"The DeepSpeed config '{source}' holds a {type(settings).__name__}, not a mapping of settings: it must"
            ' look like {"zero_optimization": {...}, ...}.'
        )
    return settings


def _unique(pairs: list[tuple[str, Any]]) -> Config:
    settings = dict(pairs)
    if len(settings) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return settings


def spell_as_engine(merged: Merge) -> None:
    """Bring keys that DeepSpeed knows under two names to the one that the rest of this package uses.

    Raises:
        MisconfigurationException: If a key is deprecated, or given under both names.

    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    _rename(merged.config, "bfloat16", "bf16")
    zero = merged.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    for name, field in DeepSpeedZeroConfig.model_fields.items():
        extra = field.json_schema_extra or {}
        if name in zero and extra.get("deprecated"):
            new = extra.get("new_param")
            raise MisconfigurationException(
                f"The DeepSpeed config's zero_optimization.{name}={zero[name]!r} is deprecated by DeepSpeed: use {new}"
                f" in its place{_offload_remedy(str(new))}."
            )
        if field.alias:
            _rename(zero, name, field.alias)


def _offload_remedy(new: str) -> str:
    return ", for example {'device': 'cpu'}, or the argument offload=Offload(...)" if "offload" in new else ""


def _rename(settings: Config, old: str, new: str) -> None:
    if old in settings:
        if new in settings:
            raise MisconfigurationException(
                f"The DeepSpeed config sets {old!r} and {new!r}, which are two names of one setting. Take one out."
            )
        settings[new] = settings.pop(old)


def check_with_engine(config: Config) -> None:
    """Let DeepSpeed read the complete configuration before anything is built, and refuse what it does not know.

    The engine ignores a key that it does not know, so that a misspelt one would be lost without a word. Which keys it
    knows is seen from what it asks for.

    Raises:
        MisconfigurationException: If a key is unknown, with the nearest known one, or a value is refused by DeepSpeed.

    """
    with _compat.quiet_engine_import():
        from deepspeed import DeepSpeedConfig
        from pydantic import ValidationError

    asked = _AskedFor(config)
    try:
        with _quiet_engine():
            DeepSpeedConfig(asked)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = _place(config, first["loc"]) or error.title
        if first["type"] == "extra_forbidden":
            raise _unknown(place, _fields(error.title, first["loc"][:-1])) from None
        raise MisconfigurationException(
            f"DeepSpeed refuses its config's {place}={first['input']!r}: {first['msg']}."
        ) from None
    except Exception as error:
        raise MisconfigurationException(f"DeepSpeed refuses its config: {error}") from error
    for key in config:
        if key not in asked.keys_asked:
            raise _unknown(key, asked.keys_asked)


def _unknown(key: str, known: Iterable[str]) -> MisconfigurationException:
    *parents, last = key.split(".")
    nearest = get_close_matches(last, sorted(known), n=1)
    hint = f"Did you mean {'.'.join([*parents, nearest[0]])!r}?" if nearest else "Take it out."
    return MisconfigurationException(
        f"The DeepSpeed config's {key!r} is no setting that DeepSpeed knows, and it would be ignored. {hint}"
    )


class _AskedFor(dict[str, Any]):
    """A mapping that remembers which keys somebody has looked for, present or not."""

    def __init__(self, settings: Config) -> None:
        super().__init__(settings)
        self.keys_asked: set[str] = set()

    def __copy__(self) -> "_AskedFor":
        return self

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        # `key in settings.keys()` is a question too.
        return self


def _place(config: Config, loc: tuple[Any, ...]) -> str | None:
    """The dotted key of what a validator calls ``loc`` inside one of the sections."""
    for section, settings in config.items():
        node: Any = settings
        for part in loc:
            node = node.get(part, _place) if isinstance(node, Mapping) else _place
        if loc and node is not _place:
            return ".".join([section, *map(str, loc)])
    return None


def _fields(title: str, loc: tuple[Any, ...]) -> list[str]:
    """The keys that the section ``loc`` inside DeepSpeed's model ``title`` may have, without deprecated ones."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    model: Any = next(entry for entry in DeepSpeedConfigModel.__subclasses__() if entry.__name__ == title)
    for part in loc:
        annotation = model.model_fields[part].annotation
        model = next(entry for entry in (annotation, *get_args(annotation)) if hasattr(entry, "model_fields"))
    return [
        field.alias or name
        for name, field in model.model_fields.items()
        if not (field.json_schema_extra or {}).get("deprecated")
    ]


@contextmanager
def _quiet_engine() -> Iterator[None]:
    """The engine reads the same configuration again when it starts, and says then what it has to say."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)

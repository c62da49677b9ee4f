"""``fit``, ``validate``, ``test`` and ``predict``: LightningCLI with our names and classes.

Everything is LightningCLI's own; what is added is the wording of mistakes (see ``messages.py``) and the help pages of
the strategies (see ``help.py``).
"""

import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy

from lightning_shard.registry import available_names, nearest_name, strategy_classes
from lightning_shard_cli.errors import CommandError, nearest
from lightning_shard_cli.help import strategy_help
from lightning_shard_cli.messages import class_names, one_line

# Options are documented by docstrings under dataclass fields; the parser reads those only when told to.
set_parsing_settings(docstring_parse_attribute_docstrings=True)

# A class can be given by its bare name, which the parser looks up among the classes that are imported.
strategy_classes()


def run(arguments: list[str]) -> None:
    """Run one of Lightning's subcommands.

    Args:
        arguments: The subcommand's name and its options.

    Raises:
        CommandError: For a mistake in the options or files, or a setting that is refused before the first step.

    """
    progress = Progress()
    try:
        ShardCLI(progress, args=arguments)
    except Exception as error:
        if (message := refusal(error, progress)) is None:
            raise
        raise CommandError(message) from error


class Progress(Callback):
    """How far the run has come: a refusal can only come before the first step, a crash at any time."""

    def __init__(self) -> None:
        self.built = False
        self.stepping = False

    def _step(self, *_: Any, **__: Any) -> None:
        self.stepping = True

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _step


class Parser(LightningArgumentParser):
    """Lightning's parser, except that a mistake is one line, and that a strategy's help shows all of its options."""

    def __init__(self, *args: Any, prog: str = "lightning-shard", **kwargs: Any) -> None:
        super().__init__(*args, prog=prog, **kwargs)
        self.options: Callable[[], list[str]] = list
        self._strategy_key: tuple[type[Strategy], str] | None = None

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the mistake as one line; where the parser is only trying a type, leave its report whole."""
        if not self.exit_on_error:
            super().error(message, ex)
        raise CommandError(one_line(message, self.options())) from ex

    def add_class_arguments(self, theclass: type, nested_key: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Add a class's options, and remember a strategy's key for its help page."""
        if nested_key and issubclass(theclass, Strategy):
            self._strategy_key = theclass, nested_key
        return super().add_class_arguments(theclass, nested_key, *args, **kwargs)

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """The help page; that of a strategy ends with what ``strategy_help`` adds."""
        page = super().format_help(*args, **kwargs)
        if self._strategy_key is None:
            return page
        strategy, key = self._strategy_key
        return strategy_help(strategy, key) if strategy is Strategy else page + strategy_help(strategy, key)


class ShardCLI(LightningCLI):
    """LightningCLI that finds a user's mistakes before it builds anything."""

    def __init__(self, progress: Progress, **kwargs: Any) -> None:
        self.progress = progress
        self.subparsers: list[Parser] = []
        super().__init__(trainer_defaults={"callbacks": progress}, parser_class=Parser, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add nothing; remember the subcommand's parser."""
        assert isinstance(parser, Parser)
        self.subparsers.append(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, then check what the parser cannot: files' syntax, a strategy's name, a checkpoint's path."""
        assert isinstance(args, list)
        for parser_ in (parser, *self.subparsers):
            assert isinstance(parser_, Parser)
            parser_.options = self._options
        for path in _config_files(args):
            check_yaml(path)
        self.config = parser.parse_args(args)
        settings = self.config[self.config["subcommand"]]
        check_strategy(settings["trainer"]["strategy"])
        check_checkpoint(settings.get("ckpt_path"))

    def after_instantiate_classes(self) -> None:
        """From here on, an error of the user's own code is a crash."""
        self.progress.built = True

    def _options(self) -> list[str]:
        return sorted({key for parser in self.subparsers for key in parser.get_defaults().keys()})  # noqa: SIM118 - no dict


def _config_files(args: list[str]) -> list[Path]:
    """Files given with ``--config`` or ``-c`` that exist (the parser itself names those that do not)."""
    given = [after for before, after in pairwise(args) if before in ("--config", "-c")]
    given += [arg.partition("=")[2] for arg in args if arg.startswith("--config=")]
    return [Path(path) for path in given if Path(path).is_file()]


def check_yaml(path: Path) -> None:
    """Refuse a file that is not YAML, with its name and the place."""
    try:
        yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise CommandError(f"{path}{place}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: not valid YAML: {error}") from error


def check_strategy(strategy: Any) -> None:
    """Refuse a strategy's name that nobody registered, with the nearest that somebody did."""
    if not isinstance(strategy, str) or strategy.lower() in ("auto", *available_names()):
        return
    near = nearest_name(strategy)
    hint = f"; did you mean {near!r}?" if near else nearest(strategy.rpartition(".")[2], class_names(Strategy))
    hint = hint or "; --trainer.strategy.help lists the names"
    raise CommandError(f"--trainer.strategy: no strategy {strategy!r}{hint}")


def check_checkpoint(path: str | None) -> None:
    """Refuse a checkpoint that is not there."""
    if path is None or path in ("best", "last", "hpc", "registry") or ":" in path or Path(path).exists():
        return
    raise CommandError(f"--ckpt_path: no checkpoint at {path!r}")


def refusal(error: Exception, progress: Progress) -> str | None:
    """The text of an error that is about the user's settings; ``None`` for a crash, whose traceback is wanted.

    Before all classes are built, that is every error by which constructors reject a value. After that, and before the
    first step, it is what Lightning calls a misconfiguration, and what this package's own code refuses.
    """
    if progress.stepping:
        return None
    text, cause = str(error), error
    if text.startswith("Does not validate against"):
        # The parser's report on all members of a union type, around what a constructor raised.
        text = one_line(text, ())
        while isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
    frames = list(traceback.walk_tb(cause.__traceback__))
    module = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    package = module.partition(".")[0]
    if isinstance(cause, CommandError | MisconfigurationException):
        refused = True
    elif progress.built:
        # A RuntimeError of LightningCLI itself: the config.yaml of another run is in the way.
        refused = (package == "lightning_shard" and isinstance(cause, ValueError | OSError | ImportError)) or (
            module == "lightning.pytorch.cli" and isinstance(cause, RuntimeError)
        )
    else:
        kinds = ValueError | OSError | ImportError
        refused = isinstance(cause, kinds) or package in ("lightning", "lightning_shard", "jsonargparse")
    return text if refused else None

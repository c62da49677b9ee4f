"""The command's front door: the table of subcommands and the short help page.

A user's mistake is one line and exit code 2, whatever the subcommand. Nothing heavy is imported before the subcommand
is known, so the help page is instant.
"""

import os
import sys
from dataclasses import dataclass
from importlib import import_module

from lightning_shard_cli.errors import CommandError, nearest, report


@dataclass(frozen=True, kw_only=True)
class Subcommand:
    """One row of the help page."""

    module: str
    """The module whose ``run(arguments: list[str]) -> None`` does the work; ``arguments`` begin with the subcommand."""

    summary: str
    """One line for the help page."""


SUBCOMMANDS: dict[str, Subcommand] = {
    "fit": Subcommand(module="lightning_shard_cli.training", summary="train a LightningModule"),
    "validate": Subcommand(module="lightning_shard_cli.training", summary="run its validation loop"),
    "test": Subcommand(module="lightning_shard_cli.training", summary="run its test loop"),
    "predict": Subcommand(module="lightning_shard_cli.training", summary="run its predict loop"),
    "plan": Subcommand(module="lightning_shard_cli.plan", summary="say what every strategy costs, before the run"),
    "convert": Subcommand(module="lightning_shard_cli.convert", summary="write a checkpoint in another format"),
    "inspect": Subcommand(module="lightning_shard_cli.inspect", summary="say what a checkpoint holds"),
}

HELP = """\
lightning-shard: every LightningModule parallel by one word

usage: lightning-shard SUBCOMMAND [options]

subcommands:
{subcommands}

  lightning-shard fit --config configs/zero3_offload.yaml
  lightning-shard fit --model my_module.MyModel --trainer.strategy zero3_offload --trainer.devices 8
  lightning-shard fit --config my.yaml --print_config        every setting and its value, as YAML
  lightning-shard fit --trainer.strategy.help                the strategies
  lightning-shard fit --trainer.strategy.help=ZeROStrategy   the options of one, each explained
  lightning-shard plan --params 7e9 --devices 8              what each strategy costs, before the run
  lightning-shard convert last.ckpt model.safetensors        a checkpoint of any kind in another format
  lightning-shard inspect last.ckpt                          who wrote it and what it holds
  lightning-shard SUBCOMMAND --help                          all options of a subcommand
  lightning-shard --version
Modules are looked up from the current folder first. LIGHTNING_SHARD_TRACEBACK=1 shows the traceback behind a message.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments after the program's name; ``None`` takes those of the process. Lightning's subprocess
            launcher starts the other ranks with the arguments *of the process*, so a list of your own goes with
            one device or with ranks that were started from outside.

    Returns:
        The exit code: 0 when all went well, 2 for a user's mistake, told in one line on standard error.

    """
    parent = os.getppid()
    arguments = sys.argv[1:] if argv is None else argv
    # A console script starts with its own folder on the module path; `python -m` with the current one. Be the same.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        _dispatch(arguments)
    except CommandError as error:
        if os.environ.get("LIGHTNING_SHARD_TRACEBACK", "0") not in ("", "0"):
            raise
        report(str(error), parent=parent)
        return 2
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _dispatch(arguments: list[str]) -> None:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        width = max(map(len, SUBCOMMANDS))
        rows = "\n".join(f"  {key:<{width}}  {row.summary}" for key, row in SUBCOMMANDS.items())
        print(HELP.format(subcommands=rows), end="")
    elif name == "--version":
        from lightning_shard import __version__

        print(f"lightning-shard {__version__}")
    elif name in SUBCOMMANDS:
        import_module(SUBCOMMANDS[name].module).run(arguments)
    elif name.startswith("-"):
        raise CommandError(f"the subcommand comes first: lightning-shard {{{','.join(SUBCOMMANDS)}}} {name} ...")
    else:
        raise CommandError(f"no subcommand {name!r}{nearest(name, SUBCOMMANDS, among='choose from')}")


if __name__ == "__main__":
    sys.exit(main())

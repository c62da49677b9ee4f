"""``lightning-shard inspect``: what a checkpoint holds."""

import dataclasses
import json

from lightning_shard_cli.checkpoints import Parser, mistakes_in_one_line


def run(arguments: list[str]) -> None:
    """Print what a checkpoint holds.

    Args:
        arguments: Those of the command, the subcommand first.

    Raises:
        CommandError: If they are wrong, or there is no checkpoint.

    """
    parser = Parser(
        prog="lightning-shard inspect",
        description="Print who wrote a checkpoint, and names, shapes, dtypes and sizes of what it holds. No tensor is"
        " read, and no code of the checkpoint's is run.",
    )
    parser.add_argument("source", metavar="SRC", help="a checkpoint: folder or file")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    given = parser.parse_args(arguments[1:])
    with mistakes_in_one_line():
        from lightning_shard.checkpoint.inspect import inspect

        found = inspect(given.source)
    if given.json:
        totals = {"elements": found.elements, "weight_bytes": found.weight_bytes, "bytes": found.bytes}
        print(json.dumps({**dataclasses.asdict(found), **totals}, indent=1, default=str))
    else:
        print(found)

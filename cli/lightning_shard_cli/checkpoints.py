"""What the subcommands about checkpoints share: a parser whose complaints are one line."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lightning_shard_cli.errors import CommandError


class Parser(argparse.ArgumentParser):
    """Tells of mistakes by a `CommandError`."""

    def error(self, message: str) -> NoReturn:
        """Complain."""
        raise CommandError(f"{message} (see {self.prog} --help)")


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """Turn what can be wrong with a checkpoint or a path into a `CommandError`.

    Raises:
        SystemExit: With 130 if the user stops it; what was being written is removed then.

    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    try:
        yield
    except (MisconfigurationException, ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None

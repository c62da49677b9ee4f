"""A user's mistake as one readable line, told once for all ranks."""

import os
import sys
import time
from collections.abc import Iterable
from difflib import get_close_matches


class CommandError(Exception):
    """A mistake in the command line, a configuration file or the settings in them; its text is the whole message."""


def nearest(given: str, choices: Iterable[str], *, prefix: str = "", among: str = "") -> str:
    """The end of a message about a misspelt word.

    Args:
        given: The word that is not a choice.
        choices: The words that are.
        prefix: What to write before the closest choice, such as the dashes of an option.
        among: What to say before the whole list when no choice is close; ``""`` says nothing then.

    Returns:
        ``"; did you mean 'fit'?"`` with the closest choice, upper and lower case being equal; else
        ``"; <among> a, b, c"``, or ``""`` where ``among`` is empty.

    """
    by_lower = {choice.lower(): choice for choice in choices}
    matches = get_close_matches(given.lower(), by_lower, n=1, cutoff=0.6)
    if matches:
        return f"; did you mean '{prefix}{by_lower[matches[0]]}'?"
    return f"; {among} {', '.join(by_lower.values())}" if among else ""


def report(message: str, *, parent: int, patience: float = 5.0) -> None:
    """Write ``message`` as one line to standard error; of several ranks that fail alike, only the first speaks.

    A rank other than 0 cannot know whether rank 0 has met the same mistake. It waits: when rank 0 leaves, so does the
    process that started them both (Lightning's launcher *is* rank 0; torchrun ends the others), and all is said. When
    nothing happens the mistake is this rank's own, and it speaks for itself.

    Args:
        message: Any text; line breaks and runs of blanks become one blank.
        parent: Process id of this process's parent when the command began.
        patience: How long another rank than 0 waits, in seconds.

    """
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_PROCID") or "0"
    prefix = "lightning-shard: error: "
    if rank != "0":
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if os.getppid() != parent:
                return
            time.sleep(0.05)
        prefix += f"rank {rank}: "
    print(prefix + " ".join(message.split()), file=sys.stderr, flush=True)

"""What checkpoints cost: saves and loads against bare torch, async saves against sync ones, and the memory of convert.

Each part has a file of its own, which says how it measures: ``checkpoint_against_torch.py``, ``checkpoint_async.py``,
``checkpoint_convert.py``.

    python benchmarks/checkpoint.py                         # all: some minutes
    python benchmarks/checkpoint.py --parts async --json    # one part, as JSON
    python benchmarks/checkpoint.py --quick                 # only to see that it runs: seconds
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

# As a script this file is in no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import checkpoint_against_torch, checkpoint_async, checkpoint_convert
from benchmarks.turns import Size, parse_options, show

SIZES = {"150 MB": Size(layers=24, width=256, rows=16), "300 MB": Size(layers=24, width=360, rows=16)}
QUICK = {"quick": Size(layers=2, width=32, rows=8)}


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["save", "async", "convert"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="what to measure")
    options, warm_up = parse_options(parser, arguments, pairs=24)
    sizes = list((QUICK if options.quick else SIZES).values())
    results: dict[str, tuple[Iterator[Any], dict[str, Callable[[Any], str]]]] = {
        "save": (
            chain.from_iterable(checkpoint_against_torch.compare(size, warm_up, options.pairs) for size in sizes),
            checkpoint_against_torch.COLUMNS,
        ),
        "async": (
            (checkpoint_async.compare(size, max(2, options.pairs // 6)) for size in sizes[:1]),
            checkpoint_async.COLUMNS,
        ),
        "convert": (checkpoint_convert.measure(options.quick), checkpoint_convert.COLUMNS),
    }
    if options.json:
        found = {part: [asdict(result) for result in results[part][0]] for part in options.parts}
        print(json.dumps(found, indent=2))
        return
    for part in options.parts:
        print(f"\n{part}\n")
        show(*results[part], as_json=False)


if __name__ == "__main__":
    main()

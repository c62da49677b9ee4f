"""``python -m lightning_shard_cli`` is the command ``lightning-shard``."""

import sys

from lightning_shard_cli.main import main

if __name__ == "__main__":
    sys.exit(main())

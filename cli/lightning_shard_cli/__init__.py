"""The ``lightning-shard`` command. Thin: what it does lives in ``lightning_shard``."""

"""What the server of :mod:`lightning_shard._pool` imports once, so that every rank forked from it starts warm.

Importing this module is the work: about five seconds, paid once per test session. Nothing here may start a thread or
touch a GPU, for neither survives a fork.
"""

import contextlib
import gc
import importlib
import logging

MODULES = (
    "lightning.pytorch",
    "lightning_shard",
    "lightning_shard.strategies.fsdp",
    "lightning_shard.strategies.zero",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "deepspeed",
    # The engine imports these at its first ``initialize``: with them, some 600 modules of the torch compiler (1.5 s).
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    # A test file imports it.
    "pytest",
)

gc.disable()
logging.disable(logging.WARNING)
for _name in MODULES:
    # A module that is not installed, or that a later release moved, costs a rank that needs it time and nothing else;
    # one that fails to import fails again in that rank, where the error is seen.
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
logging.disable(logging.NOTSET)
gc.enable()

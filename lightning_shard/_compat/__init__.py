"""The only room that touches private API of torch, Lightning or DeepSpeed. Each use says why it is needed.

When one of these libraries moves something, this is the room to mend.
"""

from torch.distributed.constants import default_pg_timeout

from lightning_shard._compat.gradients import (
    before_reduction,
    begin_backward,
    clear_stale_gradients,
    discard_at_zero_grad,
    forget_gradients,
    skipped_step,
)
from lightning_shard._compat.lightning import (
    StrategyRegistryType,
    format_precision_config,
    init_optimizers_and_lr_schedulers,
    is_mock_optimizer,
    train_batch_size_per_rank,
    validate_device_index_selection,
)
from lightning_shard._compat.nvme import gather_persistent, keep_gradients_in_memory, swapped_in
from lightning_shard._compat.ops import load_op, op_build_directory, op_is_loaded
from lightning_shard._compat.partitions import (
    adagrad_left_alone,
    adopt_parameter,
    flat_partitions,
    inner_optimizer,
    is_empty_partitioned,
    link_optimizer_states,
    own_elements,
    partition_groups,
    partition_process_group,
    pretend_stepped,
    set_clipping,
    state_for_partitions,
    versions,
    without_step_wrapper,
)
from lightning_shard._compat.process import (
    end_training,
    is_compiled,
    quiet_engine_import,
    remove_engine_hooks,
    restore_linear,
    scalars_as_bytes,
    set_engine_device,
    without_shm_op,
)

__all__ = [
    "StrategyRegistryType",
    "adagrad_left_alone",
    "adopt_parameter",
    "before_reduction",
    "begin_backward",
    "clear_stale_gradients",
    "default_pg_timeout",
    "discard_at_zero_grad",
    "end_training",
    "flat_partitions",
    "forget_gradients",
    "format_precision_config",
    "gather_persistent",
    "init_optimizers_and_lr_schedulers",
    "inner_optimizer",
    "is_compiled",
    "is_empty_partitioned",
    "is_mock_optimizer",
    "keep_gradients_in_memory",
    "link_optimizer_states",
    "load_op",
    "op_build_directory",
    "op_is_loaded",
    "own_elements",
    "partition_groups",
    "partition_process_group",
    "pretend_stepped",
    "quiet_engine_import",
    "remove_engine_hooks",
    "restore_linear",
    "scalars_as_bytes",
    "set_clipping",
    "set_engine_device",
    "skipped_step",
    "state_for_partitions",
    "swapped_in",
    "train_batch_size_per_rank",
    "validate_device_index_selection",
    "versions",
    "without_shm_op",
    "without_step_wrapper",
]

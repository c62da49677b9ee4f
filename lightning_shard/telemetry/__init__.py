"""What a run really holds and moves, measured while it runs."""

from lightning_shard.telemetry.allocator import AllocatorTracker, PhaseBytes, track_allocator
from lightning_shard.telemetry.memory import (
    Bytes,
    ExpectedModelStates,
    ModelStateBytes,
    expected_model_state_bytes,
    gather_model_state_bytes,
    model_state_bytes,
)
from lightning_shard.telemetry.report import model_state_table

__all__ = [
    "AllocatorTracker",
    "Bytes",
    "ExpectedModelStates",
    "ModelStateBytes",
    "PhaseBytes",
    "expected_model_state_bytes",
    "gather_model_state_bytes",
    "model_state_bytes",
    "model_state_table",
    "track_allocator",
]

"""What a step logs for microbatches comes out as one value for the batch."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_shard.pipeline.logs import LogRecorder


def merged(logged: list[tuple[float, dict[str, Any]]], rows: list[int], recorder: LogRecorder | None = None) -> Any:
    module = pl.LightningModule()
    recorder = recorder or LogRecorder(module)
    with recorder.recording():
        for number, (value, kwargs) in enumerate(logged):
            recorder.begin(number)
            recorder._record("name", value, **kwargs)
    weights = [count / sum(rows) for count in rows]
    ((_, value, kwargs),) = recorder.merged(weights, rows)
    return float(value), kwargs.get("batch_size")


def test_a_mean_is_weighted_by_rows_and_other_reductions_are_what_they_say() -> None:
    values = [1.0, 4.0]
    expected = {None: 2.0, "mean": 2.0, "sum": 5.0, "max": 4.0, "min": 1.0, torch.sum: 5.0}
    for reduce_fx, result in expected.items():
        kwargs = {} if reduce_fx is None else {"reduce_fx": reduce_fx}
        found, size = merged([(value, kwargs) for value in values], [4, 2])
        assert found == pytest.approx(result) and size is None, reduce_fx


def test_rows_that_are_given_as_batch_size_add_up_and_a_constant_stays() -> None:
    assert merged([(1.0, {"batch_size": 2}), (4.0, {"batch_size": 1})], [2, 1]) == (pytest.approx(2.0), 3)
    assert merged([(1.0, {"batch_size": 1}), (4.0, {"batch_size": 1})], [2, 2]) == (pytest.approx(2.5), 1)
    # Counts of something else than rows weigh the values.
    assert merged([(1.0, {"batch_size": 10}), (4.0, {"batch_size": 5})], [2, 2]) == (pytest.approx(2.0), 15)


def test_a_constant_is_known_from_earlier_batches_where_microbatches_have_one_row() -> None:
    ones = [(1.0, {"batch_size": 1}), (3.0, {"batch_size": 1})]
    recorder = LogRecorder(pl.LightningModule())
    assert merged(ones, [4, 2], recorder)[1] == 1
    assert merged(ones, [1, 1], recorder)[1] == 1
    assert merged(ones, [1, 1])[1] == 2


def test_other_names_in_other_microbatches_are_refused() -> None:
    recorder = LogRecorder(pl.LightningModule())
    with recorder.recording():
        recorder.begin(0)
        recorder._record("one", 1.0)
        recorder.begin(1)
        with pytest.raises(RuntimeError, match="logged 'one' for one microbatch and 'other'"):
            recorder._record("other", 1.0)

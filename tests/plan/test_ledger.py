"""The ledger: what is allocated and freed, when, and of what kind."""

import torch

from lightning_shard.plan.ledger import START, Ledger, peak
from lightning_shard.plan.results import Memory

SIZE = 4 * 1000  # bytes of a tensor of 1000 fp32


def test_the_peak_is_what_lives_at_once() -> None:
    with Ledger() as ledger:
        ledger.begin_step()
        first = torch.empty(1000)
        second = torch.empty(2000)
        del first
        third = torch.empty(500)
    assert peak(ledger.moments()[START]).total == 3 * SIZE
    assert ledger.held().total == 2.5 * SIZE
    del second, third


def test_views_and_in_place_results_are_no_memory_of_their_own() -> None:
    with Ledger() as ledger:
        ledger.begin_step()
        base = torch.zeros(1000)
        kept = [base.view(10, 100), base[5:], base.add_(1)]
    assert peak(ledger.moments()[START]).total == SIZE
    del kept


def test_sizes_are_rounded_as_an_allocator_does() -> None:
    with Ledger(granularity=512) as ledger:
        ledger.begin_step()
        kept = torch.empty(1), torch.empty(128), torch.empty(129)
    assert peak(ledger.moments()[START]).total == 512 + 512 + 1024
    del kept


def test_resized_storages_are_followed() -> None:
    with Ledger() as ledger:
        tensor = torch.empty(1000)
        ledger.begin_step()
        tensor.untyped_storage().resize_(0)
        ledger.mark("empty")
        other = torch.empty(10)
        tensor.untyped_storage().resize_(2 * SIZE)
        ledger.mark("full")
    peaks = {segment: peak(moments) for segment, moments in ledger.moments().items()}
    assert peaks["empty"].total == 2 * SIZE + 40 and peaks[START].total == SIZE
    assert peaks["full"].total == 2 * SIZE + 40
    del other


def test_kinds_are_told_by_what_becomes_of_a_tensor() -> None:
    """Forward keeps for backward what backward frees; what it drops at once is temporary."""
    weight = torch.ones(1000, requires_grad=True)
    with Ledger() as ledger:
        ledger.declare([weight], "parameters")
        ledger.begin_step()
        squared = weight.exp()  # saved for its own backward
        (squared * 2).sum().backward()  # the product is not saved
        del squared
        ledger.mark("after")
        ledger.declare([weight.grad], "gradients")
        last = torch.empty(1)
    peaks = {segment: peak(moments) for segment, moments in ledger.moments().items()}
    before, after = peaks[START], peaks["after"]
    assert before.parameters == SIZE and before.activations + before.temporaries >= 2 * SIZE
    assert after == Memory(parameters=SIZE, gradients=SIZE, temporaries=4)
    del last


def test_what_was_there_before_counts_when_it_is_declared() -> None:
    old = torch.empty(1000)
    with Ledger() as ledger:
        ledger.declare([old], "buffers")
        ledger.begin_step()
        new = torch.empty(1)
    assert peak(ledger.moments()[START]) == Memory(buffers=SIZE, temporaries=4)
    del new


def test_collectives_are_counted_by_the_same_mode() -> None:
    with Ledger() as ledger:
        torch.empty(1)
    assert ledger.traffic.payload == 0

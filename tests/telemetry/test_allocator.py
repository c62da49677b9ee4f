"""The allocator's bytes: known blocks, all threads, and runs whose bytes must balance.

Each test runs in fresh processes, because the counter is the process's and stays on.
"""

import itertools
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_shard.telemetry import track_allocator
from lightning_shard.testing import run_distributed

pytestmark = pytest.mark.ranks

KIB = 1024


def block(kib):
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_known_blocks_are_counted_to_the_byte():
    def job():
        with track_allocator() as allocator:
            old = block(100)
            with allocator.phase("grow") as grow:
                kept = block(10)
                big = block(50)
                del big
                small = block(7)
                del small
            with allocator.phase("shrink") as shrink:
                del kept, old
                third = block(3)  # noqa: F841
            return grow.bytes, shrink.bytes, allocator.live_bytes, [phase.name for phase in allocator.phases]

    ((grow, shrink, live, names),) = run_distributed(job, 1)
    assert (grow.start_bytes, grow.peak_bytes, grow.left_bytes) == (100 * KIB, 60 * KIB, 10 * KIB)
    assert grow.allocations == 3
    assert (shrink.start_bytes, shrink.peak_bytes, shrink.left_bytes) == (110 * KIB, 0, -107 * KIB)
    assert live == 3 * KIB
    assert names == ["grow", "shrink"]


def test_what_an_operator_takes_for_itself_is_part_of_the_peak():
    def job():
        with track_allocator() as allocator:
            x = torch.randn(256, KIB)
            with allocator.phase("sort") as phase:
                x.sum(0).sort()
            return phase.bytes

    (phase,) = run_distributed(job, 1)
    results = KIB * (4 + 4 + 8)  # the sum, the sorted values and their indices
    assert phase.peak_bytes > results
    assert phase.left_bytes == 0


def test_other_threads_are_part_of_the_totals():
    def job():
        held = []
        with track_allocator() as allocator:
            mine = [block(40)]
            with allocator.phase("exchange") as phase:
                for work in (lambda: held.append(block(20)), mine.clear):
                    thread = threading.Thread(target=work)
                    thread.start()
                    thread.join()
                    block(1)
            return phase.bytes

    (phase,) = run_distributed(job, 1)
    assert (phase.start_bytes, phase.peak_bytes, phase.left_bytes) == (40 * KIB, 21 * KIB, -20 * KIB)


def test_a_second_tracker_starts_at_nought_and_still_sees_the_end_of_older_blocks():
    def job():
        with track_allocator():
            older = block(30)
        between = block(5)
        with track_allocator() as allocator:
            with allocator.phase("end") as phase:
                del older, between
            return phase.bytes

    (phase,) = run_distributed(job, 1)
    assert (phase.start_bytes, phase.left_bytes) == (0, -35 * KIB)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gloo_buffers_are_seen_and_their_end_too(ranks):
    def job():
        dist.init_process_group("gloo")
        with track_allocator() as allocator:
            whole, part = torch.ones(ranks * 64 * KIB), torch.empty(64 * KIB)
            phases = []
            for _ in range(20):
                with allocator.phase("collectives") as phase:
                    dist.reduce_scatter_tensor(part, whole)
                    dist.all_gather_into_tensor(whole, part)
                phases.append(phase.bytes)
            return phases, settled(allocator, 4 * (ranks + 1) * 64 * KIB)

    for phases, live in run_distributed(job, ranks):
        assert live == 4 * (ranks + 1) * 64 * KIB  # 20 times all that gloo took came back
        buffer = 4 * ranks * 64 * KIB
        # Both collectives work on a copy of the whole. The first one's goes late if its thread gets no time.
        peaks = [phase.start_bytes + phase.peak_bytes - live for phase in phases]
        assert min(peaks) == buffer
        assert max(peaks) <= 2 * buffer


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_of_a_sharded_module_balance(ranks):
    """After any number of steps exactly the parameters and the optimizer's states are alive."""

    def job():
        mesh = init_device_mesh("cpu", (ranks,))  # it holds tensors of its own
        with track_allocator() as allocator:
            module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
            for layer in module:
                fully_shard(layer, mesh=mesh)
            fully_shard(module, mesh=mesh)
            optimizer = torch.optim.AdamW(module.parameters())

            def step():
                module(torch.ones(8, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            phases = []
            for _ in range(8):
                with allocator.phase("step") as phase:
                    step()
                phases.append(phase.bytes)
            kept = [parameter.to_local() for parameter in module.parameters()]
            kept += [
                value.to_local() if hasattr(value, "to_local") else value
                for state in optimizer.state.values()
                for value in state.values()
            ]
            storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
            expected = sum(storages.values())
            return phases, expected, settled(allocator, expected)

    for phases, expected, live in run_distributed(job, ranks):
        assert live == expected
        assert phases[0].left_bytes > 0  # the optimizer's states, which later steps do not make again
        for before, after in itertools.pairwise(phases):
            # What gloo's threads have not let go at the end of a step, they let go before or within the next.
            assert after.start_bytes <= before.start_bytes + before.left_bytes
        assert min(phase.peak_bytes for phase in phases[1:]) >= 4 * 64 * 64 * 2


def settled(allocator, expected):
    """Live bytes once gloo's threads have let go of what they worked on, which is no later than that."""
    for _ in range(100):
        live = allocator.live_bytes
        if live == expected:
            break
        time.sleep(0.01)
    return live


def raised(job):
    def report():
        try:
            job()
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    (message,) = run_distributed(report, 1)
    return message


def test_wrong_use_is_refused():
    def nested():
        with track_allocator() as allocator, allocator.phase("outer"), allocator.phase("inner"):
            pass

    def too_early():
        with track_allocator() as allocator, allocator.phase("step") as phase:
            _ = phase.bytes

    def live_within():
        with track_allocator() as allocator, allocator.phase("step"):
            _ = allocator.live_bytes

    def with_a_profiler():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), track_allocator():
            pass

    def profiled_before():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True):
            kept = block(1)
        with track_allocator():
            del kept

    def other_device():
        with track_allocator("meta"):
            pass

    assert "'inner' cannot begin before 'outer' has ended" in raised(nested)
    assert "has not ended" in raised(too_early)
    assert "'step'" in raised(live_within)
    assert "profiler of torch is at work" in raised(with_a_profiler)
    assert "left 1024 bytes" in raised(profiled_before)
    assert raised(other_device).startswith("ValueError: track_allocator(device='meta')")


def test_after_an_error_the_next_phase_is_measured():
    def job():
        with track_allocator() as allocator:
            with pytest.raises(ZeroDivisionError), allocator.phase("broken"):
                _ = 1 / 0
            with allocator.phase("whole") as phase:
                block(2)
            return phase.bytes, len(allocator.phases)

    ((phase, phases),) = run_distributed(job, 1)
    assert phase.peak_bytes == 2 * KIB
    assert phases == 1


def test_named_ranges_that_reach_beyond_a_phase_do_no_harm():
    """The end of such a range would be written to where the ended phase had its records."""

    def job():
        with track_allocator() as allocator:
            for _ in range(40):
                ranges = [record_function("a range") for _ in range(100)]
                with allocator.phase("opens"):
                    for each in ranges:
                        each.__enter__()
                with allocator.phase("closes"):
                    kept = [block(1) for _ in range(300)]
                    for each in ranges:
                        each.__exit__(None, None, None)
                    del kept
            return {(phase.name, phase.peak_bytes, phase.left_bytes) for phase in allocator.phases}

    (found,) = run_distributed(job, 1)
    assert {each for each in found if each[0] == "closes"} == {("closes", 300 * KIB, 0)}


def test_works_that_reach_beyond_a_phase_do_no_harm():
    def job():
        dist.init_process_group("gloo")
        with track_allocator() as allocator:
            whole, part = torch.ones(2 * 64 * KIB), torch.empty(64 * KIB)
            for _ in range(30):
                with allocator.phase("part"):
                    works = [dist.reduce_scatter_tensor(part, whole, async_op=True) for _ in range(3)]
                for work in works:
                    work.wait()
            return [phase.peak_bytes for phase in allocator.phases]

    for peaks in run_distributed(job, 2):
        assert all(0 <= peak <= 4 * 4 * 2 * 64 * KIB for peak in peaks)

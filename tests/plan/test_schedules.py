"""Bubbles, microbatches in flight and timelines. Reference values are worked out by hand from the papers' formulas."""

import pytest

from lightning_shard.pipeline.schedule import SCHEDULES
from lightning_shard.plan.results import SchedulePlan
from lightning_shard.plan.schedules import plan_schedules


def planned(stages: int, microbatches: int, **options: int) -> dict[str, SchedulePlan]:
    return {each.schedule: each for each in plan_schedules(stages, microbatches, **options)}


@pytest.mark.parametrize(
    ("stages", "microbatches", "percent"), [(4, 8, 27.3), (4, 32, 8.6), (8, 8, 46.7), (4, 64, 4.5)]
)
def test_reference_bubbles(stages: int, microbatches: int, percent: float):
    plans = planned(stages, microbatches)
    assert list(plans) == list(SCHEDULES)
    for name in ("gpipe", "1f1b"):
        bubble = plans[name].bubble_fraction
        assert bubble == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=1e-12)
        assert round(100 * bubble, 1) == percent
    assert plans["gpipe"].in_flight_microbatches == (microbatches,) * stages
    assert plans["1f1b"].in_flight_microbatches == tuple(min(microbatches, stages - stage) for stage in range(stages))


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (2, 2), (2, 4), (3, 6), (4, 8), (4, 3), (5, 20)])
def test_a_timeline_shows_the_bubble(stages: int, microbatches: int):
    """Drawing and bubble are computed apart: idle over all marks must be the bubble, and all work must be there."""
    for each in plan_schedules(stages, microbatches, timeline_width=10**6):
        if each.bubble_fraction is None:
            assert each.reason and not each.timeline and not each.in_flight_microbatches
            continue
        text = "".join(each.timeline)
        assert len(each.timeline) == stages and len({len(line) for line in each.timeline}) == 1
        assert text.count(".") / len(text) == pytest.approx(each.bubble_fraction, abs=1e-12)
        count = len(each.in_flight_microbatches) * microbatches
        kinds = [str.isdigit, str.islower, str.isupper]
        assert [sum(map(kind, text)) for kind in kinds] == [count] * 3, each.schedule


def test_in_flight_is_by_stage():
    """Two stages a rank make eight; in a V the last stage lies on the first rank, and lets go at once."""
    plans = planned(4, 8)
    for name in ("interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev"):
        assert len(plans[name].in_flight_microbatches) == 8, name
    assert plans["looped_bfs"].in_flight_microbatches == (8,) * 8
    assert plans["zbv"].in_flight_microbatches[0] == 8 and plans["zbv"].in_flight_microbatches[-1] == 1
    assert len(planned(4, 8, stages_per_rank=3)["interleaved"].in_flight_microbatches) == 12
    assert len(planned(4, 8, stages_per_rank=3)["zbv"].in_flight_microbatches) == 8  # fixes its own number


def test_drawings_by_hand():
    """Two ranks, two microbatches: a forward is one unit, a backward two, each as soon as its inputs are there."""
    plans = planned(2, 2)
    assert plans["gpipe"].timeline == ("01...aAbB", ".01aAbB..")
    assert plans["1f1b"].timeline == ("01..aA.bB", ".0aA1bB..")


def test_smaller_bubbles_are_smaller():
    plans = planned(4, 8)
    bubbles = {name: each.bubble_fraction for name, each in plans.items()}
    assert bubbles["zbv"] < bubbles["interleaved"] < bubbles["1f1b"] == pytest.approx(bubbles["gpipe"])


def test_what_a_schedule_cannot_do_has_a_reason():
    plans = planned(4, 3)
    assert plans["1f1b"].bubble_fraction is None
    assert "4 for 4 ranks, but there are 3" in plans["1f1b"].reason
    assert "8 for 4 ranks" in plans["dualpipev"].reason
    assert plans["gpipe"].bubble_fraction == pytest.approx(3 / 6)
    assert "9 microbatches" in planned(4, 9)["interleaved"].reason


def test_a_long_timeline_keeps_both_ends():
    whole = planned(4, 32, timeline_width=1000)["1f1b"].timeline
    for width in (3, 40, 41):
        cut = planned(4, 32, timeline_width=width)["1f1b"].timeline
        for line, full in zip(cut, whole, strict=True):
            left, _, right = line.partition("~")
            assert len(line) == width and full.startswith(left) and full.endswith(right)
    assert all(len(line) <= 100 for each in plan_schedules(4, 64) for line in each.timeline)


def test_closed_forms_where_there_are_too_many_to_write_out():
    plans = planned(64, 4096)
    assert plans["gpipe"].bubble_fraction == pytest.approx(63 / 4159)
    assert plans["1f1b"].in_flight_microbatches == tuple(range(64, 0, -1))
    assert plans["zbv"].bubble_fraction is None and "64 ranks and 4096 microbatches" in plans["zbv"].reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "stages=0 must be at least 1"),
        ((4, 0), "microbatches=0"),
        ((4, -2), "microbatches=-2"),
        ((4, 2.5), "microbatches=2.5 must be a whole number"),
        ((True, 8), "stages=True"),
        ((10**7, 8), "stages=10000000 must be at most 1,000,000"),
        ((4, 8, 0), "stages_per_rank=0"),
    ],
)
def test_absurd_numbers_are_refused(arguments: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        plan_schedules(*arguments)

"""A plan as text, JSON and a page: the same numbers everywhere, and nothing of a text taken for markup."""

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_shard.config import Offload
from lightning_shard.plan.estimate import plan_parameters, plan_pipeline
from lightning_shard.plan.report import table, to_json, write_html
from lightning_shard.plan.results import Memory, Plan, StepTime
from lightning_shard.plan.words import (
    count_in_words,
    parameters_in_words,
    percent_in_words,
    seconds_in_words,
    size_in_words,
)


@pytest.fixture
def plan() -> Plan:
    return plan_parameters(7e9, devices=8, device="h100", stages=4, microbatches=8)


@pytest.fixture
def measured(plan: Plan) -> Plan:
    """As it comes from a module: with a peak and a time, and settings that are objects."""
    memory = Memory(parameters=30e9, gradients=5e9, optimizer=3.5e9, activations=20e9)
    time = StepTime(compute=1.25, exposed_communication=0.25)
    first = replace(plan.strategies[0], memory=memory, time=time, settings={"offload": Offload(optimizer="cpu")})
    return replace(plan, strategies=(first, *plan.strategies[1:]), chosen=first)


class Page(HTMLParser):
    """Reads a page: its elements, the widths of bars by class, the texts of its tables, and the data in it."""

    VOID = ("meta", "path", "br")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.bars: list[dict[str, float]] = []
        self.scripts: list[dict[str, str | None]] = []
        self.links: list[str] = []
        self.data = ""
        self.svg_text = ""
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        assert self.open == [], "elements are not closed"

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "onload", "onclick")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "script":
            self.scripts.append(given)
        elif given.get("class") == "bar":
            self.bars.append({})
        elif tag == "i" and "style" in given:
            self.bars[-1][given["class"]] = float(re.fullmatch(r"width:([\d.]+)%", given["style"])[1])

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.data += data
        elif self.open[-1:] == ["text"]:
            self.svg_text += data
        elif self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_json_has_the_promised_keys_and_numbers(plan: Plan):
    data = json.loads(json.dumps(to_json(plan), allow_nan=False))
    assert data["parameters"] == 7_000_000_000 and data["devices"] == 8 and data["chosen"] == "zero1"
    rows = {each["name"]: each for each in data["strategies"]}
    assert {"ddp", "zero1", "zero2", "zero3", "fsdp2"} <= set(rows)
    promised = {"name", "model_states_bytes", "payload_elements", "sent_elements", "flops_fraction", "fits", "reason"}
    for name, row in rows.items():
        assert promised <= set(row)
        each = plan.named(name)
        assert row["model_states_bytes"] == each.model_states.total == sum(row["model_states"].values())
        assert (row["payload_elements"], row["sent_elements"]) == (each.payload_elements, each.sent_elements)
    schedules = {each["schedule"]: each for each in data["schedules"]}
    assert schedules["1f1b"]["bubble_fraction"] == pytest.approx(3 / 11)
    assert schedules["1f1b"]["in_flight_microbatches"] == [4, 3, 2, 1]
    assert data["device"]["name"] == "h100" and data["memory_bytes"] == 80e9


def test_json_of_what_is_not_plain(measured: Plan):
    row = json.loads(json.dumps(to_json(measured)))["strategies"][0]
    assert row["settings"]["offload"]["class"] == "Offload" and row["settings"]["offload"]["optimizer"] == "cpu"
    assert row["peak_bytes"] == 58.5e9 and row["memory"]["activations"] == 20e9
    assert row["step_seconds"] == 1.5 and row["time"]["exposed_communication"] == 0.25


def test_json_of_schedules_alone():
    data = to_json(plan_pipeline(4, 3))
    assert data["parameters"] is None and data["strategies"] == [] and data["chosen"] is None
    impossible = {each["schedule"]: each for each in data["schedules"]}["1f1b"]
    assert impossible["bubble_fraction"] is None and "there are 3" in impossible["reason"]


def test_the_table_shows_every_strategy_and_the_choice(plan: Plan, measured: Plan):
    text = table(plan)
    for each in plan.strategies:
        (line,) = [line for line in text.splitlines() if line.startswith(f"{each.name} ") or f"{each.name}(" in line]
        assert each.reason in line and size_in_words(each.model_states.total) in line
    assert "\nTake zero1, the least invasive that fits: 38.5 GB of model states" in text
    assert "peak" not in text.splitlines()[2] and "step" not in text.splitlines()[2]
    assert "58.5 GB" in table(measured) and "1.5 s" in table(measured)
    assert "dualpipev\n  rank 0  0" in text and "idle" in text
    columns = [line.index(" yes ") for line in text.splitlines() if " yes " in line]
    assert len(columns) > 5 and len(set(columns)) == 1


def test_of_each_name_the_best_is_shown_and_all_are_in_the_json(plan: Plan, tmp_path: Path):
    best, *others = plan.strategies
    worse = replace(best, settings={"microbatches": 3}, reason="not so good")
    plan = replace(plan, strategies=(best, worse, *others))
    assert "not so good" not in table(plan) and "\n1 more with other settings" in table(plan)
    assert "zero1(microbatches=3)" in table(replace(plan, chosen=worse))
    write_html(plan, tmp_path / "plan.html")
    page = Page(tmp_path / "plan.html")
    assert len(page.bars) == 2 * len(others) + 2 and len(page.rows) == len(others) + 3


def test_the_table_of_what_does_not_fit():
    text = table(plan_parameters(7e9, devices=8, memory_bytes="1GB"))
    assert "Nothing is known to fit (fsdp2_offload, zero3_offload_params, zero3_nvme cannot be judged)" in text
    assert "not judged: name a device" in table(plan_parameters(7e9, devices=8))


@pytest.mark.parametrize("kind", ["plan", "measured"])
def test_the_page_shows_the_numbers_of_the_json(kind: str, request: pytest.FixtureRequest, tmp_path: Path):
    plan = request.getfixturevalue(kind)
    write_html(plan, tmp_path / "plan.html")
    page, data = Page(tmp_path / "plan.html"), json.loads(json.dumps(to_json(plan)))
    assert json.loads(page.data) == data

    head, *rows = page.rows
    assert len(rows) == len(data["strategies"])
    for cells, row in zip(rows, data["strategies"], strict=True):
        shown = dict(zip(head, cells, strict=True))
        assert shown["strategy"].startswith(row["name"]) and shown["why"] == row["reason"]
        assert shown["model states"] == size_in_words(row["model_states_bytes"])
        assert shown["payload"] == count_in_words(row["payload_elements"])
        assert shown["sent"] == count_in_words(row["sent_elements"])
        assert shown.get("peak", "") == (size_in_words(row["peak_bytes"]) if row["peak_bytes"] else "")

    count = len(rows)
    memory, times, traffic = page.bars[:count], page.bars[count:-count], page.bars[-count:]
    parts = {"compute": 100 * 1.25 / 1.5, "exposed_communication": 100 * 0.25 / 1.5}
    assert times == ([pytest.approx(parts, abs=1e-3)] if kind == "measured" else [])
    scale = max(max(row["device_bytes"] for row in data["strategies"]), 80e9) * 1.04
    for bar, row in zip(memory, data["strategies"], strict=True):
        assert sum(bar.values()) == pytest.approx(100 * row["device_bytes"] / scale, abs=1e-3)
        for name, size in (row["memory"] or {}).items():
            assert bar.get(name, 0) == pytest.approx(100 * size / scale, abs=1e-3)
    for bar, row in zip(traffic, data["strategies"], strict=True):
        if row["payload_elements"]:
            assert bar["sent"] / bar["payload"] == pytest.approx(
                row["sent_elements"] / row["payload_elements"], abs=1e-4
            )

    work = sum(len(line) - line.count(".") for each in data["schedules"] for line in each["timeline"])
    assert len(re.sub(r"rank \d", "", page.svg_text)) == work


def test_bars_far_beyond_the_device_are_cut(tmp_path: Path):
    write_html(plan_parameters(405e9, devices=4096, device="h100"), tmp_path / "plan.html")
    page = Page(tmp_path / "plan.html")
    memory = page.bars[: len(page.bars) // 2]
    assert max(sum(bar.values()) for bar in memory) == pytest.approx(100, abs=1e-3)
    assert sorted(sum(bar.values()) > 0.7 for bar in memory).count(True) > 5, "small ones can be seen beside them"
    assert 'class="beyond"' in page.text


def test_the_page_needs_nothing_else(plan: Plan, tmp_path: Path):
    write_html(plan, tmp_path / "plan.html")
    page = Page(tmp_path / "plan.html")
    assert page.links == [] and page.scripts == [{"type": "application/json", "id": "plan"}]
    assert not re.search(r"url\(|@import|https?://", page.text.partition("<script")[0])
    assert "prefers-color-scheme: dark" in page.text


def test_texts_are_no_markup(plan: Plan, tmp_path: Path):
    evil = '</script><img src=x onload="1">&amp;\'"'
    row = replace(plan.strategies[0], name=evil, reason=evil, settings={evil: evil})
    plan = replace(plan, strategies=(row,), chosen=row, notes=(evil,), optimizer=evil, precision=evil)
    write_html(plan, tmp_path / "plan.html")
    page = Page(tmp_path / "plan.html")
    assert page.links == [] and len(page.scripts) == 1
    assert page.rows[-1][-1] == evil
    assert json.loads(page.data)["notes"] == [evil]


def test_the_page_appears_whole(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "plan.html"
    target.write_text("before")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match=r"plan\.html: No space left on device"):
        write_html(plan, target)
    assert target.read_text() == "before" and os.listdir(tmp_path) == ["plan.html"]


def test_where_the_page_cannot_be_written(plan: Plan, tmp_path: Path):
    with pytest.raises(ValueError, match="it is a folder"):
        write_html(plan, tmp_path)
    with pytest.raises(ValueError, match=f"there is no folder {tmp_path}/nowhere"):
        write_html(plan, tmp_path / "nowhere" / "plan.html")


def test_words():
    assert [size_in_words(size) for size in (0, 999, 26.25e9, 112e9, 1.5e12)] == [
        *("0 B", "999 B", "26.25 GB", "112 GB"),
        "1.5 TB",
    ]
    assert count_in_words(18.375e9) == "18.38 G" and count_in_words(12) == "12"
    assert [seconds_in_words(time) for time in (2, 0.31, 42e-6)] == ["2 s", "310 ms", "42 us"]
    assert parameters_in_words(6_738_415_616) == "6.74 billion parameters" and parameters_in_words(1) == "1 parameter"
    assert percent_in_words(3 / 11) == "27.3 %"


def test_a_device_is_no_place_for_a_page() -> None:
    """Replacing it by a file would break the machine for everybody."""
    with pytest.raises(ValueError, match="it is no file, but a device"):
        write_html(plan_parameters(1e6, devices=2), "/dev/null")
    assert not Path("/dev/null").is_file()
    with pytest.raises(ValueError, match="path is empty"):
        write_html(plan_parameters(1e6, devices=2), "")

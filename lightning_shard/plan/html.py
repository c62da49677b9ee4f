"""A plan as one page: bars of memory and traffic, the table, and the schedules as coloured blocks.

The page loads nothing and runs no script. It is drawn from the same plain values that ``--json`` prints, which it
holds as well.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

from lightning_shard.plan.page_style import STYLE
from lightning_shard.plan.schedules import CUT, IDLE, LEGEND, MARKS
from lightning_shard.plan.words import (
    count_in_words,
    parameters_in_words,
    percent_in_words,
    seconds_in_words,
    size_in_words,
)

_PARTS = ("parameters", "gradients", "master", "optimizer", "activations", "gathered", "buffers", "temporaries")
"""What bars are made of, in their order; also classes of the style."""

_LONGEST = 2.5
"""Bars end at so many times the device's memory, or the median time, so that short ones are seen beside long ones."""

_KINDS = {"F": "forward", "I": "gradients of inputs", "W": "gradients of weights"}
_CELL, _ROW = 12, 20


def page(data: Mapping[str, Any], verdict: str) -> str:
    """The page.

    Args:
        data: A plan as plain values.
        verdict: What to take and why.

    """
    sections = [_heading(data, verdict)]
    if data["strategies"]:
        sections += [_memory(data), _time(data), _traffic(data), _table(data)]
    if data["schedules"]:
        sections.append(_schedules(data))
    if data["notes"]:
        sections.append(
            _section("Notes", "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in data["notes"]) + "</ul>")
        )
    # A text in the data may look like the end of the element that holds it.
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(_title(data))}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, sections))
        + f'\n</main>\n<script type="application/json" id="plan">{embedded}</script>\n</body>\n</html>\n'
    )


def _title(data: Mapping[str, Any]) -> str:
    if data["parameters"] is None:
        return f"Pipeline schedules on {data['devices']} ranks"
    return f"{parameters_in_words(data['parameters'])} on {data['devices']} ranks"


def _heading(data: Mapping[str, Any], verdict: str) -> str:
    facts = []
    if data["parameters"] is not None:
        facts = [f"{data['nodes']} nodes" if data["nodes"] > 1 else "1 node"]
        if data["device"]:
            facts.append(data["device"]["name"])
        if data["memory_bytes"] is not None:
            facts.append(f"{size_in_words(data['memory_bytes'])} a device")
        facts += [f"precision {data['precision']}", str(data["optimizer"])]
    chips = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    text = f"<header><h1>{escape(_title(data))}</h1>{f'<ul class=facts>{chips}</ul>' if chips else ''}"
    if any(each["fits"] is not None for each in data["strategies"]):
        text += f'<p class="verdict {"yes" if data["chosen"] else "no"}">{escape(verdict)}</p>'
    return text + "</header>"


def _is_chosen(each: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
    return bool(each["name"] == data["chosen"] and each["settings"] == data["chosen_settings"])


def _label(each: Mapping[str, Any]) -> str:
    """The name, and in small letters the settings: a switch that is on is just named."""
    words = [escape(name if value is True else f"{name} {value}") for name, value in each["settings"].items()]
    return escape(each["name"]) + (f" <small>{', '.join(words).replace('_', ' ')}</small>" if words else "")


def _shown(data: Mapping[str, Any]) -> list[Any]:
    """The best of each name, and the one to take."""
    best: dict[str, Any] = {}
    for each in data["strategies"]:
        best.setdefault(each["name"], each)
    return [each for each in data["strategies"] if best[each["name"]] is each or _is_chosen(each, data)]


def _section(title: str, body: str, caption: str = "") -> str:
    below = f'<p class="caption">{caption}</p>' if caption else ""
    return f"<section><h2>{escape(title)}</h2>{below}{body}</section>"


# --- bars ------------------------------------------------------------------------------------------------------------


def _memory(data: Mapping[str, Any]) -> str:
    """A bar of each strategy's bytes on the device, before a line at the device's memory."""
    rows = [(each, _on_device(each)) for each in _shown(data)]
    limit = data["memory_bytes"]
    most = max(sum(parts.values()) for _, parts in rows)
    scale = max(most, 1) if limit is None else min(max(most, limit) * 1.04, limit * _LONGEST)
    peaks = any(each["memory"] for each in data["strategies"])
    lines = []
    for each, parts in rows:
        bar = _stack(parts, scale, size_in_words)
        mark = "" if limit is None else f'<u style="left:{100 * limit / scale:.4f}%"></u>'
        beside = f" <small>+ {size_in_words(each['host_bytes'])} off device</small>" if each["host_bytes"] else ""
        lines.append(_bar_row(each, data, bar + mark, f"{size_in_words(sum(parts.values()))}{beside}"))
    used = [name for name in _PARTS if any(parts.get(name) for _, parts in rows)]
    legend = "".join(f'<li><i class="{name}"></i>{name}</li>' for name in used)
    if limit is not None:
        legend += f"<li><u></u>memory of a device, {size_in_words(limit)}</li>"
    caption = (
        "Peak of a training step, on the rank that needs most." if peaks else "Model states only, without activations."
    )
    return _section(
        "Memory of a device", f'<ul class="legend">{legend}</ul><div class="bars">{"".join(lines)}</div>', caption
    )


def _on_device(each: Mapping[str, Any]) -> dict[str, float]:
    """Bytes on the device by kind: of the peak, or where that is not known of the model states."""
    if each["memory"]:
        return {name: each["memory"].get(name, 0) for name in _PARTS}
    parts, away = dict(each["model_states"]), each["host_bytes"]
    for name in ("optimizer", "master", "gradients", "parameters"):  # the order in which strategies move them away
        moved = min(parts[name], away)
        parts[name] -= moved
        away -= moved
    return parts


def _time(data: Mapping[str, Any]) -> str:
    rows = [each for each in _shown(data) if each["time"]]
    if not rows:
        return ""
    by_row = all(each["rows"] for each in rows)
    parts = [{kind: part / (each["rows"] if by_row else 1) for kind, part in each["time"].items()} for each in rows]
    seconds = sorted(sum(times.values()) for times in parts)
    scale = min(seconds[-1], _LONGEST * seconds[len(seconds) // 2]) or 1
    lines = []
    for each, times in zip(rows, parts, strict=True):
        bar = _stack(times, scale, seconds_in_words)
        lines.append(_bar_row(each, data, bar, seconds_in_words(sum(times.values()))))
    kinds = ("compute", "exposed_communication", "bubble")
    legend = "".join(f'<li><i class="{kind}"></i>{kind.replace("_", " ")}</li>' for kind in kinds)
    return _section(
        "Time for a row" if by_row else "Time of a step",
        f'<ul class="legend">{legend}</ul><div class="bars">{"".join(lines)}</div>',
        "By the roofline: each part at the device's full speed."
        + (" A step's, over the rows of all ranks in it: a pipeline works off fewer of them at once." * by_row),
    )


def _traffic(data: Mapping[str, Any]) -> str:
    scale = max(max(each["payload_elements"] for each in _shown(data)), 1)
    lines = []
    for each in _shown(data):
        bar = "".join(
            f'<i class="{name}" style="width:{100 * each[f"{name}_elements"] / scale:.4f}%"'
            f' title="{name}: {count_in_words(each[f"{name}_elements"])} elements"></i>'
            for name in ("payload", "sent")
        )
        words = (
            f"{count_in_words(each['payload_elements'])} <small>sent {count_in_words(each['sent_elements'])}</small>"
        )
        lines.append(_bar_row(each, data, f'<span class="pair">{bar}</span>', words))
    legend = (
        '<li><i class="payload"></i>payload: an all-reduce of n is 2n</li><li><i class="sent"></i>sent on a ring</li>'
    )
    return _section(
        "Traffic",
        f'<ul class="legend">{legend}</ul><div class="bars">{"".join(lines)}</div>',
        "Elements of one rank and step.",
    )


def _stack(parts: Mapping[str, float], scale: float, words: Callable[[float], str]) -> str:
    """A bar's parts one after the other, cut where it is longer than the scale, with a mark there."""
    bar, left = "", scale
    for name, size in parts.items():
        shown = min(size, left)
        left -= shown
        if shown > 0:
            tip = f"{name.replace('_', ' ')}: {words(size)}"
            bar += f'<i class="{name}" style="width:{100 * shown / scale:.4f}%" title="{escape(tip)}"></i>'
    return bar + ('<b class="beyond">&raquo;</b>' if sum(parts.values()) > scale else "")


def _bar_row(each: Mapping[str, Any], data: Mapping[str, Any], bar: str, words: str) -> str:
    state = {True: "fits", False: "not", None: ""}[each["fits"]] + (" chosen" if _is_chosen(each, data) else "")
    return (
        f'<div class="row {state}"><span class="name">{_label(each)}</span><span class="bar">{bar}</span>'
        f'<span class="words">{words}</span></div>'
    )


# --- table -----------------------------------------------------------------------------------------------------------


def _table(data: Mapping[str, Any]) -> str:
    def size(value: float | None) -> str:
        return "" if value is None else size_in_words(value)

    rows = data["strategies"]
    columns = {
        "model states": [size(each["model_states_bytes"]) for each in rows],
        "off device": [size(each["host_bytes"] or None) for each in rows],
        "peak": [size(each["peak_bytes"]) for each in rows],
        "payload": [count_in_words(each["payload_elements"]) for each in rows],
        "sent": [count_in_words(each["sent_elements"]) for each in rows],
        "FLOPs": [percent_in_words(each["flops_fraction"]) for each in rows],
        "step": ["" if each["step_seconds"] is None else seconds_in_words(each["step_seconds"]) for each in rows],
        "rows/s": ["" if each["rows_per_second"] is None else count_in_words(each["rows_per_second"]) for each in rows],
        "fits": [{True: "yes", False: "no", None: ""}[each["fits"]] for each in rows],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    body = ""
    for each, *cells in zip(rows, *columns.values(), strict=True):
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        state = ' class="chosen"' if _is_chosen(each, data) else ""
        body += f'<tr{state}><th scope="row">{_label(each)}</th>{values}'
        body += f'<td class="why">{escape(each["reason"])}</td></tr>'
    head = "".join(f'<th scope="col">{name}</th>' for name in ("strategy", *columns, "why"))
    return _section(
        "All numbers",
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>',
        "Of one rank; traffic in elements of one step. ZeRO and FSDP divide storage: every rank computes the whole"
        " model on its part of the batch. A pipeline divides the computation.",
    )


# --- schedules -------------------------------------------------------------------------------------------------------


def _schedules(data: Mapping[str, Any]) -> str:
    legend = "".join(f'<li><i class="{kind}"></i>{words}</li>' for kind, words in _KINDS.items())
    parts = [f'<ul class="legend">{legend}<li><i class="idle"></i>idle</li></ul>']
    for each in data["schedules"]:
        name = f"<h3>{escape(each['schedule'])}</h3>"
        if each["bubble_fraction"] is None:
            parts.append(f'<div class="schedule">{name}<p class="caption">{escape(each["reason"])}</p></div>')
            continue
        alive = " ".join(str(number) for number in each["in_flight_microbatches"])
        facts = f"bubble {percent_in_words(each['bubble_fraction'])}, microbatches in flight by stage: {alive}"
        parts.append(f'<div class="schedule">{name}<p class="caption">{facts}</p>{_blocks(each["timeline"])}</div>')
    return _section("Pipeline schedules", "".join(parts), escape(LEGEND.replace("~ columns", "a gap: columns")))


def _blocks(lines: list[str]) -> str:
    """A schedule as blocks with the last digits of the microbatches in them; neighbours differ in shade."""
    if not lines:
        return ""
    margin = 64
    width, height = margin + _CELL * len(lines[0]), _ROW * len(lines)
    shapes: dict[str, list[str]] = {}
    texts = []
    for rank, line in enumerate(lines):
        top = _ROW * rank
        texts.append(f'<text class="rank" x="{margin - 8}" y="{top + 14}">rank {rank}</text>')
        shapes.setdefault("idle", []).append(
            f"M{margin} {top + 1}h{_CELL * len(line)}v{_ROW - 3}h-{_CELL * len(line)}z"
        )
        places, digits = [], ""
        for column, mark in enumerate(line):
            left = margin + _CELL * column
            if mark == CUT:
                shapes.setdefault("cut", []).append(f"M{left} {top}h{_CELL}v{_ROW}h-{_CELL}z")
            elif mark != IDLE:
                kind = next(kind for kind, marks in MARKS.items() if mark in marks)
                number = MARKS[kind].index(mark)
                shade = f"{kind} odd" if number % 2 else kind
                shapes.setdefault(shade, []).append(f"M{left} {top + 1}h{_CELL - 0.6}v{_ROW - 3}h-{_CELL - 0.6}z")
                places.append(str(left + _CELL / 2))
                digits += str(number)
        texts.append(f'<text x="{" ".join(places)}" y="{top + 14}">{digits}</text>')
    return (
        f'<div class="wide"><svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">'
        + _paths(shapes.items())
        + "".join(texts)
        + "</svg></div>"
    )


def _paths(shapes: Iterable[tuple[str, list[str]]]) -> str:
    return "".join(f'<path class="{name}" d="{"".join(parts)}"/>' for name, parts in shapes)

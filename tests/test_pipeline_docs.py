"""What docs/pipeline.md and the files of pipelines in configs/ say in numbers is what the schedules do."""

import re
from inspect import signature
from pathlib import Path

import pytest

from lightning_shard import PipelineStrategy
from lightning_shard._compat.schedules import torch_actions
from lightning_shard.pipeline.schedule import SCHEDULES, bubble, per_rank, why_impossible

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
RANKS, STAGES_PER_RANK, MICROBATCHES = 4, 2, 8


def idle(name: str) -> float:
    """The bubble of a schedule at the numbers that the texts speak of."""
    actions = torch_actions(name, RANKS, STAGES_PER_RANK, MICROBATCHES)
    return bubble(actions, RANKS * per_rank(name, STAGES_PER_RANK))


def test_the_table_of_schedules_is_what_the_script_below_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = re.findall(r"^```python\n(from lightning_shard\._compat.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(script, {})
    printed = re.findall(r"^\| `(\w+)` \| ([\d.]+)% \| ([\d.]+) \| (\d) \|$", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, *_ in printed] == [f"pipeline_{name}" for name in SCHEDULES]
    rows = re.findall(r"^\| `(pipeline_\w+)` \| ([\d.]+) % \| ([\d.]+) \| (\S+) \|", PAGE, re.MULTILINE)
    for (name, idles, kept, stages), row in zip(printed, rows, strict=True):
        fixed = SCHEDULES[name.removeprefix("pipeline_")].stages_per_rank is not None
        assert row == (name, idles, kept, stages if fixed else "`stages_per_rank`")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_rules_for_microbatches_are_those_of_the_table(ranks: int) -> None:
    rules = {
        "any": lambda m: True,
        "at least p": lambda m: m >= ranks,
        "at least 2p": lambda m: m >= 2 * ranks,
        "a multiple of m // p: multiples of p always are": lambda m: m % max(1, m // ranks) == 0,
    }
    rules["as interleaved"] = rules["a multiple of m // p: multiples of p always are"]
    told = dict(re.findall(r"^\| `pipeline_(\w+)` \| [\d.]+ % \| [\d.]+ \| \S+ \| ([^|]+) \|", PAGE, re.MULTILINE))
    assert list(told) == list(SCHEDULES)
    for name, rule in told.items():
        for m in range(1, 5 * ranks):
            assert rules[rule](m) == (why_impossible(name, ranks, STAGES_PER_RANK, m) is None), (name, m)


def test_every_argument_is_explained() -> None:
    (section,) = re.findall(r"^## Arguments\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| ", section, re.MULTILINE)
    told = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    parameters = signature(PipelineStrategy).parameters
    assert set(told) == set(parameters)
    for name, default in told.items():
        value = parameters[name].default
        if default not in ("Lightning's", "given by the Trainer"):
            assert default.strip("`") == (f'"{value}"' if isinstance(value, str) else str(value).lower()), name


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_configs_say_how_long_ranks_are_idle(name: str) -> None:
    text = (ROOT / "configs" / f"pipeline_{name}.yaml").read_text(encoding="utf-8")
    (head, _) = text.split("\n#\n#   lightning-shard fit", 1)
    told = [int(number) for number in re.findall(r"(\d+) %", head)]
    assert told[0] == round(100 * idle(name))
    assert told[1:] in ([], [round(100 * idle("1f1b"))]), "compared with a rank of 1F1B"

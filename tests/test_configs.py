"""Every file of ``configs/``: complete, commented, in step with the name it is named after, and trained for real."""

import csv
import math
import os
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import yaml
from lightning_shard_cli.main import main

from lightning_shard import Offload
from lightning_shard.registry import NAMES
from lightning_shard.testing import run_distributed

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
OVERRIDES = ["--trainer.accelerator=cpu", "--trainer.devices=2"]
SHORT_TEXTS = ["--model.context=32", "--data.context=32"]
"""A quarter of the work in each step; one file is also trained as it stands, by the console command."""


def names(paths):
    return [pytest.param(path, id=path.stem, marks=pytest.mark.nvme if "nvme" in path.stem else ()) for path in paths]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)


def assert_trained(folder: Path) -> None:
    """The run in ``folder`` made all its steps and learned something."""
    (log,) = (folder / "lightning_logs").glob("version_*")
    with (log / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    train = {int(row["step"]): float(row["train_loss"]) for row in rows if row["train_loss"]}
    val = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert sorted(train) == [4, 9, 14, 19]
    assert train[19] < train[4] < math.log(256) + 0.2  # the loss of a uniform guess, and some room
    assert len(val) == 2
    assert val[1] < val[0]


def test_one_file_a_name():
    assert [path.stem for path in CONFIGS] == sorted(NAMES)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_file_says_what_its_name_says(path):
    given = yaml.safe_load(path.read_text(encoding="utf-8"))["trainer"]["strategy"]
    entry = NAMES[path.stem]
    assert given["class_path"] == f"lightning_shard.{entry.strategy_class().__name__}"
    arguments = dict(given["init_args"])
    if arguments.get("offload"):
        arguments["offload"] = Offload(**arguments["offload"])
    # What the name does not set is the default, spelled out.
    defaults = {key: each.default for key, each in signature(entry.strategy_class()).parameters.items()}
    assert {key: value for key, value in arguments.items() if value != defaults[key]} == {
        key: value for key, value in entry.settings.items() if value != defaults[key]
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_setting_of_the_strategy_is_explained(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert f"# In one word, with the defaults spelled out below:   trainer: {{strategy: {path.stem}}}" in lines
    first = lines.index("    init_args:") + 1
    last = next(number for number in range(first, len(lines)) if lines[number].startswith("  precision:"))
    for number in range(first, last):
        if not lines[number].lstrip().startswith("#") and not lines[number].endswith(":"):
            assert lines[number - 1].lstrip().startswith("#"), lines[number]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_file_parses(path, capsys):
    assert main(["fit", f"--config={path}", *OVERRIDES, "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    given, made = (each["trainer"]["strategy"]["init_args"] for each in (written, printed))
    assert {key: value for key, value in given.items() if not isinstance(value, dict)}.items() <= made.items()
    assert printed["model"]["init_args"].items() >= written["model"]["init_args"].items()
    assert printed["data"]["init_args"].items() >= written["data"]["init_args"].items()


@pytest.mark.ranks
@pytest.mark.parametrize("path", names(CONFIGS))
def test_file_trains_on_two_ranks(path, tmp_path):
    arguments = ["fit", f"--config={path}", *OVERRIDES, *SHORT_TEXTS]

    def run() -> int:
        return main(arguments)

    assert run_distributed(run, 2, timeout=3000 if "nvme" in path.stem else 120) == [0, 0]
    assert_trained(tmp_path)


@pytest.mark.ranks
def test_console_command_starts_its_own_ranks(tmp_path):
    # The script that pip writes for the command, in a folder with a space in its name.
    script = tmp_path / "a folder" / "lightning-shard"
    script.parent.mkdir()
    script.write_text("import sys\nfrom lightning_shard_cli.main import main\nsys.exit(main())\n")
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    done = subprocess.run(
        [sys.executable, script, "fit", "--config", ROOT / "configs" / "zero1.yaml", *OVERRIDES],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        start_new_session=True,  # a failing rank kills the process that started it, not this one
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MEMBER: 2/2" in done.stdout + done.stderr
    assert_trained(tmp_path)

"""The command: help pages, one line for every mistake, and Lightning's subcommands on several ranks."""

import ast
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from functools import cache
from inspect import getsource, signature
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_shard_cli import errors
from lightning_shard_cli.errors import nearest
from lightning_shard_cli.main import SUBCOMMANDS, main

from lightning_shard import (
    ActivationCheckpointing,
    ClassUnits,
    FSDP2Strategy,
    MixedPrecision,
    Offload,
    PipelineStrategy,
    SizeUnits,
    ZeroPlusPlus,
    ZeROStrategy,
    __version__,
)
from lightning_shard.registry import NAMES
from lightning_shard.testing import run_distributed

TRAINING = [name for name, row in SUBCOMMANDS.items() if row.module == "lightning_shard_cli.training"]

ROOT = Path(__file__).parents[2]
BORING = "--model=lightning.pytorch.demos.boring_classes.BoringModel"
ONE_CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.fast_dev_run=1"]
ZERO = "--trainer.strategy=ZeROStrategy"
FSDP2 = "--trainer.strategy=FSDP2Strategy"
PIPELINE = "--trainer.strategy=PipelineStrategy"


class RefusedAtSetup(Callback):
    """Stands for whatever finds, before the first step, that the settings cannot work."""

    def setup(self, trainer, pl_module, stage):
        raise MisconfigurationException("this and that\n  do not go together")


class FailsInStep(BoringModel):
    """Has a bug that raises the very kinds of error that are refusals before the first step."""

    def __init__(self, misconfigured: bool = False):
        super().__init__()
        self.misconfigured = misconfigured

    def training_step(self, batch, batch_idx):
        raise MisconfigurationException("bug") if self.misconfigured else ValueError("bug")


class WithAdafactor(BoringModel):
    """Is refused by ZeROStrategy when all ranks run already."""

    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters())


class FailsToBuild(BoringModel):
    """Has a bug in its constructor, or rejects a value there."""

    def __init__(self, width: int = 8):
        super().__init__()
        if width % 4:
            raise ValueError(f"width={width} is not a multiple of 4")
        len(width)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "LIGHTNING_SHARD_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def mistake(capsys):
    """Runs ``fit`` with a mistake in it; returns the one line that it is told in."""

    def run(*arguments: str, model: str = BORING) -> str:
        capsys.readouterr()
        assert main(["fit", *([model] if model else []), *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        # What Lightning logs on the way (the seed, the devices) may stand before the line, but nothing of ours.
        (line,) = [line for line in err.splitlines() if line.startswith("lightning-shard: error: ")]
        assert err.splitlines()[-1] == line
        assert "Traceback" not in err
        assert "usage:" not in err
        return line.removeprefix("lightning-shard: error: ")

    return run


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """How ``python -m lightning_shard_cli`` ends where one process refuses, and where all ranks do.

    Side by side, since starting Python takes longer than what is looked at.
    """
    two_ranks = ["--trainer.strategy=zero2", "--trainer.accelerator=cpu", "--trainer.devices=2"]
    commands = {
        "one process": ["fit", BORING, "--trainer.strategy=zero3_ofload"],
        "all ranks": ["fit", f"--model={__name__}.WithAdafactor", *two_ranks, "--trainer.fast_dev_run=1"],
    }
    mine = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "LIGHTNING_SHARD_TRACEBACK")
    env = {key: value for key, value in os.environ.items() if key not in mine}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "cli", Path(__file__).parent)))
    started = {
        key: subprocess.Popen(
            [sys.executable, "-m", "lightning_shard_cli", *arguments],
            cwd=tmp_path_factory.mktemp("refused"),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a failing rank kills the process that started it, not this one
        )
        for key, arguments in commands.items()
    }
    ended = {}
    try:
        for key, process in started.items():
            out, err = process.communicate(timeout=200)
            ended[key] = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    finally:
        for process in started.values():
            process.kill()
    return ended


def told(arguments: list[str]) -> tuple[int, str]:
    """The exit code of the command in this process, and all that is written meanwhile; for a rank of its own."""
    with open("told.txt", "w+") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        code = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        return code, Path("told.txt").read_text()


STRATEGIES = (ZeROStrategy, FSDP2Strategy, PipelineStrategy)


@cache
def help_page(strategy: type) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["fit", f"--trainer.strategy.help={strategy.__name__}"]) == 0
    return out.getvalue()


class TestHelp:
    @pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
    def test_short_page(self, arguments, capsys):
        assert main(arguments) == 0
        page = capsys.readouterr().out
        assert len(page.splitlines()) < 25
        assert all(f"  {name}" in page and row.summary in page for name, row in SUBCOMMANDS.items())

    def test_short_page_imports_nothing_heavy(self):
        code = "import sys; from lightning_shard_cli.main import main; main([]); print('torch' in sys.modules)"
        env = os.environ | {"PYTHONPATH": str(ROOT / "cli")}
        out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60).stdout
        assert out.splitlines()[-1] == "False"

    def test_version(self, capsys):
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"lightning-shard {__version__}\n"

    @pytest.mark.parametrize("name", TRAINING)
    def test_each_subcommand_has_its_page(self, name, capsys):
        assert main([name, "--help"]) == 0
        page = capsys.readouterr().out
        assert page.startswith(f"usage: lightning-shard [options] {name} ")
        assert "--trainer.strategy" in page

    def test_strategies_are_listed(self, capsys):
        assert main(["fit", "--trainer.strategy.help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        for name, row in NAMES.items():
            assert any(line.split()[:1] == [name] and line.endswith(row.description) for line in lines), name
        for each in STRATEGIES:
            assert f"  --trainer.strategy.help={each.__name__}" in lines

    @pytest.mark.parametrize(
        ("strategy", "key", "options"),
        [
            (ZeROStrategy, "offload", Offload),
            (ZeROStrategy, "zero_plus_plus", ZeroPlusPlus),
            (ZeROStrategy, "activation_checkpointing", ActivationCheckpointing),
            (FSDP2Strategy, "units", SizeUnits),
            (FSDP2Strategy, "units", ClassUnits),
            (FSDP2Strategy, "mixed_precision", MixedPrecision),
        ],
    )
    def test_strategy_shows_every_option_of_its_option_classes(self, strategy, key, options):
        page = help_page(strategy)
        documented = field_docstrings(options)
        for field in fields(options):
            assert f"\n  --trainer.strategy.{key}.{field.name} " in page
            assert squeezed(documented[field.name]) in squeezed(page), field.name

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_strategy_explains_every_option(self, strategy):
        usage, _, page = help_page(strategy).partition("Help for")
        assert usage.startswith("usage: lightning-shard ")
        explained = dict(re.findall(r"^  --trainer\.strategy\.(\w+) .*\n((?:   .*\n)+)", page, flags=re.MULTILINE))
        for name in signature(strategy).parameters:
            # An option without a docstring shows its type at once.
            assert not explained[name].lstrip().startswith("(type:"), name


def squeezed(text: str) -> str:
    """``text`` without blanks and hyphens: a help page breaks lines at both."""
    return "".join(text.split()).replace("-", "").replace("``", "")


def field_docstrings(options: type) -> dict[str, str]:
    """The strings under a dataclass's fields, read from its source."""
    (tree,) = ast.parse(getsource(options)).body
    return {
        field.target.id: text.value.value
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


class TestPrintConfig:
    def test_feeds_back(self, capsys, tmp_path):
        settings = [BORING, ZERO, "--trainer.strategy.stage=2", "--trainer.strategy.offload.optimizer=cpu"]
        assert main(["fit", *settings, "--trainer.devices=2", "--print_config"]) == 0
        first = capsys.readouterr().out
        strategy = yaml.safe_load(first)["trainer"]["strategy"]
        assert strategy["class_path"] == "lightning_shard.ZeROStrategy"
        assert strategy["init_args"]["stage"] == 2
        assert {field.name for field in fields(Offload)} == strategy["init_args"]["offload"].keys()

        file = tmp_path / "a folder" / "my config.yaml"
        file.parent.mkdir()
        file.write_text(first)
        assert main(["fit", f"--config={file}", "--print_config"]) == 0
        assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(first)

    @pytest.mark.parametrize(
        ("name", "settings"),
        [("ClassUnits", {"classes": ["torch.nn.Linear"]}), ("SizeUnits", {"min_params": 10})],
    )
    def test_units_by_the_path_of_their_class(self, name, settings, capsys, tmp_path):
        units = {"class_path": f"lightning_shard.{name}", "init_args": settings}
        strategy = {"class_path": "lightning_shard.FSDP2Strategy", "init_args": {"units": units}}
        (tmp_path / "my.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
        assert main(["fit", BORING, "--config=my.yaml", "--print_config"]) == 0
        printed = capsys.readouterr().out
        assert yaml.safe_load(printed)["trainer"]["strategy"]["init_args"]["units"] == settings
        (tmp_path / "printed.yaml").write_text(printed)
        assert main(["fit", "--config=printed.yaml", "--print_config"]) == 0
        assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(printed)
        # And a run is made with them: of the one layer, a unit.
        ((code, said),) = run_distributed(told, 1, ["fit", "--config=my.yaml", BORING, *ONE_CPU])
        assert code == 0, said
        assert re.search(r"^layer +66 ", said, flags=re.MULTILINE)

    def test_command_line_wins_over_file(self, capsys, tmp_path):
        (tmp_path / "my.yaml").write_text("trainer:\n  max_steps: 3\n  devices: 4\n")
        assert main(["fit", BORING, "--config=my.yaml", "--trainer.max_steps=7", "--print_config"]) == 0
        trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
        assert (trainer["max_steps"], trainer["devices"]) == (7, 4)


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (
                ["--trainer.strategy=zero3_ofload"],
                "--trainer.strategy: no strategy 'zero3_ofload'; did you mean 'zero3_offload'?",
            ),
            (
                ["--trainer.strategy=ZeROStrateg"],
                "--trainer.strategy: no strategy 'ZeROStrateg'; did you mean 'ZeROStrategy'?",
            ),
            (
                ["--trainer.strategy=qqq"],
                "--trainer.strategy: no strategy 'qqq'; --trainer.strategy.help lists the names",
            ),
            ([ZERO, "--trainer.strategy.stage=4"], "--trainer.strategy.stage: expected 1, 2 or 3, got '4'"),
            (
                [ZERO, "--trainer.strategy.offload.optimizer=nvm"],
                "--trainer.strategy.offload.optimizer: expected cpu, nvme or null, got 'nvm'; did you mean 'nvme'?",
            ),
            (
                [ZERO, "--trainer.strategy.bucket_elements=many"],
                "--trainer.strategy.bucket_elements: expected a value of type int or null, got 'many'",
            ),
            ([FSDP2, "--trainer.strategy.units=size"], "no class 'size'"),
            ([FSDP2, "--trainer.strategy.replicas=0"], "FSDP2Strategy(replicas=0): groups of ranks, at least 1."),
            (
                [FSDP2, "--trainer.strategy.reshard_after_forward=1"],
                "FSDP2Strategy(reshard_after_forward=1): True, False, or a number of ranks, at least 2.",
            ),
            (
                [FSDP2, "--trainer.strategy.mixed_precision.compute=bf17"],
                "--trainer.strategy.mixed_precision.compute: expected fp32, bf16, fp16 or null, got 'bf17'; did you"
                " mean 'bf16'?",
            ),
            (
                [FSDP2, "--trainer.strategy.units=SizeUnits", "--trainer.strategy.units.min_parms=9"],
                "--trainer.strategy.units: SizeUnits has no option 'min_parms'; did you mean 'min_params'?",
            ),
            (
                [FSDP2, "--trainer.strategy.units=SizeUnits", "--trainer.strategy.units.min_params=0"],
                "SizeUnits(min_params=0): elements, at least 1.",
            ),
            (
                [
                    *ONE_CPU,
                    FSDP2,
                    "--trainer.strategy.units=ClassUnits",
                    "--trainer.strategy.units.classes=[no.such.Class]",
                ],
                "'no.such.Class', but there is no class of modules at this import path",
            ),
            (
                [PIPELINE, "--trainer.strategy.schedule=1f1"],
                "--trainer.strategy.schedule: expected gpipe, 1f1b, interleaved, looped_bfs, zero_bubble, zbv or"
                " dualpipev, got '1f1'; did you mean '1f1b'?",
            ),
            (
                [PIPELINE, "--trainer.strategy.stages=0"],
                "PipelineStrategy(stages=0): a whole number of at least 1, or 'auto'.",
            ),
            (
                [PIPELINE, "--trainer.strategy.microbatch=4"],
                "--trainer.strategy: PipelineStrategy has no option 'microbatch'; did you mean 'microbatches'?",
            ),
            (["--trainer.max_steps=abc"], "--trainer.max_steps: expected a value of type int, got 'abc'"),
            (
                [ZERO, "--trainer.strategy.init_args.stge=3"],
                "--trainer.strategy: ZeROStrategy has no option 'stge'; did you mean 'stage'?",
            ),
            (
                [ZERO, "--trainer.strategy.offload.ratoi=0.5"],
                "--trainer.strategy.offload: Offload has no option 'ratoi'; did you mean 'ratio'?",
            ),
            (["--trainer.max_stps=3"], "no option --trainer.max_stps; did you mean '--trainer.max_steps'?"),
            (["stray"], "'stray' belongs to no option"),
            (["--trainer.callbacks=EarlyStoping"], "no class 'EarlyStoping'; did you mean 'EarlyStopping'?"),
            (["--trainer.callbacks=EarlyStopping"], "--trainer.callbacks: EarlyStopping needs monitor"),
            (["--data=no_such_module.Data"], "--data: no module 'no_such_module'"),
            (["--config=no_such_file.yaml"], "no_such_file.yaml"),
            (["--ckpt_path=no_such.ckpt"], "--ckpt_path: no checkpoint at 'no_such.ckpt'"),
            (["--trainer.devices=some"], "`devices` selected with `CPUAccelerator` should be an int > 0."),
            (["--trainer.gradient_clip_algorithm=nrom"], "`gradient_clip_algorithm` nrom is invalid"),
        ],
    )
    def test_on_the_command_line(self, mistake, arguments, line):
        assert line in mistake("--trainer.accelerator=cpu", *arguments)

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("trainer:\n  max_stps: 3\n", "no option --trainer.max_stps; did you mean '--trainer.max_steps'?"),
            ("trainr:\n  max_steps: 3\n", "no option --trainr.max_steps; did you mean '--trainer.max_steps'?"),
            ("trainer:\n  strategy: zero_3\n", "no strategy 'zero_3'; did you mean 'zero3'?"),
            (
                "trainer:\n  strategy:\n    class_path: lightning_shard.ZeroStrategy\n",
                "no class 'ZeroStrategy' in module 'lightning_shard'; did you mean 'ZeROStrategy'?",
            ),
            (
                "trainer:\n  strategy:\n    class_path: lightning_shard.ZeROStrategy\n    init_args: {stge: 3}\n",
                "--trainer.strategy: ZeROStrategy has no option 'stge'; did you mean 'stage'?",
            ),
            ("trainer:\n  callbacks: [3\n", "my config.yaml, line 3, column 1: not valid YAML:"),
        ],
    )
    def test_in_a_file(self, mistake, tmp_path, text, line):
        (tmp_path / "my config.yaml").write_text(text)
        assert line in mistake("--config", "my config.yaml")

    def test_misspelt_model(self, mistake):
        assert mistake(model="--model=BoringModle") == "--model: no class 'BoringModle'; did you mean 'BoringModel'?"

    def test_no_model(self, mistake):
        assert mistake(model="").startswith("missing: --model")

    def test_misspelt_subcommand(self, capsys):
        assert main(["fitt"]) == 2
        assert capsys.readouterr().err == "lightning-shard: error: no subcommand 'fitt'; did you mean 'fit'?\n"

    def test_refusal_by_an_option_class_is_carried_through(self, mistake):
        with pytest.raises(ValueError) as refusal:
            Offload(ratio=3)
        said = mistake("--trainer.accelerator=cpu", ZERO, "--trainer.strategy.offload.ratio=3")
        assert said == str(refusal.value).replace("ratio=3)", "ratio=3.0)")

    def test_refusal_by_a_constructor(self, mistake):
        assert mistake("--model.width=6", model=f"--model={__name__}.FailsToBuild") == "width=6 is not a multiple of 4"

    def test_refusal_before_the_first_step(self, mistake):
        said = mistake(
            "--trainer.accelerator=cpu", "--trainer.logger=false", f"--trainer.callbacks={__name__}.RefusedAtSetup"
        )
        assert said.endswith("this and that do not go together")

    def test_traceback_on_request(self, monkeypatch):
        monkeypatch.setenv("LIGHTNING_SHARD_TRACEBACK", "1")
        with pytest.raises(Exception, match="did you mean 'zero3'"):
            main(["fit", BORING, "--trainer.strategy=zero33"])

    def test_exit_code_and_line_of_the_process(self, refused):
        done = refused["one process"]
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.splitlines() == [
            "lightning-shard: error: --trainer.strategy: no strategy 'zero3_ofload'; did you mean 'zero3_offload'?"
        ]


class TestCrashes:
    """What goes wrong in the user's own code keeps its traceback."""

    @pytest.mark.parametrize(("flag", "kind"), [("false", ValueError), ("true", MisconfigurationException)])
    def test_in_a_step(self, flag, kind):
        with pytest.raises(kind, match="bug"):
            main(["fit", f"--model={__name__}.FailsInStep", f"--model.misconfigured={flag}", *ONE_CPU])

    def test_in_a_constructor(self):
        with pytest.raises(ValueError) as crash:
            main(["fit", f"--model={__name__}.FailsToBuild", "--trainer.accelerator=cpu"])
        assert isinstance(crash.value.__cause__, TypeError)


class TestRanks:
    def test_other_ranks_leave_the_word_to_rank_0(self, tmp_path):
        # The parent starts a rank 1 that fails, as it does itself, and leaves without waiting for it.
        code = (
            "import os, subprocess, sys, time\n"
            "command = [sys.executable, '-m', 'lightning_shard_cli', 'fitt']\n"
            "subprocess.Popen(command, env=os.environ | {'LOCAL_RANK': '1'})\n"
            "time.sleep(1)\n"
        )
        env = os.environ | {"PYTHONPATH": str(ROOT / "cli")}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""

    def test_a_rank_that_fails_alone_speaks(self, monkeypatch, capsys):
        now = [0.0]
        clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
        monkeypatch.setattr(errors, "time", clock)
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert main(["fitt"]) == 2
        assert now[0] >= 5.0, "rank 0 had no time to speak first"
        assert capsys.readouterr() == (
            "",
            "lightning-shard: error: rank 1: no subcommand 'fitt'; did you mean 'fit'?\n",
        )

    @pytest.mark.ranks
    def test_what_all_ranks_refuse_is_told_once(self, refused):
        done = refused["all ranks"]
        assert done.returncode == 2
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("lightning-shard: error: ")]
        assert "Adafactor" in line
        assert "MEMBER: 2/2" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.ranks
    def test_every_subcommand_runs_on_two_ranks(self, tmp_path):
        arguments = [BORING, "--trainer.strategy=zero2", "--trainer.accelerator=cpu", "--trainer.devices=2"]
        arguments += [f"--trainer.callbacks={__name__}.Witness", "--trainer.fast_dev_run=2"]

        def run() -> dict[str, tuple[int, set[str]]]:
            found, before = {}, set()
            for name in TRAINING:
                code = main([name, *arguments])
                torch.distributed.barrier()
                seen = {path.name for path in Path.cwd().glob("*.seen")}
                torch.distributed.barrier()  # nobody goes on while another rank looks
                found[name], before = (code, seen - before), seen
            return found

        for found in run_distributed(run, 2):
            for name in TRAINING:
                steps = {"fit": "train"}.get(name, name)
                assert found[name] == (0, {f"{steps}-0.seen", f"{steps}-1.seen"}), name


class Witness(Callback):
    """Leaves a file for each kind of step that a rank has made twice."""

    def _end(self, trainer: Trainer, kind: str, index: int) -> None:
        if index == 1:
            assert trainer.world_size == 2
            Path(f"{kind}-{trainer.global_rank}.seen").touch()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._end(trainer, "train", batch_idx)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if trainer.state.fn == "validate":
            self._end(trainer, "validate", batch_idx)

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self._end(trainer, "test", batch_idx)

    def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self._end(trainer, "predict", batch_idx)


def test_nearest():
    assert nearest("FIT", SUBCOMMANDS) == "; did you mean 'fit'?"
    assert nearest("max_stps", ["trainer", "max_steps"], prefix="--") == "; did you mean '--max_steps'?"
    assert nearest("zzz", ["fit", "test"]) == ""
    assert nearest("zzz", ["fit", "test"], among="choose from") == "; choose from fit, test"

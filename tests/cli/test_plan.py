"""``lightning-shard plan``: reference values through ``--json``, exit codes, mistakes, and configurations."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning_shard_cli.main import main
from torch.utils.data import DataLoader

from lightning_shard.plan.estimate import plan_parameters
from lightning_shard.plan.hardware import DEVICES

DOCS = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
MINE = "{memory_bytes: 40GB, bf16_flops: 1e12, fp32_flops: 1e12, memory_bandwidth: 1GB, link_bandwidth: 1GB,"
MINE += " network_bandwidth: 1GB, host_bandwidth: 1GB}"


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs ``plan --json``; returns the exit code and what it printed."""

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = main(["plan", *arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def mistake(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``plan`` with a mistake; returns the one line that it is told in."""
    monkeypatch.delenv("LIGHTNING_SHARD_TRACEBACK", raising=False)

    def run(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["plan", *arguments]) == 2
        out, err = capsys.readouterr()
        (line,) = [line for line in err.splitlines() if line.startswith("lightning-shard: error: ")]
        assert out == "" and "Traceback" not in err
        return line.removeprefix("lightning-shard: error: ")

    return run


# --- arithmetic ------------------------------------------------------------------------------------------------------


def by_name(data: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for each in data["strategies"]}


def test_reference_values(planned: Any) -> None:
    code, data = planned("--params", "7e9", "--devices", "8")
    rows = by_name(data)
    assert code == 0 and data["parameters"] == 7e9 and data["devices"] == 8
    for name, size in {"ddp": 112, "zero1": 38.5, "zero2": 26.25, "zero3": 14, "fsdp2": 14}.items():
        assert rows[name]["model_states_bytes"] == pytest.approx(size * 1e9, rel=1e-12), name
    for name in ("ddp", "zero1", "zero2", "fsdp2_grad"):
        assert (rows[name]["payload_elements"], rows[name]["sent_elements"]) == (14e9, 12.25e9), name
    for name in ("zero3", "fsdp2"):
        assert (rows[name]["payload_elements"], rows[name]["sent_elements"]) == (21e9, 18.375e9), name
    assert rows["fsdp2"]["flops_fraction"] == 1 and rows["pipeline_1f1b"]["flops_fraction"] == 1 / 8
    rows = by_name(planned("--params", "13B", "--devices", "16")[1])
    assert rows["zero1"]["model_states_bytes"] == pytest.approx(61.75e9, rel=1e-12)
    assert rows["zero3"]["model_states_bytes"] == pytest.approx(13e9, rel=1e-12)


@pytest.mark.parametrize(
    ("stages", "microbatches", "percent"), [(4, 8, 27.3), (4, 32, 8.6), (8, 8, 46.7), (4, 64, 4.5)]
)
def test_reference_bubbles(stages: int, microbatches: int, percent: float, planned: Any) -> None:
    code, data = planned("--stages", str(stages), "--microbatches", str(microbatches))
    schedules = {each["schedule"]: each for each in data["schedules"]}
    assert code == 0 and data["strategies"] == []
    for name in ("gpipe", "1f1b"):
        assert round(100 * schedules[name]["bubble_fraction"], 1) == percent
    assert schedules["gpipe"]["in_flight_microbatches"] == [microbatches] * stages
    assert schedules["1f1b"]["in_flight_microbatches"] == list(range(stages, 0, -1))


def test_traffic_of_a_million_parameters(planned: Any) -> None:
    """Bytes in fp32 on four ranks: 6 MB for data parallelism and stages 1 and 2, 9 MB where gathered twice."""
    rows = by_name(planned("--params", "1M", "--devices", "4", "--precision", "32-true")[1])
    sent = {name: row["sent_elements"] * 4 for name, row in rows.items()}
    assert [sent[name] for name in ("ddp", "zero1", "zero2", "fsdp2_grad", "zero3", "fsdp2")] == [6e6] * 4 + [9e6] * 2
    options = ("--accumulate-grad-batches", "4", "--frozen", "900k")
    rows = by_name(planned("--params", "1M", "--devices", "4", *options)[1])
    assert rows["ddp"]["payload_elements"] == 0.2e6 and rows["zero3"]["payload_elements"] == 8e6 + 0.4e6


def test_both_at_once_and_options_reach_the_plan(planned: Any) -> None:
    options = ("--precision=32-true", "--optimizer=sgd", "--nodes=2", "--stages=4", "--microbatches=12")
    code, data = planned("--params=125M", "--devices=8", "--memory=16GiB", "--stages-per-rank=3", *options)
    assert code == 0 and data["memory_bytes"] == 16 * 2**30 and data["nodes"] == 2
    assert by_name(data)["ddp"]["model_states_bytes"] == 1e9  # fp32 weights and gradients
    assert {len(each["in_flight_microbatches"]) for each in data["schedules"]} == {4, 8, 12}
    assert by_name(data)["pipeline_1f1b"]["settings"] == {"stages": 4}


def test_text_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out.html"
    assert main(["plan", "--params=7e9", "--devices=8", "--device=H100", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "Take zero1, the least invasive that fits" in out and "38.5 GB" in out
    assert "Take zero1, the least invasive that fits" in page.read_text()
    assert main(["plan", "--stages=2", "--microbatches=4"]) == 0
    assert "rank 1" in capsys.readouterr().out


def test_exit_code_where_nothing_fits(planned: Any) -> None:
    code, data = planned("--params=7e9", "--devices=8", "--memory=1GB")
    assert code == 3 and data["chosen"] is None and by_name(data)["ddp"]["fits"] is False
    assert planned("--params=7e9", "--devices=8")[0] == 0  # no memory was given
    assert planned("--params=1e12", "--devices=1", "--device=t4")[0] == 3


def test_a_device_of_ones_own(tmp_path: Path, planned: Any, mistake: Any) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"mine: {MINE}")
    code, data = planned("--params=7e9", "--devices=8", "--hardware", str(file), "--device=mine")
    assert code == 0 and data["device"]["name"] == "mine" and data["chosen"] == "zero1"
    assert "no device 'min'. Did you mean 'mine'" in mistake(
        "--params=7e9", "--devices=8", "--hardware", str(file), "--device=min"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "what shall be planned?"),
        (["--params=7e9"], "--devices is missing"),
        (["--params=0", "--devices=8"], "parameters=0 must be at least 1"),
        (["--params=-7B", "--devices=8"], "parameters=-7e+09"),
        (["--params=nan", "--devices=8"], "parameters=nan"),
        (["--params=7Q", "--devices=8"], "'7Q' is no number of parameters"),
        (["--params=B", "--devices=8"], "'B' is no number of parameters"),
        (["--params=1e17", "--devices=8"], "parameters=1e+17"),
        (["--params=7e9", "--devices=0"], "devices=0 must be at least 1"),
        (["--params=7e9", "--devices=2.5"], "'2.5' is no whole number"),
        (["--params=7e9", "--devices=8", "--nodes=3"], "devices=8 must be a multiple of nodes=3"),
        (["--params=7e9", "--devices=8", "--stages=3"], "stages=3 must divide devices=8"),
        (["--params=7e9", "--devices=8", "--memory=80Gb"], "'80Gb' is no size"),
        (["--params=7e9", "--devices=8", "--device=h10"], "Did you mean 'h100'"),
        (["--params=7e9", "--devices=8", "--hardware=a.yaml"], "name one of them with --device"),
        (["--params=7e9", "--devices=8", "--hardware=no.yaml", "--device=a"], "no.yaml: cannot be read"),
        (["--params=7e9", "--devices=8", "--html=/nowhere/a.html"], "there is no folder /nowhere"),
        (["--params=7e9", "--devices=8", "--devics=8"], "no option --devics; did you mean '--devices'?"),
        (["--params=7e9", "--devices=8", "--model.layers=8"], "--model.layers is an option of a configuration"),
        (["--params=7e9", "--devices=8", "8"], "'8' belongs to no option"),
        (["--params=7e9", "--devices=8", "--simulate=1"], "--simulate goes with --config"),
        (["--stages=4"], "--microbatches is missing"),
        (["--microbatches=4"], "--stages is missing"),
        (["--stages=4", "--microbatches=0"], "microbatches=0 must be at least 1"),
        (["--stages=4", "--microbatches=8", "--device=h100"], "--device goes with --params or --config"),
        (["--stages=4", "--microbatches=8", "--optimizer=sgd"], "--optimizer goes with --params"),
        (["--config=a.yaml", "--params=7e9"], "give one of them"),
        (["--config=a.yaml", "--device=h100"], "--devices is missing"),
        (["--config=a.yaml", "--devices=8"], "--device is missing"),
        (["--config=a.yaml", "--devices=8", "--device=h100", "--precision=32"], "change it with --trainer.precision="),
        (["--config=a.yaml", "--devices=8", "--device=h100"], "File does not exist"),
        (
            ["--config=a.yaml", "--devices=8", "--device=h100", "--nodes=3"],
            "--devices 8 must be a multiple of --nodes 3",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, mistake: Any) -> None:
    assert message in mistake(*arguments)


# --- what docs/plan.md says -------------------------------------------------------------------------------------------


def test_the_outputs_in_the_docs_are_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```console\n\$ lightning-shard (plan .*)\n((?:(?!```).*\n)+)```", DOCS, re.MULTILINE)
    shown = {command: lines for command, lines in blocks if lines.strip() and not lines.startswith("$")}
    assert len(shown) == 2
    for command, lines in shown.items():
        assert main(command.split()) == 0
        printed = " ".join(capsys.readouterr().out.split())
        for part in lines.split("\n...\n"):
            assert " ".join(part.split()) in printed


def test_the_devices_in_the_docs_are_those_of_the_table() -> None:
    rows = {
        row[0]: row[1:] for row in re.findall(r"^\| `([\w-]+)`.*?" + r" \| ([\d.,]+)" * 8 + r" \|$", DOCS, re.MULTILINE)
    }
    assert list(rows) == list(DEVICES)
    for name, cells in rows.items():
        each = DEVICES[name]
        memory, bf16, fp32, *speeds, count = (float(cell.replace(",", "")) for cell in cells)
        told = [each.memory_bytes / 1e9, each.bf16_flops / 1e12, each.fp32_flops / 1e12, each.per_node]
        assert [memory, bf16, fp32, count] == pytest.approx(told, rel=1e-3), name
        links = (each.memory_bandwidth, each.link_bandwidth, each.network_bandwidth, each.host_bandwidth)
        assert speeds == pytest.approx([link / 1e9 for link in links], rel=1e-3), name


# --- configurations --------------------------------------------------------------------------------------------------


class Wide(BoringModel):
    """A module whose size is an option, and that says aloud that it is built."""

    def __init__(self, width: int = 2, look: bool = False, wide: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, width)
        print("a word on standard output")
        if look:
            self.start = self.layer.weight.sum().item()
        if width % 2:
            raise ValueError(f"width={width} is odd")


class Data(LightningDataModule):
    """Divides its rows among the ranks, so that it must know how many there are."""

    def __init__(self, rows: int = 64) -> None:
        super().__init__()
        self.rows = rows

    def setup(self, stage: str) -> None:
        self.dataset = RandomDataset(32, 64)

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return DataLoader(self.dataset, batch_size=self.rows // self.trainer.world_size)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the planner is asked for; in its place is the arithmetic of the module's number of parameters."""
    calls: list[dict[str, Any]] = []

    def plan_module(module: Any, batch: Any, **given: Any) -> Any:
        calls.append({"module": module, "batch": batch, **given})
        count = sum(parameter.numel() for parameter in module.parameters())
        return plan_parameters(count, devices=given["devices"], device=given["device"])

    stand_in = ModuleType("lightning_shard.plan.search")
    monkeypatch.setattr(stand_in, "plan_module", plan_module, raising=False)
    monkeypatch.setitem(sys.modules, "lightning_shard.plan.search", stand_in)
    return calls


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{class_path: {__name__}.Wide, init_args: {{width: 4}}}}\n"
        f"data: {{class_path: {__name__}.Data}}\n"
        "trainer: {precision: bf16-mixed, strategy: zero3, accelerator: cuda, devices: 7, gradient_clip_val: 0.5,"
        " accumulate_grad_batches: 2}\n"
        "optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}\n"
        "ckpt_path: null\nseed_everything: 1\n"
    )
    return str(path)


WHERE = ("--devices=8", "--nodes=2", "--device=h100")


def test_a_configuration_is_built_but_not_run(config: str, asked: list[dict[str, Any]], planned: Any) -> None:
    code, data = planned("--config", config, *WHERE, "--model.width=6", "--simulate=1")
    (call,) = asked
    assert code == 0 and data["parameters"] == 32 * 6 + 6
    parameter = next(call["module"].parameters())
    assert type(call["module"]) is Wide and parameter.untyped_storage().data_ptr() == 0, "it takes no memory"
    assert call["batch"].shape == (8, 32) and type(call["batch"]) is torch.Tensor
    assert (call["devices"], call["nodes"], call["device"].name, call["simulate"]) == (8, 2, "h100", 1)
    assert (call["precision"], call["gradient_clip_val"], call["accumulate_grad_batches"]) == ("bf16-mixed", 0.5, 2)
    assert call["module"].trainer.world_size == 8
    optimizer = call["module"].configure_optimizers()
    assert type(optimizer) is torch.optim.SGD


def test_a_module_that_needs_values_is_built_for_real(config: str, asked: list[dict[str, Any]], planned: Any) -> None:
    code, data = planned("--config", config, *WHERE, "--model.look=true")
    (call,) = asked
    assert code == 0 and type(next(call["module"].parameters()).data) is torch.Tensor
    assert any("Wide was built with real memory" in note for note in data["notes"])


def test_a_module_may_have_its_own_data(
    config: str, asked: list[dict[str, Any]], planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _ = planned("--config", config, *WHERE, "--data=null", "--memory=10GB")
    (call,) = asked
    assert code == 0 and call["batch"].shape == (1, 32) and call["device"].memory_bytes == 10e9


def test_schedules_go_with_a_configuration(config: str, asked: list[dict[str, Any]], planned: Any) -> None:
    _, data = planned("--config", config, *WHERE, "--stages=2", "--microbatches=4")
    assert len(asked) == 1 and len(data["schedules"]) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.wdth=3"], "Wide has no option 'wdth'; did you mean 'width'?"),
        (["--model.width=3"], "width=3 is odd"),
        (["--trainer.strategy=zero33"], "no strategy 'zero33'; did you mean 'zero3'?"),
        (["--modle.width=3"], "no option --modle.width"),
        (["--memory=0"], "'0' is no size"),
    ],
)
def test_a_mistake_in_a_configuration_is_one_line(
    arguments: list[str], message: str, config: str, asked: list[dict[str, Any]], mistake: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", _quiet(print))
        assert message in mistake("--config", config, *WHERE, *arguments)
    assert asked == []


def _quiet(printed: Any) -> Any:
    return lambda *words, **options: printed(*words, **options) if "file" in options else None


def test_a_file_that_is_no_yaml(tmp_path: Path, mistake: Any) -> None:
    (tmp_path / "bad.yaml").write_text("model: [")
    assert "bad.yaml, line 1" in mistake("--config", str(tmp_path / "bad.yaml"), *WHERE)

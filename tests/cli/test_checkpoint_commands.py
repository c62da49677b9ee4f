"""``lightning-shard convert`` and ``inspect``."""

import json
from pathlib import Path

import pytest
import torch
from lightning_shard_cli.main import main
from safetensors.torch import load_file


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A plain file of two weights, in a folder whose name has a blank."""
    (tmp_path / "my runs").mkdir()
    path = tmp_path / "my runs" / "last one.ckpt"
    contents = {"state_dict": {"a.weight": torch.rand(3, 4), "n": torch.tensor(3)}, "epoch": 2, "global_step": 7}
    torch.save({**contents, "optimizer_states": [], "callbacks": {}, "lr_schedulers": []}, path)
    return path


def test_convert_writes_what_is_asked_for(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = torch.load(checkpoint, weights_only=True)["state_dict"]
    target = checkpoint.with_name("model one.safetensors")
    assert main(["convert", str(checkpoint), str(target), "--dtype", "bf16"]) == 0
    assert torch.equal(load_file(target)["a.weight"], expected["a.weight"].bfloat16())
    assert str(target) in capsys.readouterr().out
    back = checkpoint.with_name("back")
    assert main(["convert", str(checkpoint), str(back), "--weights-only"]) == 0
    assert (back / "manifest.json").is_file()
    assert main(["convert", str(back), str(back) + " again", "--to", "lightning"]) == 0
    found = torch.load(checkpoint.with_name("back again"), weights_only=True)
    assert torch.equal(found["state_dict"]["a.weight"], expected["a.weight"]) and "optimizer_states" not in found


def test_inspect_prints_a_table_or_json(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint)]) == 0
    assert "a.weight  3 x 4" in capsys.readouterr().out
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weights"][0] == {"name": "a.weight", "shape": [3, 4], "dtype": "float32", "bytes": 48}
    assert found["facts"]["step"] == 7 and found["elements"] == 13 and found["bytes"] == 56


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "{source}"], "the following arguments are required: DST"),
        (["convert", "{source}", "b", "--to", "onnx"], "invalid choice: 'onnx'"),
        (["convert", "{source}", "b", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["convert", "nothing here.ckpt", "b"], "There is no checkpoint at nothing here.ckpt"),
        (["convert", "{source}", "{source}"], "is the checkpoint that is converted"),
        (["inspect", "nothing here.ckpt"], "There is no checkpoint at nothing here.ckpt"),
        (["inspect", "{folder}"], "is no checkpoint"),
        (["inspect"], "the following arguments are required: SRC"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"source": checkpoint, "folder": checkpoint.parent}
    assert main([each.format(**known) for each in arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and said.startswith("lightning-shard: error: ")


def test_untrusted_objects_are_refused_with_the_option_to_trust(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "hyper_parameters": {"f": checkpoint_maker}}, checkpoint)
    target = checkpoint.with_name("b.ckpt")
    assert main(["convert", str(checkpoint), str(target)]) == 2
    assert "--trusted" in capsys.readouterr().err
    assert main(["inspect", str(checkpoint)]) == 0
    assert "checkpoint_maker" in capsys.readouterr().out
    assert main(["convert", str(checkpoint), str(target), "--trusted"]) == 0
    assert torch.load(target, weights_only=False)["hyper_parameters"]["f"] is checkpoint_maker


def checkpoint_maker() -> None:
    """No plain data."""


def test_stopping_leaves_nothing_behind(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_shard.checkpoint import streaming

    def stopped(stream: streaming.Stream) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(streaming.Stream, "pieces", stopped)
    for target in ("b.ckpt", "c.safetensors", "d"):
        assert main(["convert", str(checkpoint), str(checkpoint.with_name(target))]) == 130
    assert [each.name for each in checkpoint.parent.iterdir()] == [checkpoint.name]


def test_help_names_the_commands_and_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert "write a checkpoint in another format" in page and "say what a checkpoint holds" in page
    assert main(["convert", "--help"]) == 0
    options = capsys.readouterr().out
    assert all(option in options for option in ("--to", "--weights-only", "--dtype", "--trusted"))

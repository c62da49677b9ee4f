"""What a checkpoint holds, without reading its tensors and without trusting it."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_shard import inspect_checkpoint
from tests.checkpoint.formats import ENGINE, FORMATS, PORTABLE, read

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_what_the_checkpoint_holds(name: str, saved: Path) -> None:
    found = inspect_checkpoint(saved / name)
    expected = read(saved / name)
    weights = expected["state_dict"]
    assert found.tied == ({} if name == "sharded" else {"tied.weight": "up.weight"})
    rows = {row.name: (row.shape, f"torch.{row.dtype}", row.bytes) for row in found.weights}
    assert rows == {
        key: (tuple(value.shape), str(value.dtype), value.nbytes)
        for key, value in weights.items()
        if key not in found.tied
    }
    assert found.weight_bytes == 4 * found.elements == sum(row[2] for row in rows.values())
    (optimizer,) = found.optimizers
    (state,) = expected["optimizer_states"]
    assert optimizer.states == {"step": 4, "exp_avg": 4, "exp_avg_sq": 4}
    assert optimizer.bytes == sum(value.nbytes for each in state["state"].values() for value in each.values())
    assert [(group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.groups] == [
        (group["lr"], group["weight_decay"], len(group["params"])) for group in state["param_groups"]
    ]
    if name != "plain.ckpt":
        assert [group["params"] for group in optimizer.groups] == [["down.weight", "scale"], ["up.weight", "up.bias"]]
    assert found.facts["step"] == 3 and found.facts["epoch"] == 1
    assert not found.pickled and {"loops", "hyper_parameters"} <= set(found.other)
    assert found.kind == ("portable" if name in PORTABLE else "engine" if name in ENGINE else found.kind)


def test_the_table_says_it_all(saved: Path) -> None:
    text = str(inspect_checkpoint(saved / "zero3"))
    for part in (
        "ZeROStrategy",
        "stage        3",
        "up.weight",
        "5 x 3",
        "tied to up.weight",
        "optimizer 0: AdamW",
        "lr=0.01",
    ):
        assert part in text, part


def test_no_tensor_is_read(saved: Path, tmp_path: Path) -> None:
    """Values that are gone are not missed: files keep their length and lose their data."""
    shutil.copytree(saved / "fsdp2", tmp_path / "hollow")
    expected = inspect_checkpoint(saved / "fsdp2")
    for file in (tmp_path / "hollow").glob("*.distcp"):
        size = file.stat().st_size
        file.write_bytes(b"")
        os.truncate(file, size)
    assert inspect_checkpoint(tmp_path / "hollow").weights == expected.weights


class Runs:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_is_named_and_not_run(tmp_path: Path) -> None:
    contents = {"state_dict": {"w": torch.ones(3)}, "callbacks": {"a": [Runs(tmp_path / "it ran")]}, "epoch": 4}
    torch.save(contents, tmp_path / "a.ckpt")
    found = inspect_checkpoint(tmp_path / "a.ckpt")
    assert found.pickled == ["callbacks.a.0 (posix.mkdir)"]
    assert [row.name for row in found.weights] == ["w"] and found.facts["epoch"] == 4
    assert not (tmp_path / "it ran").exists()
    torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert (tmp_path / "it ran").exists()


def test_what_is_no_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("PK mine")
    with pytest.raises(ValueError, match=r"notes.txt is damaged, or no checkpoint"):
        inspect_checkpoint(tmp_path / "notes.txt")
    torch.save({"a": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="has no 'state_dict', only a"):
        inspect_checkpoint(tmp_path / "other.pt")
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    with pytest.raises(MisconfigurationException, match="is a safetensors file"):
        inspect_checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        inspect_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        inspect_checkpoint(tmp_path / "nothing")

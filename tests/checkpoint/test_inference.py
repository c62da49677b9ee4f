"""A module from a checkpoint of any kind, without a Trainer."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

import lightning_shard
from lightning_shard import convert_checkpoint, load_from_checkpoint
from tests.checkpoint.formats import FORMATS, Odd, read
from tests.checkpoint.runs import rows

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", FORMATS)
def test_a_module_comes_out_of_every_kind(name: str, saved: Path) -> None:
    torch.manual_seed(3)
    module = load_from_checkpoint(Odd, saved / name)
    expected = read(saved / name)["state_dict"]
    found = module.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    assert module.tied.weight is module.up.weight and module.hparams["width"] == 5 and module.training
    if not name.startswith("engine"):
        torch.manual_seed(4)
        lightnings = Odd.load_from_checkpoint(saved / name)
        batch = rows()[0]
        assert torch.equal(module.eval()(batch), lightnings.eval()(batch))


def test_given_hyper_parameters_come_first(saved: Path) -> None:
    assert load_from_checkpoint(Odd, saved / "zero3", note="mine").hparams["note"] == "mine"
    with pytest.raises(MisconfigurationException, match=r"'down.weight' has shape \(3, 5\) in it and \(3, 7\)"):
        load_from_checkpoint(Odd, saved / "zero3", width=7)


class Bigger(Odd):
    def __init__(self, width: int = 5, note: str = "") -> None:
        super().__init__(width, note)
        self.more = torch.nn.Parameter(torch.full((2,), 7.0))


class Renames(Odd):
    """Has a name of its own for a weight, and a state in the checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["global_step"]
        weights = checkpoint["state_dict"]
        weights["below.weight"] = weights.pop("down.weight")

    def __init__(self, width: int = 5, note: str = "") -> None:
        super().__init__(width, note)
        self.below = self.down
        del self.down


def test_strict_is_the_modules_own_unless_it_is_given(saved: Path) -> None:
    with pytest.raises(MisconfigurationException, match="missing in it: 'more'"):
        load_from_checkpoint(Bigger, saved / "fsdp2")
    module = load_from_checkpoint(Bigger, saved / "fsdp2", strict=False)
    assert module.more.tolist() == [7.0, 7.0]
    assert torch.equal(module.up.weight, read(saved / "fsdp2")["state_dict"]["up.weight"])

    class Loose(Bigger):
        strict_loading = False

    load_from_checkpoint(Loose, saved / "fsdp2")


def test_the_modules_hook_sees_the_checkpoint(saved: Path) -> None:
    module = load_from_checkpoint(Renames, saved / "1f1b")
    assert module.seen == 3
    assert torch.equal(module.below.weight, read(saved / "1f1b")["state_dict"]["down.weight"])


def test_weights_keep_the_modules_dtype(saved: Path, tmp_path: Path) -> None:
    half = convert_checkpoint(saved / "zero3", tmp_path / "half.ckpt", dtype="bf16", weights_only=True)
    module = load_from_checkpoint(Odd, half)
    assert module.up.weight.dtype == torch.float32
    assert torch.equal(module.up.weight, read(saved / "zero3")["state_dict"]["up.weight"].bfloat16().float())


def test_frozen_weights_that_were_left_out_are_warned_of(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "fsdp2", tmp_path / "c")
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    manifest["left_out"] = ["more"]
    (tmp_path / "c" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.warns(UserWarning, match="without its 1 frozen parameters.*'more'"):
        module = load_from_checkpoint(Bigger, tmp_path / "c")
    assert module.more.tolist() == [7.0, 7.0]


def test_a_module_that_lightningcli_made_is_made_again(tmp_path: Path) -> None:
    module = Odd(width=4)
    key = Odd.CHECKPOINT_HYPER_PARAMS_KEY
    own = {"width": 4, "_instantiator": "lightning.pytorch.cli.instantiate_module"}
    contents = {"state_dict": module.state_dict(), key: own}
    torch.save(contents, tmp_path / "a.ckpt")
    assert load_from_checkpoint(Odd, tmp_path / "a.ckpt").up.out_features == 4
    torch.save({**contents, key: {**own, "_instantiator": "os.system"}}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"os\.system"):
        load_from_checkpoint(Odd, tmp_path / "a.ckpt")


def test_public_names_are_the_functions() -> None:
    from lightning_shard.checkpoint import convert, inference, inspect

    assert lightning_shard.convert_checkpoint is convert.convert
    assert lightning_shard.inspect_checkpoint is inspect.inspect
    assert lightning_shard.load_from_checkpoint is inference.load_from_checkpoint

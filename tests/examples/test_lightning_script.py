"""A script of Lightning's documentation becomes ours by one import line and the strategy's name."""

import os
import subprocess
import sys
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shard.testing import run_distributed
from tests.examples.scripts import as_script

pytestmark = pytest.mark.ranks

# The script that Lightning's documentation asks for in reports, and predict.
SCRIPT = """\
import os

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader


def run():
    train_data = DataLoader(RandomDataset(32, 64), batch_size=2)
    val_data = DataLoader(RandomDataset(32, 64), batch_size=2)
    test_data = DataLoader(RandomDataset(32, 64), batch_size=2)

    model = BoringModel()
    trainer = Trainer(
        default_root_dir=os.getcwd(),
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        limit_train_batches=3,
        limit_val_batches=1,
        limit_test_batches=1,
        num_sanity_val_steps=0,
        max_epochs=1,
        enable_model_summary=False,
    )
    trainer.fit(model, train_dataloaders=train_data, val_dataloaders=val_data)
    trainer.save_checkpoint("fitted.ckpt")
    trainer.test(model, dataloaders=test_data)
    trainer.predict(model, dataloaders=test_data)
    trainer.save_checkpoint("weights.ckpt")
    trainer.print(f"step {trainer.global_step}")


if __name__ == "__main__":
    run()
"""


def launched(folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def on_running_ranks(folder: Path) -> str:
    (code, printed), (other, _) = run_distributed(as_script, 2, [str(folder / "train.py")])
    assert code == other == 0
    return printed


@pytest.mark.parametrize(("name", "run"), [("zero2", on_running_ranks), ("zero3_offload", launched)])
def test_only_the_import_and_the_name_change(
    name: str, run: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = SCRIPT.replace("import torch\n", "import lightning_shard\nimport torch\n", 1)
    ours = ours.replace('strategy="ddp"', f'strategy="{name}"')
    changed = [line for line in unified_diff(SCRIPT.splitlines(), ours.splitlines(), n=0) if line[0] in "+-"][2:]
    assert len(changed) == 3, "one line added, one line replaced"
    folder = tmp_path / "a script"
    folder.mkdir()
    (folder / "train.py").write_text(ours)
    monkeypatch.chdir(folder)
    assert "step 3" in run(folder)
    assert (folder / "fitted.ckpt" / "manifest.json").is_file()
    assert BoringModel.load_from_checkpoint(folder / "weights.ckpt").layer.weight.abs().sum() > 0

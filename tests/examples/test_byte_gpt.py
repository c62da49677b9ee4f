import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import psutil
import pytest
import torch

from examples.byte_gpt import ByteGPT, ByteText
from examples.demo import compare
from lightning_shard.testing import run_distributed
from tests.examples.scripts import as_script

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--layers=1", "--heads=2", "--width=32", "--context=16", "--batch-size=4"]


def text(folder: Path) -> str:
    (folder / "b.py").write_text("second = 2\n" * 100)
    (folder / "a.py").write_text("".join(f"first_{number} = {number}\n" for number in range(400)))
    return str(folder)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The example in a folder with a space, from which the package is found through PYTHONPATH only."""
    folder = tmp_path_factory.mktemp("somewhere") / "a folder" / "examples"
    shutil.copytree(ROOT / "examples", folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "byte_gpt.py"


@pytest.mark.ranks
def test_demo_trains_as_one_process_does_and_says_so(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    first, second = run_distributed(as_script, 2, [str(script), *TINY, "--steps=6", "--sample=8"], timeout=200.0)
    code, said = first
    assert code == 0, said
    assert second == (0, "")
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.e+-]+)$", said, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 6]
    for _, parallel, reference, _ in rows:
        assert float(parallel) == pytest.approx(float(reference), abs=1e-4)
    assert float(rows[-1][1]) < float(rows[0][1])
    assert "the same training" in said
    parameters = sum(parameter.numel() for parameter in ByteGPT(16, 1, 2, 32).parameters())
    assert f"Ψ = {parameters:,} parameters, N = 2 ranks" in said
    assert re.search(r"^optimizer states +8Ψ/N", said, re.MULTILINE)
    assert "A sample after 6 steps:\ndef " in said


@pytest.mark.ranks
def test_interrupt_leaves_no_process(script, tmp_path):
    with (tmp_path / "said.txt").open("w") as said:
        demo = subprocess.Popen(
            [sys.executable, str(script), *TINY, "--steps=1000000", "--no-reference"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A test run in the background ignores Ctrl-C, and so would all that it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def group() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["status"]):
            try:
                if os.getpgid(process.pid) == demo.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except ProcessLookupError:
                pass
        return found

    try:
        deadline = time.monotonic() + 90
        while "MEMBER: 2/2" not in (tmp_path / "said.txt").read_text():  # rank 1, started by rank 0, has joined it
            assert demo.poll() is None, (tmp_path / "said.txt").read_text()
            assert time.monotonic() < deadline, (tmp_path / "said.txt").read_text()
            time.sleep(0.2)
        time.sleep(2)  # into the training
        assert demo.poll() is None
        assert len(group()) >= 2
        os.killpg(demo.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
        assert demo.wait(timeout=60) != 0
        deadline = time.monotonic() + 20
        while group() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert group() == []
    finally:
        for process in group():
            process.kill()
        demo.wait()


def test_a_difference_is_found(capsys):
    assert compare([2.0, 1.0], [2.0, 1.00009], tolerance=1e-4)
    assert not compare([2.0, 1.0], [2.0, 1.00011], tolerance=1e-4)
    assert "NOT the same training" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_the_batches_that_one_process_reads(tmp_path, ranks):
    def batches(rank: int, ranks: int) -> list[torch.Tensor]:
        data = ByteText(context=16, batch_size=4, folder=text(tmp_path), val_share=0.2)
        data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": ranks, "rank": rank})
        data.setup("fit")
        return [*data.train_dataloader(), *data.val_dataloader()]

    whole = batches(0, 1)
    parts = [batches(rank, ranks) for rank in range(ranks)]
    assert len(whole) > 50
    for step, batch in enumerate(whole):
        rows = torch.cat([part[step] for part in parts])
        assert rows.shape == batch.shape == (4, 17)
        assert sorted(rows.tolist()) == sorted(batch.tolist())
    assert batches(0, 1)[3].tolist() == whole[3].tolist()


def test_text_is_read_in_the_order_of_names_up_to_the_limit(tmp_path):
    data = ByteText(context=16, batch_size=1, folder=text(tmp_path), max_bytes=1000, val_share=0.1)
    data.setup("fit")
    assert bytes(data.train_windows[0].tolist()).decode() == "first_0 = 0\nfirst"
    assert len(data.train_windows) == (900 - 1) // 16
    assert len(data.val_windows) == (100 - 1) // 16


def test_refusals_name_both_numbers(tmp_path):
    with pytest.raises(ValueError, match=r"width=10 .* heads=3"):
        ByteGPT(width=10, heads=3)
    data = ByteText(context=16, batch_size=3, folder=text(tmp_path))
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 0})
    data.setup("fit")
    with pytest.raises(ValueError, match=r"batch_size=3 .* 2 ranks"):
        data.train_dataloader()
    empty = tmp_path / "no text"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"9 bytes .* context=8"):
        ByteGPT(context=8, layers=1, heads=1, width=8)(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match=r"no text.* 0 bytes"):
        ByteText(folder=str(empty)).setup("fit")


def test_model_is_causal_and_has_about_ten_million_parameters():
    assert 10e6 < sum(parameter.numel() for parameter in ByteGPT().parameters()) < 12e6
    model = ByteGPT(context=8, layers=2, heads=2, width=16)
    tokens = torch.randint(0, 256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.allclose(before[:5], after[:5], atol=1e-6)
    assert not torch.allclose(before[5], after[5])


def test_tied_head_is_the_embedding():
    model = ByteGPT(context=8, layers=1, heads=2, width=16, tied=True)
    assert model.head.weight is model.embedding.weight


@pytest.mark.ranks
def test_partitioned_model_samples_what_a_whole_one_does(tmp_path):
    folder = text(tmp_path)

    def sampled(strategy: str, ranks: int) -> str:
        class Sampler(pl.Callback):
            text = ""

            def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
                self.text = pl_module.sample("first_", 24)

        pl.seed_everything(1, verbose=False)
        sampler = Sampler()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=strategy,
            max_steps=3,
            limit_val_batches=1,
            callbacks=[sampler],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(ByteGPT(16, 1, 2, 32, lr=1e-2), datamodule=ByteText(16, 4, folder, val_share=0.2))
        return sampler.text

    whole = sampled("auto", 1)
    assert whole.startswith("first_")
    assert run_distributed(sampled, 2, "zero3_offload", 2) == [whole, whole]

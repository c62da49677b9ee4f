import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from examples.gan_fsdp2 import CLOUDS, Drawing, Ring, RingGAN, centres, covered, plot
from lightning_shard.testing import run_distributed
from tests.examples.scripts import as_script

SCRIPT = str(Path(__file__).resolve().parents[2] / "examples" / "gan_fsdp2.py")


def run(*arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, SCRIPT, "--width=32", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        start_new_session=True,  # a failing rank kills the process that started it, not this one
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr  # Lightning logs to the second, and the table of units with it


def losses(output: str) -> list[float]:
    (found,) = re.findall(r"last losses: discriminator ([\d.]+), generator ([\d.]+)\.$", output, re.MULTILINE)
    return [float(value) for value in found]


@pytest.mark.ranks
def test_two_ranks_train_both_networks_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = run("--steps=20", "--batch-size=64")
    assert "Under fsdp2 on 2 ranks, 20 steps" in sharded
    assert re.search(r"^\d of 8 clouds covered; \d+% of the points lie in one\.$", sharded, re.MULTILINE)
    # The table names the units of both networks.
    for unit in ("generator.2", "generator.3", "discriminator.2", "discriminator.3"):
        assert re.search(rf"^{re.escape(unit)} +1,056 ", sharded, re.MULTILINE)
    same = ["--width=32", "--steps=20", "--batch-size=64", "--strategy=auto", "--devices=1"]
    monkeypatch.chdir(tmp_path)
    ((code, whole),) = run_distributed(as_script, 1, [SCRIPT, *same])
    assert code == 0, whole
    assert losses(sharded) == pytest.approx(losses(whole), abs=1e-4)


def test_the_generator_learns_the_ring() -> None:
    pl.seed_everything(0, verbose=False)
    model, drawing = RingGAN(), Drawing()
    untrained, _ = covered(model(torch.randn(1000, 4)).detach())
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[drawing],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=Ring(steps=400))
    hit, share = covered(drawing.points)
    assert untrained == 0
    assert hit >= CLOUDS - 2
    # Points anywhere in the square of the plot would be in a cloud in one case of eight.
    assert share > 0.4


def test_all_clouds_are_covered_by_real_points() -> None:
    points, _ = Ring(steps=8).rows.tensors
    hit, share = covered(points)
    assert hit == CLOUDS
    assert share > 0.99
    assert covered(points[(points - centres()[0]).norm(dim=1) < 0.3])[0] == 1
    assert covered(torch.zeros(100, 2)) == (0, 0.0)


def test_plot_shows_points_where_they_are() -> None:
    lines = plot(torch.tensor([[-1.39, -1.39], [1.39, 1.39], [5.0, 0.0]]), columns=9, rows=5).splitlines()
    assert [line.rstrip() for line in lines] == ["        .", "", "", "", "."]
    assert plot(torch.zeros(100, 2), columns=3, rows=1) == " #"


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_the_batches_that_one_process_reads(ranks: int) -> None:
    def batches(rank: int, ranks: int) -> list[list[torch.Tensor]]:
        data = Ring(steps=3, batch_size=8)
        data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": ranks, "rank": rank})
        return list(data.train_dataloader())

    whole = batches(0, 1)
    parts = [batches(rank, ranks) for rank in range(ranks)]
    assert len(whole) == 3
    for step, batch in enumerate(whole):
        for index, expected in enumerate(batch):
            rows = torch.cat([part[step][index] for part in parts])
            assert sorted(rows.tolist()) == sorted(expected.tolist())


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    data = Ring(steps=1, batch_size=5)
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 0})
    with pytest.raises(ValueError, match=r"batch_size=5 .* 2 ranks"):
        data.train_dataloader()

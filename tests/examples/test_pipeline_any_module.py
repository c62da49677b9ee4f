import os
import re
from pathlib import Path

import pytest
import torch

from examples.pipeline_any_module import GPT2
from lightning_shard.testing import run_distributed
from tests.examples.scripts import as_script

SCRIPT = str(Path(__file__).resolve().parents[2] / "examples" / "pipeline_any_module.py")
TINY = ["--layers=2", "--heads=2", "--width=16", "--context=15", "--batch-size=6", "--steps=6"]


def run(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output, and standard error, to which Lightning logs the table of stages."""
    logged = Path(f"logged by rank {os.environ['RANK']}.txt").resolve()
    with logged.open("w") as file:
        os.dup2(file.fileno(), 2)
        code, said = as_script(arguments)
    return code, said, logged.read_text()


@pytest.mark.ranks
def test_two_stages_train_as_one_process_does_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code, said, logged), second = run_distributed(run, 2, [SCRIPT, *TINY], timeout=200.0)
    assert code == 0, said + logged
    assert second[:2] == (0, "")
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.e+-]+)$", said, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 6]
    for _, parallel, reference, _ in rows:
        assert float(parallel) == pytest.approx(float(reference), abs=1e-4)
    assert float(rows[-1][1]) < float(rows[0][1])
    assert "6 steps" in said
    assert ": the same training." in said
    # The stages together have every parameter, and both have the embedding, which is the head's weight too.
    counts = re.findall(r"^ +\d +\d +model\.\S+ +model\.\S+ +([\d,]+) +[\d.]+% +[\d,]+$", logged, re.MULTILINE)
    model = GPT2(context=15, layers=2, heads=2, width=16)
    assert model.model.lm_head.weight is model.model.transformer.wte.weight
    sizes = sum(parameter.numel() for parameter in model.parameters())
    assert len(counts) == 2
    assert sum(int(count.replace(",", "")) for count in counts) == sizes + model.model.lm_head.weight.numel()


def test_the_loss_is_that_of_the_next_byte() -> None:
    torch.manual_seed(0)
    model = GPT2(context=7, layers=1, heads=2, width=16)
    windows = torch.randint(0, 256, (3, 8))
    with torch.no_grad():
        found = model.loss(windows)
        logits = model.model(input_ids=windows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert float(found) == pytest.approx(float(expected), abs=1e-6)

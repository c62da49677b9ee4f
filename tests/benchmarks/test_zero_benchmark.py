import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.zero import judge, main

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/zero.py", *arguments]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.ranks
def test_quick_run_compares_the_same_work() -> None:
    ended = run("--quick", "--stages", "2", "--json")
    assert ended.returncode == 0, ended.stderr
    device, offloaded = json.loads(ended.stdout)
    assert [device["offload"], offloaded["offload"]] == [False, True]
    for result in (device, offloaded):
        assert (result["stage"], result["pairs"]) == (2, 5)
        # Two blocks: a norm, and two linear layers with their biases.
        assert result["parameters"] == 2 * (2 * 32 + 2 * 32 * 128 + 128 + 32)
        assert result["bare_ms"] > 0
        assert result["ours_ms"] > 0
        assert result["cpu_ratio"] > 0.5  # the Trainer's step computes all that the bare one does
        assert result["verdict"] == judge(result["bare_ms"], result["ratio"], result["bare_against_bare"])


def test_too_few_pairs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--pairs", "4"])
    assert ended.value.code == 2
    assert "--pairs 4: at least 5" in capsys.readouterr().err


def test_noise_gives_no_verdict() -> None:
    assert judge(60, 1.09, 1.0) == "met"
    assert judge(60, 1.11, 1.0) == "missed"
    assert judge(250, 1.06, 0.98) == "missed"
    assert judge(250, 1.04, 1.02) == "met"
    assert judge(250, 1.00, 1.04) == judge(250, 1.00, 0.96) == "inconclusive"
    assert judge(10, 1.5, 1.0) == "no target"

"""The package as a whole: what it costs to import, what its lock file holds, and the rules that all its files keep."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from lightning_shard.registry import NAMES

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for folder in ("lightning_shard", "cli") for path in (ROOT / folder).rglob("*.py"))
LONGEST_FILE = 350


# --- the lock file ---------------------------------------------------------------------------------------------------


def locked() -> dict[str, str]:
    """The lock file as ``{canonical name: version}``; any line that is no exact pin fails."""
    pins = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!]+)", line)
            assert match, f"requirements.lock: {line!r} is not name==version without a local suffix"
            pins[canonicalize_name(match[1])] = match[2]
    return pins


def declared() -> list[Requirement]:
    """The requirements of ``pyproject.toml`` that the lock file must meet: the package's own and those of ``dev``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]]


def reached(requirements: list[Requirement]) -> Iterator[Requirement]:
    """Walk the installed packages from ``requirements`` and yield each requirement met on the way."""
    seen: set[tuple[str, str]] = set()
    pending = [(requirement, "") for requirement in requirements]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        yield requirement
        for wanted in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), wanted)
            if key not in seen:
                seen.add(key)
                needs = importlib.metadata.requires(requirement.name) or []
                pending += [(Requirement(text), wanted) for text in needs]


def test_lock_holds_plain_torch() -> None:
    assert locked()["torch"] == "2.13.0"


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_lock_is_inside_the_declared_ranges(requirement: Requirement) -> None:
    version = locked().get(canonicalize_name(requirement.name))
    assert version is not None, f"{requirement} has no line in requirements.lock"
    assert requirement.specifier.contains(Version(version)), f"{version} is outside {requirement}"


def test_nothing_is_capped() -> None:
    capped = [str(r) for r in declared() if any(s.operator not in (">=", ">") for s in r.specifier)]
    assert not capped, f"an upper bound locks users out of releases that work: {capped}"


def test_lock_is_complete() -> None:
    pins = locked()
    missing = {
        requirement.name
        for requirement in reached(declared())
        if canonicalize_name(requirement.name) not in pins
        and not re.match(r"(nvidia|cuda|triton)\b", requirement.name)  # pinned exactly by torch's CUDA build itself
    }
    assert not missing, f"needed by an installed package, but not in requirements.lock: {sorted(missing)}"


# --- the import ------------------------------------------------------------------------------------------------------

PROBE = """
import importlib, json, sys, time
import lightning.pytorch
import torch.distributed
from lightning.pytorch.strategies import StrategyRegistry

before = set(sys.modules)
theirs = set(StrategyRegistry)
seconds = []
for _ in range(10):
    for name in set(sys.modules) - before:  # the package and all that only it has brought along
        del sys.modules[name]
    start = time.process_time()  # what else the machine does is no part of it
    import lightning_shard
    seconds.append(time.process_time() - start)
brought = sorted(set(sys.modules) - before)
importlib.reload(lightning_shard)
importlib.reload(sys.modules["lightning_shard.registry"]).register_strategies()
print(json.dumps({
    "seconds": min(seconds),
    "brought": brought,
    "group": torch.distributed.is_initialized(),
    "names": sorted(set(StrategyRegistry) - theirs),
}))
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    """What importing the package does in a fresh process: its cost, twice more, then a reload."""
    run = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def test_import_is_cheap(probe: dict[str, Any]) -> None:
    # A promise of 50 ms, held on slower machines than this one because the strategies are imported when first used.
    assert [name for name in probe["brought"] if name.startswith("lightning_shard.strategies.")] == []
    assert probe["seconds"] < 0.050, f"importing lightning_shard takes {probe['seconds'] * 1e3:.0f} ms beyond lightning"


def test_import_brings_no_deepspeed_and_no_process_group(probe: dict[str, Any]) -> None:
    assert "lightning_shard" in probe["brought"]
    assert [name for name in probe["brought"] if name.split(".")[0] == "deepspeed"] == []
    assert probe["group"] is False


def test_import_registers_exactly_our_names_however_often(probe: dict[str, Any]) -> None:
    assert probe["names"] == sorted(NAMES)


def test_names_are_lowercase() -> None:
    # Lightning lowers the name before it looks it up: one with a capital could never be chosen.
    assert [name for name in NAMES if name != name.lower()] == []


# --- rules that all files keep ---------------------------------------------------------------------------------------


def private_imports(source: str) -> list[str]:
    """The imports of private modules or members of torch, Lightning or DeepSpeed in a file's text."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [
        name for name in names if re.match(r"(torch|lightning|lightning_fabric|deepspeed)\.(.+\.)?_[a-z]", name, re.I)
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch.distributed._composable import fsdp", ["torch.distributed._composable.fsdp"]),
        ("def f():\n    from lightning.fabric.utilities import _Stateful", ["lightning.fabric.utilities._Stateful"]),
        ("import deepspeed._x as x", ["deepspeed._x"]),
        ("from lightning_shard._compat import engine\nfrom torch import nn\nfrom . import _near", []),
    ],
)
def test_private_imports_are_seen(source: str, found: list[str]) -> None:
    assert private_imports(source) == found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_file(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE, f"{path.name} is longer than {LONGEST_FILE} lines: one idea a file"
    if "_compat" not in path.parts:
        assert private_imports(text) == [], f"{path.name}: private API of others belongs in lightning_shard/_compat"


def test_types_are_published() -> None:
    assert (ROOT / "lightning_shard" / "py.typed").exists()


# --- what the documents promise --------------------------------------------------------------------------------------


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_make_commands_exist(document: str) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", (ROOT / document).read_text(), re.MULTILINE))
    assert named, f"{document} names no make command"
    assert named <= make_targets()


def test_readme_lists_the_registered_names() -> None:
    table = re.findall(r"^\| `([a-z0-9_]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert table == list(NAMES)


def test_ci_runs_the_readmes_checks() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    commands = [line for line in ci.splitlines() if line.startswith("make ")]
    assert commands == ["make lint", "make test"]
    assert all(re.search(rf"^{command}\b", readme, re.MULTILINE) for command in commands)


def test_without_deepspeed_the_import_works_and_the_strategy_names_what_is_missing(tmp_path: Path) -> None:
    script = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "deepspeed":
            raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")

sys.meta_path.insert(0, Missing())
import lightning_shard
try:
    lightning_shard.ZeROStrategy()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
    env = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}  # no compiler on this PATH either
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True)
    assert "deepspeed" in result.stdout.lower(), result.stdout

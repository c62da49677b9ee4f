"""Write ``requirements.lock``: the exact versions that a fresh environment gets from the ranges in ``pyproject.toml``.

Run it with ``make lock``. Everything is installed into a temporary environment, which is then listed. Local version
suffixes, such as the ``+cpu`` of a CPU-only torch, are dropped: they name a build, not a version.
"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK_FILE = ROOT / "requirements.lock"

HEADER = """\
# Exact versions of everything in a fresh development environment. Written by `make lock`; not edited by hand.
# torch pins the CUDA libraries of its Linux build exactly by itself, so they are not repeated here.
"""

# Held below what the ranges allow, and raised by hand: the strategies rest on behaviour checked in this release.
HELD = ["torch==2.13.0"]

# Wheels that only some builds of torch bring along.
PLATFORM_PACKAGES = re.compile(r"(nvidia|cuda|triton)\b", re.IGNORECASE)

# The tool that installs, and the project itself, are not requirements of it.
NOT_LISTED = {"pip", "lightning-shard"}


def pins(frozen: str) -> list[str]:
    """Turn ``pip freeze --all`` lines into sorted ``name==version`` pins.

    Raises:
        ValueError: If a line is no plain pin, such as a package installed from a path.

    """
    found = []
    for line in frozen.splitlines():
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^+\s]+)(\+\S+)?", line)
        if match is None:
            raise ValueError(f"{line!r} is no exact version, so it cannot go into {LOCK_FILE.name}.")
        name, version = match[1], match[2]
        if name not in NOT_LISTED and not PLATFORM_PACKAGES.match(name):
            found.append(f"{name}=={version}")
    return sorted(found, key=str.lower)


def main() -> None:
    """Install the project's ranges from nothing and record what came."""
    with tempfile.TemporaryDirectory() as folder:
        venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
        pip = [str(Path(folder) / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", f"{ROOT}[dev]", *HELD], check=True)
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", "lightning-shard"], check=True)
        frozen = subprocess.run([*pip, "freeze", "--all"], check=True, capture_output=True, text=True).stdout
    lines = pins(frozen)
    LOCK_FILE.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{LOCK_FILE.name}: {len(lines)} packages, Python {sys.version_info.major}.{sys.version_info.minor}.")


if __name__ == "__main__":
    main()

"""Make ``.venv`` match ``requirements.lock`` and ``pyproject.toml``; do nothing when it already does.

The environment carries a state file that is emptied before anything is changed and filled, in one rename, when all is
done: an interrupted installation is never mistaken for a finished one. Standard library only, since this runs before
anything is installed.
"""

import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STATE = VENV / "lightning-shard.json"
LOCK_FILE = ROOT / "requirements.lock"
PROJECT_FILE = ROOT / "pyproject.toml"

UNFINISHED = "{}\n"


def wanted_state() -> dict[str, str]:
    """All that the environment depends on. It holds absolute paths, so the place of the checkout counts too."""
    return {
        "place": str(ROOT),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        LOCK_FILE.name: hashlib.sha256(LOCK_FILE.read_bytes()).hexdigest(),
        PROJECT_FILE.name: hashlib.sha256(PROJECT_FILE.read_bytes()).hexdigest(),
    }


def found_state() -> dict[str, str]:
    """What the last finished installation recorded; empty when there is none or it did not finish."""
    try:
        state: dict[str, str] = json.loads(STATE.read_text())
    except (OSError, ValueError):
        return {}
    return state if (VENV / "bin" / "python").exists() else {}


def pip(*arguments: str, held: int) -> None:
    """Run the environment's own pip.

    Args:
        arguments: What follows ``pip`` on its command line.
        held: Descriptor of the locked file. pip inherits it, so that the lock outlives this process while pip runs.

    """
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, pass_fds=(held,))


def create() -> None:
    """Put a new, empty environment in place of whatever outdated or half-made one is there.

    Raises:
        SystemExit: If ``.venv`` was not made by this script, or this Python cannot make environments.

    """
    if importlib.util.find_spec("ensurepip") is None:
        raise SystemExit(f"make: {sys.executable} cannot make virtual environments: install python3-venv.")
    if VENV.exists() and not STATE.exists() and any(VENV.iterdir()):
        raise SystemExit(f"make: {VENV} was not made by make and is left alone: move it away, then run make again.")
    VENV.mkdir(exist_ok=True)
    STATE.write_text(UNFINISHED)
    for entry in VENV.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != STATE:
            entry.unlink()
    venv.EnvBuilder(with_pip=True, symlinks=True).create(VENV)


def update(found: dict[str, str], wanted: dict[str, str], held: int) -> None:
    """Install what ``wanted`` names and record it.

    When ``pyproject.toml`` alone has changed, only the project is installed again. For all else the environment is made
    from nothing, so that no package of an older lock file stays behind.
    """
    only_the_project = bool(found) and {**found, PROJECT_FILE.name: ""} == {**wanted, PROJECT_FILE.name: ""}
    if only_the_project:
        STATE.write_text(UNFINISHED)
    else:
        create()
        print(f"make: installing {LOCK_FILE.name} into .venv; once, a minute or more ...", flush=True)
        pip("install", "-r", LOCK_FILE.name, held=held)
    pip("install", "--no-deps", "--no-build-isolation", "-e", ".", held=held)
    finished = STATE.with_suffix(".finished")
    finished.write_text(json.dumps(wanted, indent=2) + "\n")
    finished.replace(STATE)


def main() -> int:
    """Bring ``.venv`` up to date, one process at a time. Returns the exit code."""
    with LOCK_FILE.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("make: waiting for another make that is installing here ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        found, wanted = found_state(), wanted_state()
        try:
            if found != wanted:
                update(found, wanted, lock.fileno())
        except subprocess.CalledProcessError:
            print("make: the installation failed, see pip's message above; make starts it anew.", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("make: the installation was interrupted; make starts it anew.", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

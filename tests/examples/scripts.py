"""Scripts on ranks that run already, as ``torchrun`` starts them: a start of Python takes longer than an example."""

import os
import runpy
import sys
from pathlib import Path


def as_script(arguments: list[str]) -> tuple[int, str]:
    """Run the script ``arguments[0]`` in this process as ``python`` does.

    Returns:
        Its exit code, and what it and the processes that it starts write to standard output.

    """
    said = Path(f"said by rank {os.environ['RANK']}.txt").resolve()
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    code: object = 0
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
        sys.stdout.flush()
    return code if isinstance(code, int) else 1, said.read_text()

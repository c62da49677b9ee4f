"""Lightning reads checkpoints by one private function, which knows files only: teach it folders."""

import os
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins.io import torch_io
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.core import saving

MANIFEST = "manifest.json"
"""What a checkpoint's folder is known by."""

Read = Callable[[Any, "bool | None"], dict[str, Any]]


def read_folders_with(read: Read) -> None:
    """Let ``ckpt_path`` under Lightning's own strategies, and ``load_from_checkpoint``, take a checkpoint's folder.

    Lightning has no place to register a format. Where it would open a folder as a file, which can only fail, ``read``
    is called instead; files are read as before.

    Args:
        read: Takes the path and ``weights_only``, and gives the checkpoint.

    """
    modules: tuple[Any, ...] = (torch_io, saving)
    for module in modules:
        original = module.pl_load
        if not hasattr(original, "_reads_folders"):
            module.pl_load = _reading_folders(original, read)


def _reading_folders(original: Callable[..., Any], read: Read) -> Callable[..., Any]:
    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if _is_in_folders(path_or_url):
            return read(path_or_url, weights_only)
        return original(path_or_url, map_location=map_location, weights_only=weights_only)

    load._reads_folders = True  # type: ignore[attr-defined]
    return load


def _is_in_folders(path: Any) -> bool:
    if not isinstance(path, (str, os.PathLike)) or str(path).startswith("http"):
        return False
    files = get_filesystem(str(path))
    # A file inside such a folder is no checkpoint, either; `read` says so.
    folder = str(path).rpartition("/")[0] or "."
    return bool(files.isdir(str(path)) or files.exists(f"{folder}/{MANIFEST}"))

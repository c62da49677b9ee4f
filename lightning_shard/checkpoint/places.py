"""Where a checkpoint lies: on a local file system, or on any other that fsspec knows.

A local checkpoint is written under a temporary name and renamed. Other file systems (object stores) cannot rename
folders: there the data goes to a new folder of its own below, and the manifest that names it is written last.
"""

import io
import os
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any, cast
from uuid import uuid4

from fsspec.core import split_protocol, url_to_fs

from lightning_shard.checkpoint.format import MANIFEST
from lightning_shard.checkpoint.whole import move_to, old_of, partial_of, remove


def place_of(path: Any) -> "Place":
    """The place that a path or URL names."""
    protocol, rest = split_protocol(os.fspath(path))
    if protocol in (None, "file", "local"):
        return LocalPlace(Path(rest))
    return RemotePlace(os.fspath(path))


class Place(ABC):
    """A path at which a checkpoint is, or is to be."""

    @abstractmethod
    def __str__(self) -> str:
        """As the user names it."""

    @abstractmethod
    def exists(self, name: str = "") -> bool:
        """Whether there is something, at the path itself or below."""

    @abstractmethod
    def is_folder(self) -> bool:
        """Whether it is a folder."""

    @abstractmethod
    def names(self) -> list[str]:
        """What lies in the folder."""

    @abstractmethod
    def size(self, name: str = "") -> int:
        """Bytes of a file."""

    @abstractmethod
    def open(self, name: str = "") -> IO[bytes]:
        """A file below, or the path itself, for reading."""

    @abstractmethod
    def parent(self) -> "Place":
        """The folder that this lies in."""

    def replaced(self) -> str | None:
        """Where an old checkpoint was put aside by a run that was killed before the new one stood here."""
        return None

    def read_bytes(self, name: str) -> bytes:
        """A small file's content."""
        with self.open(name) as file:
            return file.read()

    # --- writing: rank 0 begins, all ranks write to the folder, rank 0 commits or abandons ---

    @abstractmethod
    def begin(self) -> str:
        """Make room for a new checkpoint beside the old one.

        Returns:
            The name of the data's folder, for all ranks.

        """

    @abstractmethod
    def folder(self, data: str) -> str:
        """The path or URL at which the new checkpoint's data is written."""

    @abstractmethod
    def write(self, data: str, name: str, content: bytes) -> None:
        """Write a file of the new checkpoint's data, to the disk itself."""

    @abstractmethod
    def commit(self, data: str, manifest: str) -> None:
        """Make the new checkpoint the one that stands here, at once."""

    @abstractmethod
    def abandon(self, data: str) -> None:
        """Remove what was written of the new checkpoint."""


class LocalPlace(Place):
    """A path of this machine's file systems, shared ones included."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        """The path."""
        return str(self.path)

    def exists(self, name: str = "") -> bool:
        """Whether there is something."""
        return (self.path / name).exists()

    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.path.is_dir()

    def names(self) -> list[str]:
        """What lies in the folder."""
        return sorted(os.listdir(self.path))

    def size(self, name: str = "") -> int:
        """Bytes of a file."""
        return (self.path / name).stat().st_size

    def open(self, name: str = "") -> IO[bytes]:
        """A file for reading."""
        return (self.path / name).open("rb")

    def parent(self) -> "Place":
        """The folder that this lies in."""
        return LocalPlace(self.path.absolute().parent)

    def replaced(self) -> str | None:
        """The old checkpoint's temporary name, if it is there."""
        old = old_of(self.path)
        return str(old) if old.exists() else None

    def begin(self) -> str:
        """An empty folder under a temporary name."""
        partial = partial_of(self.path)
        remove(partial)  # left by a run that was killed
        partial.mkdir(parents=True)
        return "."

    def folder(self, data: str) -> str:
        """The temporary name."""
        return str(partial_of(self.path))

    def write(self, data: str, name: str, content: bytes) -> None:
        """Write a file and flush it to the disk."""
        with (partial_of(self.path) / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def commit(self, data: str, manifest: str) -> None:
        """Complete the temporary folder and rename it."""
        self.write(data, MANIFEST, manifest.encode())
        partial = partial_of(self.path)
        _flush_folder(partial)
        move_to(partial, self.path)
        _flush_folder(self.path.absolute().parent)

    def abandon(self, data: str) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(partial_of(self.path), ignore_errors=True)


class RemotePlace(Place):
    """A URL of a file system that fsspec knows; nothing is ever renamed there."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._fs, self._root = url_to_fs(self._url)

    def __str__(self) -> str:
        """The URL."""
        return self._url

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name not in ("", ".") else self._root

    def exists(self, name: str = "") -> bool:
        """Whether there is something."""
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self._at(name)))

    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return bool(self._fs.isdir(self._root))

    def names(self) -> list[str]:
        """What lies in the folder."""
        return sorted(path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False))

    def size(self, name: str = "") -> int:
        """Bytes of a file."""
        return int(self._fs.size(self._at(name)))

    def open(self, name: str = "") -> IO[bytes]:
        """A file for reading."""
        return cast(IO[bytes], self._fs.open(self._at(name), "rb"))

    def parent(self) -> "Place":
        """The folder that this lies in."""
        return RemotePlace(self._url.rpartition("/")[0])

    def begin(self) -> str:
        """A new folder's name; object stores need no folder itself."""
        data = f"data-{uuid4().hex[:12]}"
        self._fs.makedirs(self._at(data), exist_ok=True)
        return data

    def folder(self, data: str) -> str:
        """The new folder's URL."""
        return f"{self._url}/{data}"

    def write(self, data: str, name: str, content: bytes) -> None:
        """Write an object."""
        self._fs.pipe_file(self._at(f"{data}/{name}"), content)

    def commit(self, data: str, manifest: str) -> None:
        """Write the manifest, which names the new folder; then remove the old one."""
        self._fs.pipe_file(self._at(MANIFEST), manifest.encode())
        self._fs.invalidate_cache()
        for name in self.names():
            if name.startswith("data-") and name != data:
                self._fs.rm(self._at(name), recursive=True)

    def abandon(self, data: str) -> None:
        """Remove the new folder."""
        if self._fs.exists(self._at(data)):
            self._fs.rm(self._at(data), recursive=True)


class Below(io.RawIOBase):
    """A range of an open file, as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    def readable(self) -> bool:
        """It is for reading."""
        return True

    def seekable(self) -> bool:
        """Any place can be read."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        """The present place."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read as much as fits."""
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._length - self._place))
        self._file.seek(self._start + self._place)
        done = 0
        while done < wanted and (count := self._file.readinto(view[done:wanted])):  # type: ignore[attr-defined]
            done += count
        self._place += done
        return done


def _flush_folder(folder: Path) -> None:
    """Make renames and new names in a folder last, where the file system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)

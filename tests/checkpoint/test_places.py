"""Local folders that are renamed when they are whole, and URLs whose manifest is written last."""

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from lightning_shard.checkpoint.places import Below, LocalPlace, Place, RemotePlace, place_of


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(tmp_path / "a folder" / "c.ckpt" if request.param == "local" else f"memory://{uuid4().hex}/c.ckpt")


def write(place: Place, text: str, commit: bool = True) -> None:
    data = place.begin()
    place.write(data, "file", text.encode())
    if commit:
        place.commit(data, data)
    else:
        place.abandon(data)


def read(place: Place) -> str:
    with place.open("manifest.json") as file:
        data = file.read().decode()
    with place.open("file" if data == "." else f"{data}/file") as file:
        return file.read().decode()


def test_paths_and_urls(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}", f"{tmp_path}/"):
        found = place_of(path)
        assert isinstance(found, LocalPlace) and found.path == tmp_path and str(found) == str(tmp_path)
    remote = place_of("memory://a b/c.ckpt/")
    assert isinstance(remote, RemotePlace) and str(remote) == "memory://a b/c.ckpt"
    assert str(remote.parent()) == "memory://a b" and str(place_of(tmp_path / "c").parent()) == str(tmp_path)


def test_a_checkpoint_is_there_when_it_is_whole_and_overwritten_at_once(place: Place) -> None:
    assert not place.exists()
    data = place.begin()
    place.write(data, "file", b"first")
    assert not place.exists("manifest.json")
    place.commit(data, data)
    assert place.is_folder() and read(place) == "first" and place.size("manifest.json") == len(data)
    data = place.begin()
    place.write(data, "file", b"second")
    assert read(place) == "first"
    place.commit(data, data)
    assert read(place) == "second"
    assert len(place.names()) == 2 and "manifest.json" in place.names()


def test_what_is_abandoned_leaves_nothing(place: Place) -> None:
    write(place, "never", commit=False)
    assert not place.exists("manifest.json")
    write(place, "first")
    names = place.names()
    write(place, "never", commit=False)
    assert read(place) == "first" and place.names() == names
    if isinstance(place, LocalPlace):
        assert [path.name for path in place.path.parent.iterdir()] == ["c.ckpt"]


def test_what_a_killed_run_has_left_is_no_hindrance(place: Place) -> None:
    write(place, "first")
    place.write(place.begin(), "file", b"half of the second")
    assert read(place) == "first"
    write(place, "third")
    assert read(place) == "third" and len(place.names()) == 2
    if isinstance(place, LocalPlace):
        assert [path.name for path in place.path.parent.iterdir()] == ["c.ckpt"]


@pytest.mark.parametrize("what", ["file", "folder", "link", "dangling link"])
def test_whatever_stands_at_the_path_is_replaced(what: str, tmp_path: Path) -> None:
    path, target = tmp_path / "last.ckpt", tmp_path / "step=1.ckpt"
    target.mkdir()
    (target / "kept").touch()
    if what == "file":
        path.write_text("old")
    elif what == "folder":
        path.mkdir()
    else:
        os.symlink(target.name if what == "link" else "nowhere", path)
    write(place_of(path), "new")
    assert read(place_of(path)) == "new" and not path.is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last.ckpt", "step=1.ckpt"]
    assert [each.name for each in target.iterdir()] == ["kept"]


def test_a_path_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("c.ckpt", "./a/b c/../d.ckpt", Path("e")):
        write(place_of(path), str(path))
        assert read(place_of(path)) == str(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "c.ckpt", "e"]


def test_urls_are_listed_as_they_are_now(tmp_path: Path) -> None:
    """A listing of before is no answer for what another process has written since."""
    url = f"memory://{uuid4().hex}/c"
    first, second = place_of(url), place_of(url)
    assert not first.exists("manifest.json")
    write(second, "text")
    assert first.exists("manifest.json") and first.is_folder() and read(first) == "text"


def test_a_part_of_a_file_reads_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    with path.open("rb") as file:
        part = Below(file, 10, 20)
        assert part.read() == bytes(range(10, 30)) and part.read(1) == b""
        assert part.seek(-5, os.SEEK_END) == 15 and part.tell() == 15 and part.read(100) == bytes(range(25, 30))
        assert part.seek(3) == 3 and part.seek(2, os.SEEK_CUR) == 5 and part.read(2) == bytes([15, 16])
        assert Below(file, 95, 20).read() == bytes(range(95, 100)), "the file is shorter"
        other: Any = Below(file, 0, 4)
        part.seek(0)
        assert (other.read(2), part.read(2), other.read(5)) == (bytes([0, 1]), bytes([10, 11]), bytes([2, 3]))


def test_fsspec_knows_the_memory_of_the_test() -> None:
    assert fsspec.filesystem("memory").protocol == "memory"

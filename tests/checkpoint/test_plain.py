"""Lightning's part of a checkpoint: plain data is loaded without running code, the rest lies apart."""

import argparse
import datetime
import enum
import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_shard.checkpoint.plain import dumped, load_plain, put_back, spell, split_plain


class Choice(enum.Enum):
    LEFT = "left"


PLAIN: dict[str, Any] = {
    "numbers": [1, 2.5, 3j, True, None, float("inf")],
    "text": ("a", b"b", ["c"]),
    "by number": {1: "a", (2, 3): "b", 0.5: "c"},
    "ordered": OrderedDict(z=1, a=2),
    "sets": [{1, 2}, frozenset({"a"})],
    "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
    "path": Path("a") / "b",
    "duration": datetime.timedelta(seconds=3),
    "namespace": argparse.Namespace(width=3, path=Path("c")),
    "empty": [{}, [], (), set()],
}
"""All that is loaded without trust."""


def test_plain_data_stays_as_it_is_and_is_loaded_without_trust() -> None:
    kept, apart = split_plain(PLAIN)
    assert apart == {} and kept == PLAIN
    loaded = load_plain(io.BytesIO(dumped(kept)), "c", trusted=False)
    assert loaded == PLAIN
    assert type(loaded["ordered"]) is OrderedDict
    assert list(loaded["ordered"]) == ["z", "a"]


def test_tensors_are_plain_data_with_memory_of_their_own() -> None:
    large = torch.arange(10_000.0)
    value = {"slice": large[:3], "parameter": nn.Parameter(torch.ones(2)), "bf16": torch.ones(2, dtype=torch.bfloat16)}
    assert split_plain(value)[1] == {}
    stored = dumped(value)
    assert len(stored) < 10_000, "a slice brings the whole storage with it"
    loaded = load_plain(io.BytesIO(stored), "c", trusted=False)
    assert loaded["slice"].tolist() == [0, 1, 2] and loaded["bf16"].dtype == torch.bfloat16


def test_what_is_no_plain_data_lies_apart_and_is_put_back() -> None:
    value = {
        "a": {"choice": Choice.LEFT, "b": [1, (2, Choice.LEFT)]},
        "names": argparse.Namespace(choice=Choice.LEFT),
        "sets": {Choice.LEFT},
        3: [Choice.LEFT],
        Choice.LEFT: 4,
    }
    kept, apart = split_plain(value)
    assert {spell(path) for path in apart} == {"a.choice", "a.b.1.1", "names", "sets", "3.0", "Choice.LEFT"}
    load_plain(io.BytesIO(dumped(kept)), "c", trusted=False)
    assert put_back(kept, apart) == value


def test_attribute_dicts_which_torch_cannot_load_safely_lie_apart() -> None:
    value = {"attributes": AttributeDict(width=3, deep=AttributeDict(a=[1])), "b": 1}
    kept, apart = split_plain(value)
    assert list(apart) == [("attributes",)]
    assert load_plain(io.BytesIO(dumped(kept)), "c", trusted=False) == {"attributes": None, "b": 1}
    with pytest.raises(MisconfigurationException, match="holds more than plain data"):
        load_plain(io.BytesIO(dumped(value)), "c", trusted=False)
    assert put_back(kept, load_plain(io.BytesIO(dumped(apart)), "c", trusted=True)) == value


def test_only_with_trust_pickles_are_read() -> None:
    stored = dumped({"choice": Choice.LEFT})
    with pytest.raises(MisconfigurationException, match=r"a file holds more than plain data .*Choice.*trusted=True"):
        load_plain(io.BytesIO(stored), "a file", trusted=False)
    assert load_plain(io.BytesIO(stored), "a file", trusted=True) == {"choice": Choice.LEFT}


class Runs:
    """Unpickled, makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"a": {"b": x}}, lambda x: AttributeDict(a=x)])
@pytest.mark.parametrize("old", [False, True], ids=["zip", "older form"])
def test_nothing_runs(wrap: Any, old: bool, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(wrap(Runs(tmp_path / "ran")), buffer, _use_new_zipfile_serialization=not old)
    buffer.seek(0)
    with pytest.raises(MisconfigurationException, match="can run any code"):
        load_plain(buffer, "c", trusted=False)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 cut", pickle.dumps([1], 2)[:-1], bytes(100)])
def test_damage_is_one_line_with_the_path(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^a/path is damaged, or no checkpoint") as caught:
        load_plain(io.BytesIO(content), "a/path", trusted=False)
    assert "\n" not in str(caught.value) and "trusted" not in str(caught.value)


def test_a_file_that_is_cut_off_anywhere_is_damaged() -> None:
    stored = dumped({"a": torch.arange(50), "b": [1, 2, "text"]})
    for length in range(1, len(stored), 97):
        with pytest.raises(ValueError, match="c is damaged"):
            load_plain(io.BytesIO(stored[:length]), "c", trusted=False)


class Tagged(Tensor):
    """A kind of tensor of the user's own."""


def test_tensors_of_a_class_of_the_users_own_need_trust() -> None:
    value = {"own": torch.ones(2).as_subclass(Tagged)}
    kept, apart = split_plain(value)
    assert list(apart) == [("own",)] and kept == {"own": None}

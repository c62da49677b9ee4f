"""One save at a time in a thread, whose errors are raised where training is."""

import threading
from typing import Any

import pytest
import torch

from lightning_shard.checkpoint import background
from lightning_shard.checkpoint.background import BackgroundSave
from lightning_shard.checkpoint.boxes import Held
from lightning_shard.checkpoint.format import Manifest, WrittenBy
from lightning_shard.checkpoint.save import Contents


def contents(tensor: torch.Tensor, writes: bool = True) -> Contents:
    return Contents(
        tensors={"state_dict.a": Held.whole(tensor, writes)},
        paths={},
        lightning=b"",
        pickled=None,
        manifest=Manifest(written_by=WrittenBy(strategy="none"), saved_at="now"),
    )


class Writer:
    """Stands for writing: waits until it may, and keeps what it was given."""

    def __init__(self) -> None:
        self.may, self.begun = threading.Event(), threading.Event()
        self.written: list[Any] = []
        self.error: Exception | None = None

    def __call__(self, place: Any, contents: Contents, group: Any, shown: bool) -> None:
        self.begun.set()
        assert self.may.wait(10)
        if self.error is not None:
            raise self.error
        boxes = contents.tensors["state_dict.a"].boxes
        self.written.append((place, [box.tensor.clone() for box in boxes]))


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Writer:
    writer = Writer()
    monkeypatch.setattr(background, "write_checkpoint", writer)
    return writer


def test_what_is_written_is_what_was_there_at_the_save(writer: Writer) -> None:
    save, weight = BackgroundSave(), torch.ones(3)
    save.start("first", contents(weight))  # type: ignore[arg-type]
    assert save.in_flight and writer.begun.wait(10)
    weight.fill_(2.0)
    writer.may.set()
    save.finish()
    assert not save.in_flight
    save.start("second", contents(weight))  # type: ignore[arg-type]
    weight.fill_(3.0)
    save.finish()
    assert [(place, tensor.tolist()) for place, (tensor,) in writer.written] == [
        ("first", [1.0] * 3),
        ("second", [2.0] * 3),
    ]


def test_a_second_save_waits_for_the_first(writer: Writer) -> None:
    save, weight = BackgroundSave(), torch.ones(3)
    save.start("first", contents(weight))  # type: ignore[arg-type]
    second = threading.Thread(target=save.start, args=("second", contents(weight)))
    second.start()
    second.join(0.2)
    assert second.is_alive() and writer.written == []
    writer.may.set()
    second.join(10)
    save.finish()
    assert [place for place, _ in writer.written] == ["first", "second"]


def test_removals_wait_for_the_save_and_do_not_happen_if_it_fails(writer: Writer) -> None:
    save, done = BackgroundSave(), []
    save.after(lambda: done.append("at once"))
    assert done == ["at once"]
    save.start("first", contents(torch.ones(3)))  # type: ignore[arg-type]
    save.after(lambda: done.append("later"))
    assert done == ["at once"]
    writer.may.set()
    save.finish()
    assert done == ["at once", "later"]
    writer.error = RuntimeError("disk full")
    writer.may.clear()
    save.start("second", contents(torch.ones(3)))  # type: ignore[arg-type]
    save.after(lambda: done.append("never"))
    writer.may.set()
    with pytest.raises(RuntimeError, match="disk full"):
        save.finish()
    save.after(lambda: done.append("again at once"))
    assert done == ["at once", "later", "again at once"]


def test_an_error_is_raised_once(writer: Writer) -> None:
    save = BackgroundSave()
    writer.error = RuntimeError("disk full")
    save.start("first", contents(torch.ones(3)))  # type: ignore[arg-type]
    save.check()  # it is not known yet
    writer.may.set()
    with pytest.raises(RuntimeError, match="disk full"):
        save.start("second", contents(torch.ones(3)))  # type: ignore[arg-type]
    save.check()
    save.finish()
    assert writer.written == []


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_removal_that_fails_is_an_error_too(writer: Writer) -> None:
    save = BackgroundSave()

    def fails() -> None:
        raise PermissionError("no permission")

    save.start("first", contents(torch.ones(3)))  # type: ignore[arg-type]
    save.after(fails)
    writer.may.set()
    with pytest.raises(PermissionError, match="no permission"):
        save.finish()
    assert not save.in_flight
    save.start("second", contents(torch.ones(3)))  # type: ignore[arg-type]
    save.finish()
    assert [place for place, _ in writer.written] == ["first", "second"]


def test_memory_of_copies_is_used_again_and_given_back(writer: Writer) -> None:
    writer.may.set()
    save, seen = BackgroundSave(), []
    for tensor in (torch.ones(3), torch.zeros(3), torch.zeros(4), torch.zeros(4, dtype=torch.float64)):
        save.start("c", contents(tensor))  # type: ignore[arg-type]
        save.finish()
        (buffer,) = save._buffers.values()
        seen.append(buffer)
        assert torch.equal(buffer, tensor) and buffer.dtype == tensor.dtype
    assert seen[0].data_ptr() == seen[1].data_ptr() and seen[2].shape == (4,) and seen[3].dtype == torch.float64
    save.free()
    assert save._buffers == {}
    save.start("c", contents(torch.ones(3), writes=False))  # type: ignore[arg-type]
    save.finish()
    assert writer.written[-1] == ("c", []) and save._buffers == {}

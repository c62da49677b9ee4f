"""Checkpoints of every kind in one form: what is there, and where each tensor lies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed import checkpoint as dcp

import lightning_shard  # noqa: F401  (registers the names)
from lightning_shard.checkpoint.assemble import assemble, load_whole
from lightning_shard.checkpoint.boxes import Box, Held
from lightning_shard.checkpoint.format import Manifest, WrittenBy, plain_name, state_key, weight_key
from lightning_shard.checkpoint.kinds import kind_of
from lightning_shard.checkpoint.places import place_of
from lightning_shard.checkpoint.plain import dumped
from lightning_shard.checkpoint.progress import Progress
from lightning_shard.checkpoint.save import Contents, write_checkpoint
from lightning_shard.checkpoint.sources import open_source

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

GENERATOR = torch.Generator().manual_seed(1)
WEIGHTS = {
    "a.weight": torch.randn(4, 3, generator=GENERATOR),
    "a.bias": torch.randn(4, generator=GENERATOR).bfloat16(),
    "count": torch.tensor(7),
    "none": torch.empty(0, 3),
}
MOMENTS = {"a.weight": torch.randn(4, 3, generator=GENERATOR), "a.bias": torch.randn(4, generator=GENERATOR)}


def portable(path: Any, **changes: Any) -> Any:
    """A checkpoint in our own format, with a tied weight and one optimizer."""
    tensors = {weight_key(name): Held.whole(tensor) for name, tensor in WEIGHTS.items()}
    tensors |= {state_key(0, name, "exp_avg"): Held.whole(tensor) for name, tensor in MOMENTS.items()}
    paths: dict[str, Any] = {weight_key(name): ("state_dict", name) for name in WEIGHTS}
    paths |= {state_key(0, name, "exp_avg"): ("optimizer_0", "state", name, "exp_avg") for name in MOMENTS}
    values = {name: {"step": torch.tensor(3.0)} for name in MOMENTS}
    part = {
        "lightning": {"epoch": 1, "note": [1, "two"]},
        "optimizers": [{"groups": [{"lr": 0.1}], "values": values}],
        "extra_state": {"a._extra_state": {"b": 1}},
        "own_state": {},
    }
    manifest = {
        "written_by": WrittenBy(strategy="Test"),
        "saved_at": "now",
        "aliases": {"tied": "a.weight"},
        "optimizers": [{"class": "Adam", "groups": [list(MOMENTS)]}],
    }
    contents = Contents(
        tensors=tensors,
        paths=paths,
        lightning=dumped(part),
        pickled=None,
        manifest=Manifest(**{**manifest, **changes}),
    )
    write_checkpoint(place_of(path), contents, None, shown=False)
    return path


def plain_file(path: Path, **changes: Any) -> Path:
    """The same as one process would save it."""
    state = {
        0: {"exp_avg": MOMENTS["a.weight"], "step": torch.tensor(3.0)},
        1: {"exp_avg": MOMENTS["a.bias"], "step": torch.tensor(3.0)},
    }
    contents = {
        "state_dict": {**WEIGHTS, "tied": WEIGHTS["a.weight"], "a._extra_state": {"b": 1}},
        "optimizer_states": [{"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}],
        "epoch": 1,
        "note": [1, "two"],
    }
    torch.save({**contents, **changes}, path)
    return path


def sharded(path: Path, head: str = "state_dict") -> Path:
    """A folder as Lightning's own sharding strategies write it."""
    optimizer = {
        "state": {name: {"exp_avg": tensor, "step": torch.tensor(3.0)} for name, tensor in MOMENTS.items()},
        "param_groups": [{"lr": 0.1, "params": list(MOMENTS)}],
    }
    dcp.save({head: {**WEIGHTS, "tied": WEIGHTS["a.weight"]}, "optimizer_0": optimizer}, checkpoint_id=path)
    torch.save({"epoch": 1, "note": [1, "two"]}, path / "meta.pt")
    return path


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            same(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            same(left, right)
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)
    else:
        assert found == expected


def test_every_kind_of_checkpoint_is_the_same_in_memory(tmp_path: Path) -> None:
    file = plain_file(tmp_path / "c.ckpt")
    expected = torch.load(file)
    same(load_whole(file), expected)
    same(load_whole(portable(tmp_path / "portable")), expected)
    same(load_whole(f"file://{tmp_path}/portable"), expected)
    for head in ("state_dict", "model"):
        found = load_whole(sharded(tmp_path / head, head))
        found["state_dict"]["a._extra_state"] = {"b": 1}
        same(found, expected)
    kinds = {name: kind_of(place_of(tmp_path / name)) for name in ("c.ckpt", "portable", "state_dict")}
    assert kinds == {"c.ckpt": "file", "portable": "portable", "state_dict": "sharded"}


def test_an_object_store_has_the_same(tmp_path: Path) -> None:
    place = place_of(portable("memory://test-of-sources/c"))
    same(assemble(open_source(place, trusted=False)), torch.load(plain_file(tmp_path / "c.ckpt")))
    assert "manifest.json" in place.names()


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    source = open_source(place_of(portable(tmp_path / "c")), trusted=False)
    assert source.weights["tied"] == source.weights["a.weight"] == "state_dict.a.weight"
    assert [key for key in source.reader.stored if "tied" in key] == []
    found = assemble(source)["state_dict"]
    assert found["tied"].data_ptr() == found["a.weight"].data_ptr()


BOXES = {"all": ((0, 0), (4, 3)), "rows": ((1, 0), (2, 3)), "a column": ((0, 2), (4, 1)), "inside": ((1, 1), (2, 2))}


@pytest.mark.parametrize("make", [portable, plain_file, sharded])
@pytest.mark.parametrize("old", [False, True], ids=["", "older form of torch.save"])
def test_a_rank_reads_its_own_boxes_only(make: Any, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if old:
        save = torch.save
        monkeypatch.setattr(torch, "save", lambda *args: save(*args, _use_new_zipfile_serialization=False))
    source = open_source(place_of(make(tmp_path / "c")), trusted=False)
    monkeypatch.undo()
    for offsets, sizes in BOXES.values():
        memory = torch.zeros(10, 10, dtype=torch.float64)  # neither dtype nor strides are those that are stored
        target = memory[2 : 2 + sizes[0], 3 : 3 + sizes[1]]
        held = Held(shape=(4, 3), dtype=torch.float64, boxes=(Box(offsets=offsets, tensor=target),))
        source.reader.read({source.weights["a.weight"]: [held]}, Progress("Reading", 1, shown=False))
        window = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        assert torch.equal(target, WEIGHTS["a.weight"][window].double())
        assert int(memory.count_nonzero()) == sizes[0] * sizes[1]


def test_tensors_with_strides_of_their_own_are_read_right(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    views = {"transposed": base.T, "slice": base[1:3, 2:5], "expanded": base[0, :1].expand(5), "every other": base[::2]}
    torch.save(views, tmp_path / "c.ckpt")
    found = load_whole(tmp_path / "c.ckpt")["state_dict"]
    same(found, views)
    source = open_source(place_of(tmp_path / "c.ckpt"), trusted=False)
    for name, view in views.items():
        part = torch.zeros_like(view[1:])
        box = Box(offsets=(1, *(0,) * (view.dim() - 1)), tensor=part)
        held = Held(shape=tuple(view.shape), dtype=view.dtype, boxes=(box,))
        source.reader.read({source.weights[name]: [held]}, Progress("Reading", 1, shown=False))
        assert torch.equal(part, view[1:]), name


def test_a_bare_state_dict_is_weights_alone(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "c.pt")
    source = open_source(place_of(tmp_path / "c.pt"), trusted=False)
    assert source.optimizers is None and source.weights.keys() == WEIGHTS.keys()
    same(assemble(source)["state_dict"], WEIGHTS)


@pytest.mark.parametrize("contents", [[1, 2], {}, {"weights": 1}, {"state_dict": 3, "epoch": 1}, torch.ones(2)])
def test_what_is_no_checkpoint_is_refused(contents: Any, tmp_path: Path) -> None:
    torch.save(contents, tmp_path / "c.pt")
    with pytest.raises(MisconfigurationException, match=r"c\.pt (holds a \w+, and no|is no Lightning) checkpoint"):
        open_source(place_of(tmp_path / "c.pt"), trusted=False)


def test_names_of_compiled_and_wrapped_modules_are_plain(tmp_path: Path) -> None:
    assert plain_name("net._orig_mod.a._checkpoint_wrapped_module.weight") == "net.a.weight"
    assert plain_name("_orig_mod.weight") == "weight"
    odd = {"net._orig_mod.weight": torch.ones(2), "net._orig_mod._extra_state": 3}
    source = open_source(place_of(plain_file(tmp_path / "c.ckpt", state_dict=odd)), trusted=False)
    assert list(source.weights) == ["net.weight"] and source.extra_state == {"net._extra_state": 3}


def test_manifests_tell_what_they_were_told() -> None:
    written_by = WrittenBy(strategy="S", settings={"stage": 3}, world_size=4, mesh={"pp": 2}, precision="bf16-mixed")
    manifest = Manifest(written_by=written_by, saved_at="now", epoch=1, global_step=7, left_out=["a"], pickled=["b.c"])
    assert Manifest.from_json(manifest.to_json(), "c") == manifest
    with pytest.raises(ValueError, match=r"^c/manifest\.json is no manifest"):
        Manifest.from_json(manifest.to_json()[:-20], "c")
    for broken in ("[]", "3", "null", '{"format": "lightning-shard checkpoint"}', ""):
        with pytest.raises(ValueError, match=r"^c/manifest\.json is no manifest"):
            Manifest.from_json(broken, "c")


def test_entries_that_need_pickle_are_named_and_come_back_with_trust(tmp_path: Path) -> None:
    path = portable(tmp_path / "c", pickled=["fn"])
    with pytest.raises(MisconfigurationException, match=r"no plain data: fn\. To read them can run any code"):
        load_whole(path)
    torch.save({("lightning", "fn"): Path}, tmp_path / "c" / "pickled.pt")
    assert load_whole(path, weights_only=False)["fn"] is Path


def test_an_old_checkpoint_that_was_put_aside_is_named(tmp_path: Path) -> None:
    """A machine died between the two renames of an overwrite."""
    (tmp_path / ".c.ckpt.old").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*c\.ckpt\. .*put aside as .*\.c\.ckpt\.old"):
        kind_of(place_of(tmp_path / "c.ckpt"))

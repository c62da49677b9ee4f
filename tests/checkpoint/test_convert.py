"""Checkpoints in other formats: equal, whole or absent, and with little memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file, load_model
from torch import Tensor

from lightning_shard import consolidate_checkpoint, convert_checkpoint
from lightning_shard.checkpoint import streaming
from lightning_shard.checkpoint.boxes import Box
from tests.checkpoint.formats import ENGINE, FORMATS, PORTABLE, Odd, read
from tests.checkpoint.runs import Ran, assert_same, message_of, rows, run, seeded

pytestmark = pytest.mark.ranks


def assert_equal(found: Any, expected: Any, path: str = "") -> None:
    """Quite equal, dtypes and all."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), path
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), (path, found.keys() ^ expected.keys())
        for key, value in expected.items():
            assert_equal(found[key], value, f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for place, value in enumerate(expected):
            assert_equal(found[place], value, f"{path}.{place}")
    else:
        assert found == expected, path


def resumed(path: Path) -> Ran:
    return run("auto", seeded(Odd, seed=99), rows(), ckpt_path=path, max_epochs=2)


@pytest.mark.parametrize("name", FORMATS)
def test_every_kind_becomes_a_plain_file_with_the_same_values(name: str, saved: Path, tmp_path: Path) -> None:
    target = convert_checkpoint(saved / name, tmp_path / "a file.ckpt")
    expected = read(saved / name)
    assert set(expected["optimizer_states"][0]["state"]) == {0, 1, 2, 3}
    if name == "sharded":  # it stores both names, and does not say that they are tied
        assert_equal(torch.load(target, weights_only=True), expected)
        return
    for mmap in (False, True):
        found = torch.load(target, weights_only=True, mmap=mmap)
        assert_equal(found, expected)
        memory = {found["state_dict"][each].data_ptr() for each in ("up.weight", "tied.weight")}
        assert len(memory) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["a file.ckpt"]


def test_every_kind_resumes_alike_from_the_file_that_it_became(saved: Path, tmp_path: Path) -> None:
    whole = run("auto", seeded(Odd), rows(), max_epochs=2)
    for name in FORMATS:
        found = resumed(convert_checkpoint(saved / name, tmp_path / f"{name}.pt"))
        assert {float(state["step"]) for state in found.optimizer.values()} == {6.0}
        if name != "sharded":  # the module of which synchronizes no gradients but the sharded layer's
            assert_same(found.weights, whole.weights)
            assert_same(found.optimizer, whole.optimizer)
        if name in (*PORTABLE, "sharded"):
            from_source = resumed(saved / name)
            assert_same(found.weights, from_source.weights, atol=0)
            assert_same(found.optimizer, from_source.optimizer, atol=0)


def test_lightning_and_deepspeed_read_the_same_out_of_their_own(saved: Path, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    own = _load_distributed_checkpoint(saved / "sharded")
    found = torch.load(convert_checkpoint(saved / "sharded", tmp_path / "a.ckpt"), weights_only=True)
    assert_equal(found["state_dict"], own["state_dict"])
    names = [name for group in own["optimizer_0"]["param_groups"] for name in group["params"]]
    (optimizer,) = found["optimizer_states"]
    assert_equal(optimizer["state"], {names.index(name): each for name, each in own["optimizer_0"]["state"].items()})
    for name in ENGINE:
        weights = get_fp32_state_dict_from_zero_checkpoint(saved / name, tag="checkpoint")
        found = torch.load(convert_checkpoint(saved / name, tmp_path / "a.ckpt"), weights_only=True)
        assert {"up.weight", "down.weight", "scale", "up.bias", "tied.weight", "shift"} <= weights.keys()
        assert_equal({key: found["state_dict"][key] for key in weights}, weights)


@pytest.mark.parametrize("name", FORMATS)
def test_every_kind_becomes_portable(name: str, saved: Path, tmp_path: Path) -> None:
    target = convert_checkpoint(saved / name, tmp_path / "portable")
    assert_equal(read(target), read(saved / name))
    manifest = json.loads((target / "manifest.json").read_text())
    assert manifest["global_step"] == 3
    assert manifest["aliases"] == ({} if name == "sharded" else {"tied.weight": "up.weight"})
    if name in PORTABLE:
        source = json.loads((saved / name / "manifest.json").read_text())
        assert manifest == source
    if name in (*ENGINE, "plain.ckpt"):
        assert_same(resumed(target).weights, resumed(saved / "plain.ckpt").weights)


def test_torch_itself_reads_the_portable_folder(saved: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = convert_checkpoint(saved / "zero3", tmp_path / "portable")
    dcp_to_torch_save(target, tmp_path / "torch.pt")
    found = torch.load(tmp_path / "torch.pt", weights_only=True)["state_dict"]
    expected = read(saved / "zero3")["state_dict"]
    assert_equal(found, {name: value for name, value in expected.items() if name != "tied.weight"})


@pytest.mark.parametrize("name", ["zero3", "engine2", "plain.ckpt"])
def test_safetensors_hold_the_weights_and_each_tied_one_once(name: str, saved: Path, tmp_path: Path) -> None:
    target = convert_checkpoint(saved / name, tmp_path / "model.safetensors")
    expected = read(saved / name)["state_dict"]
    expected.pop("tied.weight")
    assert_equal(load_file(target), expected)
    with safetensors.safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt", "tied.weight": "up.weight"}
    module = seeded(Odd, seed=5)
    assert load_model(module, target) == (set(), [])
    assert torch.equal(module.tied.weight, expected["up.weight"])


@pytest.mark.parametrize("to", ["lightning", "safetensors", "portable"])
def test_only_floating_point_weights_are_cast(to: Any, saved: Path, tmp_path: Path) -> None:
    target = convert_checkpoint(saved / "zero3", tmp_path / "cast", to=to, dtype="bf16")
    expected = read(saved / "zero3")
    found = {"state_dict": load_file(target)} if to == "safetensors" else read(target)
    for name, value in found["state_dict"].items():
        assert torch.equal(value, expected["state_dict"][name].bfloat16()) and value.dtype == torch.bfloat16
    if to != "safetensors":
        assert_equal(found["optimizer_states"], expected["optimizer_states"])


def test_counters_keep_their_dtype(tmp_path: Path) -> None:
    torch.save(
        {"state_dict": {"n": torch.tensor(2**40), "w": torch.ones(2, 0), "x": torch.rand(3)}}, tmp_path / "a.ckpt"
    )
    for suffix in ("ckpt", "safetensors", "folder"):
        target = convert_checkpoint(tmp_path / "a.ckpt", tmp_path / f"b.{suffix}", dtype="fp16", weights_only=True)
        found = load_file(target) if suffix == "safetensors" else read(target)["state_dict"]
        assert found["n"].dtype == torch.int64 and found["n"].item() == 2**40
        assert found["x"].dtype == torch.float16 and found["w"].shape == (2, 0)


def test_weights_alone_have_nothing_that_belongs_to_a_training(saved: Path, tmp_path: Path) -> None:
    for name in ("fsdp2", "plain.ckpt", "engine3"):
        found = torch.load(convert_checkpoint(saved / name, tmp_path / "w.ckpt", weights_only=True), weights_only=True)
        assert not found.keys() & {"optimizer_states", "lr_schedulers", "callbacks"}
        assert found["hyper_parameters"] == {"width": 5, "note": ""}
        Odd.load_from_checkpoint(tmp_path / "w.ckpt")
    assert "only the model" in message_of(lambda: resumed(convert_checkpoint(tmp_path / "w.ckpt", tmp_path / "w")))


def test_consolidating_a_portable_folder_gives_weights_and_lightnings_part(saved: Path, tmp_path: Path) -> None:
    consolidate_checkpoint(saved / "zero3", tmp_path / "one.ckpt")
    expected = read(saved / "zero3")
    del expected["optimizer_states"]
    assert_equal(torch.load(tmp_path / "one.ckpt", weights_only=True), expected)


class Note:
    """No plain data, with a tensor inside."""

    def __init__(self) -> None:
        self.tensor = torch.arange(5.0)


def test_what_is_no_plain_data_is_refused_unless_trusted(tmp_path: Path) -> None:
    shared = torch.rand(4)
    contents = {"state_dict": {"w": shared}, "callbacks": {"Mine": {"note": Note(), "best": shared[1:]}}, "epoch": 1}
    torch.save(contents, tmp_path / "a.ckpt")
    with pytest.raises(MisconfigurationException, match=r"more than plain data.*Note"):
        convert_checkpoint(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    for target in ("b.ckpt", "portable"):
        convert_checkpoint(tmp_path / "a.ckpt", tmp_path / target, trusted=True)
    with pytest.raises(MisconfigurationException, match=r"callbacks\.Mine\.note"):
        convert_checkpoint(tmp_path / "portable", tmp_path / "c.ckpt")
    convert_checkpoint(tmp_path / "portable", tmp_path / "c.ckpt", trusted=True)
    for name in ("b.ckpt", "c.ckpt"):
        found = torch.load(tmp_path / name, weights_only=False)
        assert torch.equal(found["callbacks"]["Mine"]["note"].tensor, torch.arange(5.0))
        assert torch.equal(found["callbacks"]["Mine"]["best"], shared[1:])
        assert torch.equal(found["state_dict"]["w"], shared)


def test_targets_that_would_lose_something_are_refused(saved: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(saved / "zero3", source)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    (tmp_path / "notes").write_text("mine")
    refused = {
        source: "is the checkpoint that is converted",
        source / "inside.ckpt": "lies inside the other",
        tmp_path: "no checkpoint, and is not overwritten",
        tmp_path / "work": "no checkpoint, and is not overwritten",
        tmp_path / "notes": "is a file",
    }
    for target, reason in refused.items():
        with pytest.raises(MisconfigurationException, match=reason):
            convert_checkpoint(source, target, to="lightning" if target.suffix else "portable")
    with pytest.raises(ValueError, match="dtype='int8' is none of 'bf16'"):
        convert_checkpoint(source, tmp_path / "a", dtype="int8")
    with pytest.raises(ValueError, match="to='onnx' is none of"):
        convert_checkpoint(source, tmp_path / "a", to="onnx")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        convert_checkpoint(tmp_path / "nothing", tmp_path / "a")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes", "source", "work"]
    assert_equal(read(source), read(saved / "zero3"))


@pytest.mark.parametrize("to", ["lightning", "safetensors", "portable"])
@pytest.mark.parametrize("failure", [OSError("No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_checkpoint_and_nothing_else(
    to: Any, failure: BaseException, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = convert_checkpoint(saved / "fsdp2", tmp_path / "kept", to="lightning" if to != "portable" else to)
    before = read(target)
    pieces = streaming.Stream.pieces
    count = 0

    def failing(stream: streaming.Stream) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise failure
        yield from pieces(stream)

    monkeypatch.setattr(streaming.Stream, "pieces", failing)
    with pytest.raises(type(failure)):
        convert_checkpoint(saved / "zero3", target, to=to)
    assert count == 4
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]
    assert_equal(read(target), before)
    monkeypatch.undo()
    convert_checkpoint(saved / "zero3", target, to=to)
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]


def test_an_engine_folder_with_a_missing_rank_is_refused(saved: Path, tmp_path: Path) -> None:
    for name in ("engine2", "engine3"):
        shutil.copytree(saved / name, tmp_path / name)
        (tmp_path / name / "checkpoint" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        with pytest.raises(MisconfigurationException, match=r"1 files of optimizer states.*2"):
            convert_checkpoint(tmp_path / name, tmp_path / "a.ckpt")


def test_states_on_nvme_are_left_out_and_said_so(saved: Path, tmp_path: Path) -> None:
    """The engine's own files have no master weights then; those are in files of each rank."""
    source = tmp_path / "nvme"
    shutil.copytree(saved / "engine3", source)
    folder = source / "checkpoint"
    model = torch.load(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    for rank in range(2):
        file = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        contents = torch.load(file, weights_only=False)
        flats = contents["optimizer_state_dict"]["fp32_flat_groups"]
        for group, shapes in enumerate(model["param_shapes"]):
            layout, place = [], 0
            for name, shape in shapes.items():
                layout.append((name, shape, place, -(-shape.numel() // 2)))
                place += -(-shape.numel() // 2)
            own = folder / f"lightning_shard_nvme_rank_{rank}_group_{group}.pt"
            torch.save({"layout": layout, "master": flats[group] + 0.0, "state": {}}, own)
        contents["optimizer_state_dict"]["fp32_flat_groups"] = [torch.zeros(0) for _ in flats]
        torch.save(contents, file)
    expected = read(saved / "engine3")["state_dict"]
    torch.save(
        {name: value for name, value in expected.items() if name.startswith("frozen")},
        folder / "lightning_shard_nvme_whole.pt",
    )
    with pytest.warns(UserWarning, match="NVMe and are left out; only weights"):
        convert_checkpoint(source, tmp_path / "a.ckpt")
    found = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert_equal(found["state_dict"], expected)
    assert "optimizer_states" not in found


def test_pieces_of_a_block_are_small_and_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PIECE", 24)
    value = torch.arange(70.0).view(7, 5, 2)

    class Reader:
        def __init__(self) -> None:
            self.stored = {"x": streaming.Stored(shape=(9, 5, 2), dtype=torch.float32)}

        def blocks(self, key: str) -> Any:
            yield Box(offsets=(2, 0, 0), tensor=value)

    found = torch.full((9, 5, 2), -1.0)
    stream = streaming.Stream(reader=Reader(), key="x", dtype=torch.float32)  # type: ignore[arg-type]
    for piece in stream.pieces():
        assert piece.tensor.nbytes <= 24
        place = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))
        found[place] = piece.tensor
    assert torch.equal(found[2:], value) and bool((found[:2] == -1).all())


MEASURE = """
import sys
import torch, lightning.pytorch, safetensors.torch
from lightning_shard.checkpoint.convert import convert
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
before = peak()
for source, target in zip(sys.argv[1::2], sys.argv[2::2]):
    convert(source, target, dtype="bf16", progress=False)
    print(peak() - before)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """The bound is of the largest tensor (6 MB) and a constant, below the 150 MB of the checkpoint."""
    weights = {f"layer {number}": torch.rand(1500, 1000) for number in range(13)}
    state = {number: {"exp_avg": value + 1} for number, value in enumerate(weights.values())}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(range(13))}]}
    torch.save({"state_dict": weights, "optimizer_states": [optimizer], "epoch": 0}, tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").stat().st_size > 150e6
    names = ["a.ckpt", "portable", "a.ckpt", "b.ckpt", "portable", "c.safetensors"]
    command = [sys.executable, "-c", MEASURE, *(str(tmp_path / name) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks = [float(line) for line in done.stdout.splitlines()]
    assert len(peaks) == 3 and max(peaks) < 1.3 * 6 + 100, peaks

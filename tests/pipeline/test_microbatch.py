"""Batches of every kind are split by rows and come out as their own type; outputs are joined again."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import MutableMapping
from dataclasses import FrozenInstanceError, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from lightning_shard.pipeline.microbatch import count_rows, join_outputs, signature, split_batch

X = torch.arange(12.0).reshape(4, 3)
"""Four rows that can be told apart."""


class Pair(NamedTuple):
    x: Tensor
    ids: list[str]


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    scale: int
    mask: Tensor | None = None
    twice: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", 2 * self.x)


@dataclass(slots=True)
class Slotted:
    x: Tensor
    name: str


class Attributes(dict):
    """A dict whose items are attributes too."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.__dict__ = self


class Plain:
    """A batch of a class of its own, as torch's documentation of ``pin_memory`` shows one."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.note = x, "note"


class Rows(list):
    """A list with something of its own."""


class MappingLike(MutableMapping):
    """One whose store a shallow copy would share."""

    def __init__(self, store: dict[str, Any]) -> None:
        self.store = store

    def __getitem__(self, key: str) -> Any:
        return self.store[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.store[key] = value

    def __delitem__(self, key: str) -> None:
        del self.store[key]

    def __iter__(self) -> Any:
        return iter(self.store)

    def __len__(self) -> int:
        return len(self.store)


# --- split -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "microbatches", "sizes"),
    [(4, 2, [2, 2]), (5, 3, [2, 2, 1]), (7, 4, [2, 2, 2, 1]), (2, 4, [1, 1]), (1, 8, [1])],
)
def test_sizes_differ_by_at_most_one_and_the_larger_come_first(rows, microbatches, sizes):
    x = torch.arange(rows * 2).reshape(rows, 2)
    parts = split_batch(x, microbatches)
    assert [part.rows for part in parts] == sizes
    assert [part.batch.tolist() for part in parts] == [t.tolist() for t in torch.tensor_split(x, len(sizes))]


def test_parts_are_views():
    batch = {"x": torch.zeros(4, 2), "n": np.zeros((4, 2))}
    for part in split_batch(batch, 2):
        part.batch["x"] += 1
        part.batch["n"] += 1
    assert batch["x"].tolist() == batch["n"].tolist() == [[1, 1]] * 4


@pytest.mark.parametrize(
    ("batch", "read"),
    [
        (X, lambda b: b),
        ([X, X + 1], lambda b: b[1] - 1),
        ((X, (X, X)), lambda b: b[1][0]),
        ({"x": X}, lambda b: b["x"]),
        (OrderedDict(x=X), lambda b: b["x"]),
        (UserDict(x=X), lambda b: b["x"]),
        (BatchEncoding({"x": X}), lambda b: b.x),
        (MappingProxyType({"x": X}), lambda b: b["x"]),
        (Attributes({"x": X}), lambda b: b.x),
        (Attributes({"x": X}), lambda b: b["x"]),
        (SequenceClassifierOutput(logits=X), lambda b: b.logits),
        (SequenceClassifierOutput(logits=X), lambda b: b["logits"]),
        (Pair(X, ["a", "b", "c", "d"]), lambda b: b.x),
        (Frozen(X, 3), lambda b: b.x),
        (Frozen(X, 3), lambda b: b.twice / 2),
        (Slotted(X, "name"), lambda b: b.x),
        (Plain(X), lambda b: b.x),
        (X.numpy(), torch.from_numpy),
        ([{"x": X}, Pair(X, list("abcd")), {"y": (X, None)}], lambda b: b[2]["y"][0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_container_comes_out_as_its_own_type_and_the_batch_is_left_alone(batch, read):
    before = signature(batch)
    parts = split_batch(batch, 3)
    assert [part.rows for part in parts] == [2, 1, 1]
    assert [type(part.batch) for part in parts] == [type(batch)] * 3
    assert [read(part.batch).tolist() for part in parts] == [X[:2].tolist(), X[2:3].tolist(), X[3:].tolist()]
    assert signature(batch) == before and read(batch).tolist() == X.tolist()


def test_what_has_no_rows_passes_through():
    constant, thing = torch.tensor(7.0), object()
    batch = {"x": X, "none": None, "name": "abcd", "scale": 3, "flag": True, "constant": constant, "thing": thing}
    batch["shape"] = X.shape
    for part in split_batch(batch, 2):
        assert {**part.batch, "x": None} == {**batch, "x": None}
        assert part.batch["constant"] is constant and part.batch["thing"] is thing


def test_a_frozen_dataclass_keeps_its_other_fields_and_stays_frozen():
    part = split_batch(Frozen(X, 3), 2)[1].batch
    assert (part.scale, part.mask) == (3, None)
    with pytest.raises(FrozenInstanceError):
        part.scale = 4


def test_a_defaultdict_keeps_its_factory():
    batch = defaultdict(list, x=X)
    part = split_batch(batch, 2)[0].batch
    assert type(part) is defaultdict and part["new"] == [] and "new" not in batch


def test_lists_with_an_item_per_row_are_split():
    rows = Rows("abcd")
    rows.mark = "kept"
    batch = {
        "x": X,
        "ids": ["a", "b", "c", "d"],
        "maybe": [None, "b", None, "d"],
        "meta": [{"n": 0}, {"n": 1}, {"n": 2}, {"n": 3}],
        "collated": ("a", "b", "c", "d"),
        "rows": rows,
        "classes": ["cat", "dog"],
        "size": (1, 2, 3, 4),
        "fields": [("a", "b", "c", "d"), ("e", "f", "g", "h")],
    }
    part = split_batch(batch, 2)[1].batch
    assert part["ids"] == ["c", "d"] and part["maybe"] == [None, "d"] and part["meta"] == [{"n": 2}, {"n": 3}]
    assert part["collated"] == ("c", "d")
    assert type(part["rows"]) is Rows and part["rows"] == ["c", "d"] and part["rows"].mark == "kept"
    assert part["classes"] == ["cat", "dog"] and part["size"] == (1, 2, 3, 4)
    assert part["fields"] == [("c", "d"), ("g", "h")]


def test_a_list_of_as_many_tensors_as_rows_is_a_container():
    x, y = torch.arange(4).reshape(2, 2), torch.arange(2)
    parts = split_batch([x, y], 2)
    assert [[t.tolist() for t in part.batch] for part in parts] == [[[[0, 1]], [0]], [[[2, 3]], [1]]]


def test_a_part_shares_no_container_with_the_batch_or_another_part():
    parts = split_batch({"x": X, "options": {"scale": 2}}, 2)
    assert parts[0].batch["options"].pop("scale") == parts[1].batch["options"].pop("scale") == 2


def test_a_tokenizers_encodings_are_split_with_the_tensors():
    batch = BatchEncoding({"x": X})
    batch._encodings = ["row 0", "row 1", "row 2", "row 3"]
    assert split_batch(batch, 2)[1].batch.encodings == ["row 2", "row 3"]


# --- refused batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"image": X, "size": torch.zeros(2)}, ["batch['image']", "4 rows", "batch['size']", "2 rows", "0-dim"]),
        ([X, Frozen(X[:1], 3)], ["batch[0]", "4 rows", "batch[1].x", "1 row", "buffer"]),
        (UserDict(x=X, y=X[:3]), ["batch['x']", "batch['y']", "3 rows"]),
        ({"name": "a", "scale": 2}, ["dict", "no tensor", "collate_fn"]),
        (torch.tensor(1.0), ["no tensor with rows"]),
        (None, ["NoneType"]),
        ({"x": torch.zeros(0, 3)}, ["batch['x']", "0 rows", "empty"]),
        ({"x": torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)}, ["batch['x']", "nested"]),
        ((X, X.to_sparse()), ["batch[1]", "sparse", "dense"]),
        ({"x": pack_sequence([X[:2], X[:1]])}, ["batch['x']", "PackedSequence", "pack"]),
        ({"x": torch.distributions.Normal(X, 1.0)}, ["batch['x']", "Normal"]),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused_by_name(batch, words):
    for use in (count_rows, lambda b: split_batch(b, 2)):
        with pytest.raises(MisconfigurationException) as refusal:
            use(batch)
        assert [word for word in words if word not in str(refusal.value)] == []


def test_a_mapping_that_cannot_be_built_from_a_dict_is_refused_by_name():
    class Keyed(MappingLike):
        def __init__(self, x: Tensor, y: int) -> None:
            super().__init__({"x": x, "y": y})

    with pytest.raises(MisconfigurationException, match="Keyed cannot be built from a dict"):
        split_batch(Keyed(X, 1), 2)


def test_a_mapping_with_a_store_of_its_own_is_built_anew():
    batch = MappingLike({"x": X})
    assert [len(part.batch["x"]) for part in split_batch(batch, 2)] == [2, 2]
    assert batch["x"] is X


# --- signature -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"x": X, "n": 1, "s": "a"}, {"x": X + 1, "n": 2, "s": "b"}, True),
        ({"ids": ["a", "b"]}, {"ids": ["c", "d"]}, True),
        ({"ids": ["a", "b"]}, {"ids": ["c"]}, False),
        ({"x": X, "mask": None}, {"x": X, "mask": X}, False),
        ({"x": X}, {"x": X[:2]}, False),
        ({"x": X}, {"x": X.double()}, False),
        ({"x": X}, {"y": X}, False),
        ({"x": X}, OrderedDict(x=X), False),
        ([X, X], (X, X), False),
        (Frozen(X, 3), Frozen(X + 1, 4), True),
        (Frozen(X, 3), Frozen(X, 3, X), False),
        (X.numpy(), X, False),
        (1, 2, True),
        (1, 1.0, False),
    ],
)
def test_a_signature_holds_the_structure_and_no_values(one, other, same):
    assert (signature(one) == signature(other)) is same
    assert (hash(signature(one)) == hash(signature(other))) is same


# --- join ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        X,
        [X, X[:, 0]],
        (X, {"ids": list("abcd")}),
        Pair(X, list("abcd")),
        Frozen(X, 3),
        BatchEncoding({"x": X, "name": "n"}),
        {"x": X, "none": None, "name": "n", "flag": True, "count": 3, "texts": ("a", "b", "c", "d")},
        {"n": X.numpy()},
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
def test_joining_undoes_splitting(batch, microbatches):
    parts = split_batch(batch, microbatches)
    joined = join_outputs([part.batch for part in parts], [part.rows for part in parts])
    assert signature(joined) == signature(batch)
    assert plain(joined) == plain(batch)


def plain(value: Any) -> Any:
    """Tensors and containers as lists and dicts, which can be compared."""
    match value:
        case Tensor() | np.ndarray():
            return value.tolist()
        case dict() | UserDict():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    return {name: plain(item) for name, item in vars(value).items()} if hasattr(value, "__dict__") else value


def test_numbers_become_the_mean_over_rows():
    one = {"loss": torch.tensor(2.0), "acc": 0.5, "n": 3, "bad": 1}
    other = {"loss": torch.tensor(5.0), "acc": 1.0, "n": 3, "bad": 0}
    joined = join_outputs([one, other], [2, 1])
    assert joined["loss"].item() == 3.0 and joined["loss"].dtype == torch.float32
    assert joined["acc"] == pytest.approx(2 / 3)
    assert joined["n"] == 3 and type(joined["n"]) is int
    assert joined["bad"] == pytest.approx(2 / 3)
    counts = join_outputs([torch.tensor(1), torch.tensor(2)], [1, 1])
    assert counts.item() == 1.5 and counts.is_floating_point()


def test_the_mean_of_half_precision_keeps_dtype_and_value():
    values = [torch.tensor(1.0, dtype=torch.bfloat16)] * 300
    mean = join_outputs(values, [1] * 300)
    assert mean.dtype == torch.bfloat16 and mean.item() == 1.0


def test_a_model_output_stays_one():
    outputs = [SequenceClassifierOutput(loss=torch.tensor(float(n)), logits=X[:n]) for n in (3, 1)]
    joined = join_outputs(outputs, [3, 1])
    assert type(joined) is SequenceClassifierOutput
    assert joined.loss.item() == 2.5 and joined["logits"].shape == (4, 3) and joined.logits is joined["logits"]
    assert joined.hidden_states is None and list(joined) == ["loss", "logits"]


@pytest.mark.parametrize("rows", [[2, 2], [2, 1], [1, 1]])
def test_lists_of_each_rows_own_results_are_concatenated(rows):
    boxes = [[{"boxes": torch.full((1 + i, 4), float(i))} for i in range(n)] for n in rows]
    joined = join_outputs(boxes, rows)
    assert [item["boxes"].shape for item in joined] == [(1 + i, 4) for n in rows for i in range(n)]
    assert join_outputs([["a", "b"][:n] for n in rows], rows) == [text for n in rows for text in ["a", "b"][:n]]


def test_a_constant_of_another_size_stays_if_it_is_equal_in_all():
    constant = torch.arange(7)
    assert join_outputs([constant, constant.clone()], [2, 2]).tolist() == list(range(7))


@pytest.mark.parametrize(
    ("outputs", "rows", "words"),
    [
        ([{"a": torch.zeros(3)}, {"a": torch.ones(3)}], [2, 2], ["output['a']", "3 rows", "2 rows"]),
        ([(X[:2, :2],), (X[:2],)], [2, 2], ["output[0]", "(2, 2)", "(2, 3)", "pad"]),
        ([{"m": None}, {"m": X[:2]}], [2, 2], ["output['m']", "NoneType", "tensor of shape (2, 3)"]),
        ([{"a": "x"}, {"a": "y"}], [2, 2], ["output['a']", "differs"]),
        ([{"a": 1}, {"b": 1}], [2, 2], ["['a']", "['b']"]),
        ([[X[:2]], [X[:2], X[:2]]], [2, 2], ["output", "[0]", "[1]"]),
        ([object(), object()], [2, 2], ["output", "object"]),
        ([{"p": pack_sequence([X[:2]])}] * 2, [1, 1], ["output['p']", "PackedSequence"]),
    ],
)
def test_outputs_without_a_common_form_are_refused_by_path(outputs, rows, words):
    with pytest.raises(MisconfigurationException) as refusal:
        join_outputs(outputs, rows)
    assert [word for word in words if word not in str(refusal.value)] == []


def test_joined_tensors_keep_their_gradient():
    x = torch.ones(3, requires_grad=True)
    joined = join_outputs([{"loss": x[:2].mean()}, {"loss": x[2:].mean()}], [2, 1])
    joined["loss"].backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.full((3,), 1 / 3))

"""Tensors are found and replaced wherever a module may put them, and the rest of a structure stays as it is."""

import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.pipeline.structure import Slot, map_leaves, tensors_in

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Data:
    x: Tensor
    name: str = "data"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Tensor
    name: str = "slotted"


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.inner = [x, {"y": x + 1}]
        self.count = 3


class Mirror(OrderedDict):
    """A dict whose items are attributes too, and which guards its keys."""

    def __init__(self, *args: Any, **items: Any) -> None:
        super().__init__(*args)
        for key, item in items.items():
            self[key] = item

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __delitem__(self, key: Any) -> None:
        raise TypeError("guarded")

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("guarded")


def numbered(value: Any) -> tuple[Any, list[Tensor]]:
    """The structure with a slot for each tensor, and the tensors."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Slot:
        found.append(tensor)
        return Slot(len(found) - 1)

    return map_leaves(value, Tensor, take), found


x, y = torch.ones(2), torch.zeros(3)

STRUCTURES: dict[str, tuple[Any, int]] = {
    "a tensor": (x, 1),
    "a tuple": ((x, (y, 1), "text"), 2),
    "a list": ([x, [y, None]], 2),
    "a dict": ({"a": x, 3: {"b": y}}, 2),
    "a named tuple": (Point(x=x, y=Point(x=1, y=y)), 2),
    "a dataclass": (Data(x=x), 1),
    "a frozen dataclass": (Frozen(x=x), 1),
    "a slotted dataclass": (Slotted(x=x), 1),
    "a plain object": (Plain(x), 3),
    "a model output": (Mirror(logits=x, loss=y, none=None), 2),
    "a default dict": (defaultdict(list, {"a": [x]}), 1),
    "a deque": (deque([x, y], maxlen=5), 2),
    "the same tensor twice": ([x, x], 2),
    "torch's own results": (torch.ones(2, 2).max(-1), 2),
    "nothing": (None, 0),
    "numbers": ([1, 2.0, True, "a", torch.float32, torch.Size([2])], 0),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_tensors_are_found_and_put_back_into_the_same_kind_of_structure(name: str) -> None:
    structure, count = STRUCTURES[name]
    assert len(list(tensors_in(structure))) == count
    template, found = numbered(structure)
    assert len(found) == count
    assert not list(tensors_in(template)), "the template still holds a tensor"
    again = map_leaves(template, Slot, lambda slot: found[slot.key])
    assert type(again) is type(structure)
    assert [id(each) for each in tensors_in(again)] == [id(each) for each in tensors_in(structure)]


def test_the_original_keeps_its_tensors() -> None:
    for structure, _ in STRUCTURES.values():
        before = [id(tensor) for tensor in tensors_in(structure)]
        numbered(structure)
        assert [id(tensor) for tensor in tensors_in(structure)] == before


def test_attributes_and_items_of_a_model_output_stay_the_same() -> None:
    made = map_leaves(Mirror(logits=x, loss=y), Tensor, lambda tensor: tensor + 1)
    assert made.logits is made["logits"] and made.loss is made["loss"]
    assert torch.equal(made.logits, x + 1)
    assert torch.equal(made["loss"], y + 1)


def test_plain_attributes_and_defaults_are_kept() -> None:
    made = map_leaves(Plain(x), Tensor, lambda tensor: tensor * 2)
    assert made.count == 3 and torch.equal(made.inner[1]["y"], torch.full((2,), 4.0))
    assert map_leaves(defaultdict(list, a=x), Tensor, lambda tensor: None)["missing"] == []
    assert map_leaves(deque([x], maxlen=5), Tensor, lambda tensor: None).maxlen == 5


def test_modules_functions_and_classes_are_no_structures() -> None:
    layer = nn.Linear(2, 2)
    assert not list(tensors_in([layer, print, Plain, lambda: x]))
    assert map_leaves([layer], Tensor, lambda tensor: None)[0] is layer


def test_a_structure_that_holds_itself_ends() -> None:
    loop: list[Any] = [x]
    loop.append(loop)
    node = Plain(y)
    node.inner = node
    made = map_leaves([loop, node], Tensor, lambda tensor: tensor + 1)
    assert made[0][1] is made[0] and made[1].inner is made[1]
    assert len(list(tensors_in([loop, node]))) == 2


def test_what_is_shared_in_a_structure_is_shared_in_its_copy() -> None:
    cache = Plain(x)
    made = map_leaves({"one": cache, "other": [cache]}, Tensor, lambda tensor: tensor + 1)
    assert made["one"] is made["other"][0]


def test_a_parameter_and_a_subclass_are_tensors() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert next(tensors_in({"p": parameter})) is parameter

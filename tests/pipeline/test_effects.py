"""What a step leaves in the LightningModule on the last stage reaches the other ranks."""

import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_shard.pipeline.effects import Effects
from tests.pipeline.replaying import CPU


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


class Keeps(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.outputs: list[Any] = []
        self.by_name: dict[str, Any] = {"loss": []}
        self.grouped: defaultdict[str, list[Any]] = defaultdict(list)
        self.recent: deque[Any] = deque(maxlen=3)
        self.counter: Counter[str] = Counter()
        self.seen: set[int] = set()
        self.number = 0
        self.text = ""
        self.nothing: Any = None
        self.total = torch.zeros(())
        self.meter = Meter()


def replayed(change: Callable[[Keeps], None], times: int = 1) -> tuple[Keeps, Keeps]:
    """The module of the last stage after ``change``, and that of another rank."""
    last, other = Keeps(), Keeps()
    there, here = Effects(last, CPU), Effects(other, CPU)
    for _ in range(times):
        there.begin()
        here.begin()
        change(last)
        here.apply(there.changed())
    return last, other


CHANGES: dict[str, tuple[str, Callable[[Keeps], Any]]] = {
    "a list": ("outputs", lambda m: m.outputs.append(torch.ones(2))),
    "a list of dicts": ("outputs", lambda m: m.outputs.append({"loss": torch.ones(()), "n": 1})),
    "a cleared list": ("outputs", lambda m: (m.outputs.clear(), m.outputs.append(1))),
    "a new list": ("outputs", lambda m: setattr(m, "outputs", [*m.outputs, 3])),
    "a number": ("number", lambda m: setattr(m, "number", m.number + 1)),
    "a text": ("text", lambda m: setattr(m, "text", m.text + "x")),
    "a tensor": ("nothing", lambda m: setattr(m, "nothing", torch.arange(3.0))),
    "a new attribute": ("added", lambda m: setattr(m, "added", (torch.ones(1), "a"))),
    "a set": ("seen", lambda m: m.seen.add(len(m.seen))),
    "a deque": ("recent", lambda m: m.recent.append(len(m.recent))),
    "an item of a dict": ("by_name", lambda m: m.by_name.__setitem__("acc", torch.ones(()))),
    "a counter": ("counter", lambda m: m.counter.update(["a", "b"])),
    "a list in a dict": ("by_name", lambda m: m.by_name["loss"].append(torch.ones(()))),
    "a list in a default dict": ("grouped", lambda m: m.grouped["val"].append(2.0)),
    "a tensor in place": ("total", lambda m: m.total.add_(1.5)),
    "an object": ("meter", lambda m: m.meter.update(2.0)),
}


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [plain(item) for item in value]
    return vars(value) if isinstance(value, Meter) else value


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("kind", CHANGES)
def test_what_the_step_leaves_is_the_same_on_every_rank(kind: str, times: int) -> None:
    name, change = CHANGES[kind]
    last, other = replayed(change, times)
    assert plain(getattr(last, name)) == plain(getattr(other, name))
    assert plain(getattr(other, name)) != plain(getattr(Keeps(), name, "no attribute")), "nothing was changed"
    assert type(getattr(other, name)) is type(getattr(last, name))


def test_nothing_is_sent_where_nothing_changed() -> None:
    module = Keeps()
    module.outputs.append(torch.ones(3))
    effects = Effects(module, CPU)
    effects.begin()
    assert effects.changed() == {}


def test_only_the_new_items_of_a_list_are_sent() -> None:
    module = Keeps()
    module.outputs += [torch.ones(1000)] * 5
    effects = Effects(module, CPU)
    effects.begin()
    module.outputs.append(1)
    assert effects.changed() == {("outputs",): (5, [1])}


def test_another_name_for_the_list_sees_the_items_too() -> None:
    last, other = Keeps(), Keeps()
    alias = other.outputs
    there, here = Effects(last, CPU), Effects(other, CPU)
    there.begin()
    here.begin()
    last.outputs.append(7)
    here.apply(there.changed())
    assert alias == [7] and alias is other.outputs


def test_sent_tensors_take_no_gradient_and_modules_and_lightnings_own_attributes_stay() -> None:
    def change(module: Keeps) -> None:
        module.nothing = module.layer(torch.ones(2))
        module.layer2 = torch.nn.Linear(1, 1)
        module._current_fx_name = "training_step"

    last, other = replayed(change)
    assert last.nothing.requires_grad and not other.nothing.requires_grad
    assert not hasattr(other, "layer2") and other._current_fx_name is None


def test_what_cannot_be_sent_is_warned_about_once_and_by_name() -> None:
    module = Keeps()
    effects = Effects(module, CPU)
    effects.begin()
    module.nothing = lambda: 1
    with pytest.warns(UserWarning, match=r"self\.nothing, which cannot be sent"):
        changes = effects.changed()
    assert changes == {}
    with warnings.catch_warnings(action="error"):
        effects.begin()
        module.nothing = lambda: 2
        assert effects.changed() == {}


def test_lists_have_one_item_a_batch_in_the_rows_order() -> None:
    module = Keeps()
    module.outputs.append(torch.zeros(4))
    effects = Effects(module, CPU)
    effects.begin()
    for number in (1, 0):
        module.outputs.append(torch.full((2 - number,), float(number)))
        effects.after_microbatch(number)
    effects.join_lists([2, 1])
    assert [each.tolist() for each in module.outputs] == [[0.0] * 4, [0.0, 0.0, 1.0]]

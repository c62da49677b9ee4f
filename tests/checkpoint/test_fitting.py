"""Whether a checkpoint fits a module: every difference is named, with both values and what to do."""

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_shard.checkpoint.boxes import Held
from lightning_shard.checkpoint.fitting import check_kind, check_number, check_weights, fit_optimizers
from lightning_shard.checkpoint.reading import Stored
from lightning_shard.checkpoint.sources import RawOptimizer, Source


def held(**tensors: Tensor) -> dict[str, Held]:
    return {name: Held.whole(tensor) for name, tensor in tensors.items()}


def stored(**tensors: Tensor) -> dict[str, Stored]:
    return {name: Stored(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()}


A, B = torch.zeros(2, 3), torch.zeros(4)


def refusal(there: dict[str, Stored], here: dict[str, Held], strict: bool = True, left_out: Any = ()) -> str:
    with pytest.raises(MisconfigurationException, match=r"^the/path was saved from another module: ") as caught:
        check_weights("the/path", there, here, strict, left_out)
    return str(caught.value)


def test_the_same_weights_fit_in_every_float_type() -> None:
    assert check_weights("c", stored(a=A.half(), b=B), held(a=A, b=B.bfloat16()), True) == []
    assert check_weights("c", {}, {}, True) == []


def test_missing_and_unknown_names() -> None:
    found = refusal(stored(a=A, old=B), held(a=A, new=B))
    assert "missing in it: 'new'" in found and "unknown to this module: 'old'" in found
    assert "`strict_loading = False`" in found
    assert check_weights("c", stored(a=A, old=B), held(a=A, new=B), False) == []


def test_many_names_are_counted() -> None:
    found = refusal(stored(), held(**{f"n{number}": B for number in range(9)}))
    assert "'n0', 'n1', 'n2', 'n3', 'n4' and 4 more" in found
    shapes = refusal(
        stored(**{f"n{number}": A for number in range(9)}), held(**{f"n{number}": B for number in range(9)})
    )
    assert shapes.count("has shape (2, 3) in it and (4,) in the module") == 6 and "and 3 more" in shapes


@pytest.mark.parametrize("strict", [True, False])
def test_shapes_and_kinds_of_number(strict: bool) -> None:
    assert "'a' has shape (3, 2) in it and (2, 3) in the module" in refusal(stored(a=A.T), held(a=A), strict)
    assert "'a' has shape () in it and (1,) in" in refusal(stored(a=torch.tensor(1.0)), held(a=torch.ones(1)), strict)
    for one, other in ((A.long(), A), (A, A.bool()), (A.to(torch.complex64), A)):
        found = refusal(stored(a=one), held(a=other), strict)
        assert f"'a' is {one.dtype} in it and {other.dtype} in the module" in found
        assert "strict_loading" not in found


def test_what_was_left_out_on_purpose_may_be_missing() -> None:
    assert check_weights("c", stored(a=A), held(a=A, b=B), True, ["b"]) == ["b"]
    assert "missing in it: 'd'." in refusal(stored(a=A), held(a=A, b=B, d=B), True, ["b"]).replace(";", ".")


# --- optimizers ---


class Keys:
    """A reader of which only the list of keys is looked at."""

    def __init__(self, **tensors: Tensor) -> None:
        self.stored = stored(**tensors)


def source(optimizers: list[RawOptimizer] | None, **tensors: Tensor) -> Source:
    return Source(
        path="the/path",
        kind="file",
        reader=Keys(**tensors),  # type: ignore[arg-type]
        lightning={},
        weights={},
        optimizers=optimizers,
    )


def raw(*groups: list[Any], lr: float = 0.1, tensors: Any = None, values: Any = None) -> RawOptimizer:
    return RawOptimizer(
        groups=[{"lr": lr, "params": list(group)} for group in groups], tensors=tensors or {}, values=values or {}
    )


WEIGHTS = held(a=A, b=B, c=B)


def test_states_by_name_are_those_of_the_same_name() -> None:
    saved = raw(["b", "a"], tensors={("a", "m"): "k1", ("b", "m"): "k2"}, values={"a": {"step": 3}})
    (found,) = fit_optimizers(source([saved], k1=A, k2=B), [[["a", "b"]]], WEIGHTS)
    assert found.groups == [{"lr": 0.1, "params": ["a", "b"]}]
    assert {key: place[0] for key, place in found.tensors.items()} == {("a", "m"): "k1", ("b", "m"): "k2"}
    assert found.values == {"a": {"step": 3}}
    assert found.states_of("a") == stored(m=A)


def test_states_by_number_are_those_of_the_same_place() -> None:
    saved = raw([0], [1, 2], tensors={(0, "m"): "k1", (2, "m"): "k2"}, values={1: {"step": 3}})
    (found,) = fit_optimizers(source([saved], k1=B, k2=A), [[["b"], ["c", "a"]]], WEIGHTS)
    assert {key: place[0] for key, place in found.tensors.items()} == {("b", "m"): "k1", ("a", "m"): "k2"}
    assert found.values == {"c": {"step": 3}}
    assert [group["params"] for group in found.groups] == [["b"], ["c", "a"]]


@pytest.mark.parametrize(
    ("saved", "names", "says"),
    [
        ([raw(["a", "b"])], [[["a"], ["b"]]], "optimizer 0 has groups of [2] parameters"),
        ([raw(["a"], ["b", "c"])], [[["a", "b"], ["c"]]], "parameter 'b' is in group 0 of optimizer 0 here, but in gr"),
        ([raw(["a", "b"])], [[["a", "b", "c"]]], "parameter 'c' is in group 0 of optimizer 0 here, but in no group"),
        ([raw(["a", "b", "c"])], [[["a", "b"]]], "had 3 parameters when it was saved, 2 here: 'c'"),
        ([raw([0, 1])], [[["a", "b", "c"]]], "has groups of [2] parameters, but the module's has groups of [3]"),
    ],
)
def test_other_optimizers_are_refused(saved: Any, names: Any, says: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"^the/path") as caught:
        fit_optimizers(source(saved), names, WEIGHTS)
    assert says in str(caught.value)


def test_no_optimizers_or_another_number_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"the/path holds weights only"):
        check_number(source(None), 1)
    with pytest.raises(MisconfigurationException, match=r"the states of 2 optimizers, .* returned 1"):
        check_number(source([raw(["a"]), raw(["b"])]), 1)
    check_number(source([raw(["a"])]), 1)


def test_another_order_shows_in_the_shapes() -> None:
    saved = raw([0, 1], tensors={(0, "m"): "k1", (1, "m"): "k2"})
    with pytest.raises(
        MisconfigurationException, match=r"at the place of 'a' in optimizer 0 has shape \(2, 2\), .*\(2, 3\)"
    ):
        fit_optimizers(source([saved], k1=B.view(2, 2), k2=B), [[["a", "b"]]], WEIGHTS)


def test_states_that_have_no_entry_for_each_element_are_no_other_order() -> None:
    """Adafactor has a row and a column of a matrix."""
    saved = raw([0], tensors={(0, "row"): "k1", (0, "column"): "k2"})
    (found,) = fit_optimizers(source([saved], k1=torch.zeros(2), k2=torch.zeros(3)), [[["a"]]], WEIGHTS)
    assert set(found.tensors) == {("a", "row"), ("a", "column")}


KINDS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("here", KINDS)
def test_another_kind_of_optimizer_is_refused(saved: str, here: str) -> None:
    """Adam and AdamW have the same hyper-parameters, one of which says which of them it is."""
    (group,) = KINDS[saved]([A.clone()]).param_groups
    (own,) = KINDS[here]([A.clone()]).param_groups
    checkpoint = source([RawOptimizer(groups=[{**group, "params": ["a"]}])])
    if saved == here or {saved, here} == {"Adam", "AdamW"}:
        check_kind(checkpoint, 0, here, [{**own, "initial_lr": 0.1}])
        return
    with pytest.raises(MisconfigurationException, match=f"optimizer 0 is {here} here, with .* Resume with the same"):
        check_kind(checkpoint, 0, here, [own])


def test_a_later_torch_may_know_more_hyper_parameters() -> None:
    (group,) = torch.optim.AdamW([A.clone()]).param_groups
    older = {key: value for key, value in group.items() if key != "decoupled_weight_decay"}
    check_kind(source([RawOptimizer(groups=[{**older, "params": ["a"]}])]), 0, "AdamW", [group])

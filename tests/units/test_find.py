"""Units by structure; the names that are expected are written out."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_shard.config import ClassUnits, SizeUnits
from lightning_shard.units import Usage, find_units
from lightning_shard.units.find import resolve_classes, why_not_a_unit


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class GPT(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TwoStacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = GPT(), GPT()


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up @ self.down


def conv_block(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inner, outer, 3), nn.BatchNorm2d(outer), nn.ReLU())


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))


def pairs() -> nn.ModuleList:
    return nn.ModuleList(nn.ModuleList([nn.MultiheadAttention(4, 2), Block(4)]) for _ in range(2))


STRUCTURES: dict[str, tuple[nn.Module, list[str]]] = {
    "blocks of a GPT, not its layers": (GPT(), ["blocks.0", "blocks.1"]),
    "both stacks": (TwoStacks(), [f"{one}.blocks.{i}" for one in ("encoder", "decoder") for i in (0, 1)]),
    "convolutions in stages": (
        nn.Sequential(
            conv_block(3, 4), nn.Sequential(conv_block(4, 4), conv_block(4, 4)), nn.Sequential(conv_block(4, 4))
        ),
        ["0", "1.0", "1.1", "2"],
    ),
    "an MLP's layers, where there is nothing larger": (mlp(), ["0", "3"]),
    "blocks, and no layer beside them": (nn.ModuleDict({"a": GPT(), "mlp": mlp()}), ["a.blocks.0", "a.blocks.1"]),
    "parts of pairs": (pairs(), ["0.0", "0.1", "1.0", "1.1"]),
    "modules that own several matrices": (nn.ModuleList([Matrices(), Matrices()]), ["0", "1"]),
    "torch's transformer layers": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False),
        ["layers.0", "layers.1"],
    ),
    "weight-normed layers are still layers": (
        nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.ReLU(), weight_norm(nn.Linear(4, 4))),
        ["0", "2"],
    ),
}


@pytest.mark.parametrize("case", STRUCTURES)
def test_repeated_blocks(case: str) -> None:
    module, expected = STRUCTURES[case]
    units = find_units(module, "blocks", None)
    assert list(units.names) == expected
    assert not units.rejected


def test_blocks_of_a_hugging_face_model() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, bos_token_id=0, eos_token_id=0))
    assert find_units(model, "blocks").names == ("transformer.h.0", "transformer.h.1")


def test_where_nothing_is_repeated_units_are_cut_by_size() -> None:
    with torch.device("meta"):
        large = nn.Linear(5000, 5000)
        module = nn.ModuleDict({"small": nn.LayerNorm(8), "large": large, "other": nn.Embedding(9, 9)})
    assert find_units(module, "blocks").names == ("large",)
    assert find_units(nn.ModuleDict({"small": nn.Linear(8, 8)}), "blocks").names == ()


def test_by_size_a_unit_closes_when_it_is_full_enough() -> None:
    # A Linear has 72 parameters, a LayerNorm 16, an Embedding 88, the head 99.
    units = find_units(GPT(), SizeUnits(min_params=80))
    assert units.names == ("embed", "blocks.0.mlp", "blocks.1.mlp", "head")
    assert find_units(GPT(), SizeUnits(min_params=150)).names == ("blocks.0", "blocks.1")
    assert find_units(GPT(), SizeUnits(min_params=70)).names[:3] == ("embed", "blocks.0.mlp.0", "blocks.0.mlp.2")
    assert find_units(GPT(), SizeUnits(min_params=10**6)).names == ()


def test_by_size_a_container_is_no_unit() -> None:
    units = find_units(GPT(depth=3), SizeUnits(min_params=450))
    assert units.names == ()
    assert units.rejected == {"blocks": "is a ModuleList, a container without a forward of its own"}


def test_by_class_units_may_be_nested_and_subclasses_count() -> None:
    module = TwoStacks()
    units = find_units(module, ClassUnits(classes=[GPT, "torch.nn.Sequential"]))
    assert units.names == (
        *("encoder.blocks.0.mlp", "encoder.blocks.1.mlp", "encoder"),
        *("decoder.blocks.0.mlp", "decoder.blocks.1.mlp", "decoder"),
    )
    assert find_units(mlp(), ClassUnits(classes=["torch.nn.modules.batchnorm._BatchNorm"])).names == ("1",)


@pytest.mark.parametrize("path", ["torch.nn.Lineer", "no_such_package.Block", "torch.nn.functional.linear"])
def test_a_wrong_import_path_is_refused_by_name(path: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"units names '{path}'"):
        find_units(GPT(), ClassUnits(classes=[path]))
    with pytest.raises(MisconfigurationException, match=f"activation_checkpointing names '{path}'"):
        resolve_classes([path], "activation_checkpointing")


def test_a_class_that_no_module_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(MisconfigurationException, match=r"nn\.modules\.rnn\.LSTM'.*GPT.*modules\.linear\.Linear"):
        find_units(GPT(), ClassUnits(classes=[nn.Linear, nn.LSTM]))


def test_the_root_is_never_named() -> None:
    assert find_units(GPT(), ClassUnits(classes=[GPT])).names == ()
    assert find_units(GPT(), SizeUnits(min_params=1)).names[-1] == "head"


def tied() -> GPT:
    module = GPT()
    module.head.weight = module.embed.weight
    return module


def test_a_tie_goes_to_the_module_around_both() -> None:
    module = nn.ModuleDict({"gpt": tied()})
    units = find_units(module, SizeUnits(min_params=80))
    assert units.names == ("gpt.blocks.0.mlp", "gpt.blocks.1.mlp", "gpt")
    assert units.rejected["gpt.embed"] == "shares parameter 'gpt.embed.weight' with 'gpt.head.weight'"
    assert units.rejected["gpt.head"] == "shares parameter 'gpt.head.weight' with 'gpt.embed.weight'"


def test_a_weight_shared_by_two_blocks_stays_outside_of_both() -> None:
    module = GPT(depth=3)
    module.blocks[2].mlp[0].weight = module.blocks[0].mlp[0].weight
    units = find_units(module, "blocks")
    assert units.names == ("blocks.1",)
    assert units.rejected == {
        "blocks.0": "shares parameter 'blocks.0.mlp.0.weight' with 'blocks.2.mlp.0.weight'",
        "blocks.2": "shares parameter 'blocks.2.mlp.0.weight' with 'blocks.0.mlp.0.weight'",
    }


def test_a_tie_within_a_block_is_the_blocks_own() -> None:
    module = GPT()
    for block in module.blocks:
        block.mlp[2].weight = block.mlp[0].weight
        block.own = block.mlp[0].weight
    assert find_units(module, "blocks").names == ("blocks.0", "blocks.1")
    by_class = find_units(module, ClassUnits(classes=[nn.Linear, Block]))
    assert by_class.names == ("blocks.0", "blocks.1", "head")
    assert "shares parameter 'blocks.0.mlp.0.weight' with 'blocks.0.own'" in by_class.rejected.values()


def test_a_module_in_two_places_is_one_unit_and_its_holders_do_not_claim_it() -> None:
    module = TwoStacks()
    module.decoder.blocks[0] = module.encoder.blocks[0]
    assert find_units(module, "blocks").names == ("encoder.blocks.0", "encoder.blocks.1", "decoder.blocks.1")
    alone = find_units(module, ClassUnits(classes=[GPT]))
    assert alone.names == () and set(alone.rejected) == {"encoder", "decoder"}
    assert find_units(module, ClassUnits(classes=[GPT, Block])).names[-1] == "decoder"


def test_nothing_inside_torchs_attention_or_a_parametrization_is_a_unit() -> None:
    encoder = nn.ModuleDict({"layer": nn.TransformerEncoderLayer(8, 2, 8), "normed": weight_norm(nn.Linear(8, 8))})
    units = find_units(encoder, ClassUnits(classes=[nn.Linear, nn.MultiheadAttention]))
    assert units.names == ("normed",)
    why = "is inside the TransformerEncoderLayer 'layer', which uses its weights directly"
    assert units.rejected["layer.linear1"] == units.rejected["layer.self_attn"] == why
    assert "layer.self_attn.out_proj" in units.rejected
    assert find_units(encoder, SizeUnits(min_params=1)).names == ("layer", "normed")


def test_frozen_parameters_count_like_others() -> None:
    assert find_units(GPT().requires_grad_(False), "blocks").names == ("blocks.0", "blocks.1")


def test_modules_without_parameters_are_no_units() -> None:
    assert find_units(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())), "blocks").names == ()


def test_a_compiled_module_is_a_unit_under_its_own_name() -> None:
    module = GPT()
    for i in range(2):
        module.blocks[i] = torch.compile(module.blocks[i], backend="eager")
    assert find_units(module, "blocks").names == ("blocks.0", "blocks.1")
    assert find_units(module, ClassUnits(classes=[Block])).names == ("blocks.0", "blocks.1")
    whole = nn.ModuleDict({"gpt": torch.compile(GPT(), backend="eager")})
    assert find_units(whole, "blocks").names == ("gpt._orig_mod.blocks.0", "gpt._orig_mod.blocks.1")
    assert find_units(whole, ClassUnits(classes=[GPT])).names == ("gpt",)
    assert why_not_a_unit(whole, "gpt._orig_mod") is not None and why_not_a_unit(whole, "gpt") is None


def usage(module: nn.Module, *, outside: dict[str, str] | None = None, idle: str = "", complete: bool = True) -> Usage:
    ran = frozenset(name for name, _ in module.named_modules() if not idle or not name.startswith(idle))
    return Usage(ran=ran, outside=outside or {}, complete=complete, reason="")


def test_what_was_used_outside_or_never_run_is_no_unit() -> None:
    module = GPT(depth=4)
    seen = usage(module, outside={"blocks.1": "blocks.1.norm.weight"}, idle="blocks.2")
    units = find_units(module, "blocks", seen)
    assert units.names == ("blocks.0", "blocks.3")
    assert units.rejected == {
        "blocks.1": "its parameter 'blocks.1.norm.weight' is used outside its forward",
        "blocks.2": "its forward is never run",
    }


def test_an_incomplete_run_says_nothing_of_what_it_did_not_see() -> None:
    module = GPT(depth=3)
    seen = usage(module, outside={"blocks.1": "blocks.1.norm.weight"}, idle="blocks.2", complete=False)
    assert find_units(module, "blocks", seen).names == ("blocks.0", "blocks.2")


def test_entries_that_are_chosen_by_key_are_no_units() -> None:
    """One rank may choose another entry than the next, and would wait for it in another unit's collective."""
    module = nn.ModuleDict({"heads": nn.ModuleDict({"cat": Block(), "dog": Block()}), "all": nn.ModuleDict()})
    seen = usage(module, idle="heads.dog")
    units = find_units(module, "blocks", seen)
    assert units.names == ()
    assert units.rejected["heads.cat"] == (
        "is chosen by its key, and the entry 'dog' of 'heads' did not run: ranks may differ"
    )
    assert find_units(module, "blocks", usage(module)).names == ("heads.cat", "heads.dog")


def test_where_no_block_can_be_a_unit_the_size_decides() -> None:
    with torch.device("meta"):
        module = GPT()
        module.wide = nn.Linear(5000, 5000)
    units = find_units(module, "blocks", usage(module, idle="blocks"))
    assert units.names == ("wide",) and set(units.rejected) == {"blocks.0", "blocks.1"}

"""Every allowed cut gives the gradients of the whole step, for steps of many kinds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.nn import functional as F

from tests.pipeline import replay_models as models
from tests.pipeline import replay_odd_models as odd
from tests.pipeline import replay_rare_models as rare
from tests.pipeline import replay_side_models as side
from tests.pipeline.replaying import Case, assert_evaluates, assert_replays

wide = models.rows(2, 16)


def case(make: Callable[[], Any], cuts: int, microbatches: Any = None, **settings: Any) -> Case:
    return Case(make=make, cuts=cuts, microbatches=microbatches or models.rows(), **settings)


CASES = {
    "a chain": case(models.Chain, 4),
    "skip connections": case(models.Skips, 7),
    "encoder and decoder": case(models.Seq2Seq, 6, wide),
    "a bias for all blocks": case(models.BiasForAll, 4),
    "a gate for all blocks": case(models.BiasOfOutput, 4),
    "in place, added": case(lambda: models.InPlace(models.add_in_place), 2),
    "in place, an item": case(lambda: models.InPlace(models.set_item), 2),
    "in place, a view": case(lambda: models.InPlace(models.set_view), 2),
    "in place, of a copy": case(lambda: models.InPlace(models.out_of_place), 2),
    "in place, ReLU": case(models.InPlaceReLU, 6),
    "in place, ReLU between": case(lambda: models.Chain(between=F.relu_), 4),
    "containers": case(models.Containers, 4),
    "a cache that is returned": case(lambda: models.Cached(returns=True), 3),
    "a cache that is not returned": case(lambda: models.Cached(returns=False), 1),
    "repeated calls": case(models.Repeated, 5),
    "a cell over time": case(models.OverTime, 6),
    "kept in an attribute": case(models.KeptInAttribute, 3),
    "a checkpoint": case(lambda: models.Checkpointed(reentrant=False), 4),
    "a re-entrant checkpoint": case(lambda: models.Checkpointed(reentrant=True), 1),
    "a checkpoint over two": case(lambda: models.TwoInOneCheckpoint(reentrant=False), 2),
    "masks, indices, 0-dim": case(odd.MaskAndCount, 2),
    "functions of the batch": case(odd.BatchFunctions, 3),
    "own functions": case(odd.CustomFunction, 3),
    "own parameters": case(odd.OwnParameters, 2),
    "normed weights": case(odd.Normed, 3),
    "an LSTM": case(odd.Recurrent, 3),
    "an encoder": case(odd.Encoder, 3, wide, fake=False),
    "compiled": case(odd.Compiled, 3),
    "frozen": case(odd.Frozen, 3),
    "detached": case(odd.Detached, 3),
    "experts": case(odd.Mixture, 1, models.rows(6), fake=False),
    "experts in a module": case(odd.MixtureModule, 3, models.rows(6), fake=False),
    "reads items": case(odd.ReadsItem, 2, fake=False),
    "a plain list": case(odd.Listed, 3),
    "hooks": case(odd.Hooked, 2),
    "hooks on values": case(odd.HookedValues, 3),
    "hooks on a stream": case(odd.HookedStream, 2),
    "tied and functional": case(odd.Functional, 3),
    "a gradient penalty": case(odd.GradientPenalty, 2, recompute=False),
    "identities": case(rare.Identities, 5),
    "handed through": case(rare.HandsThrough, 3),
    "parameters returned": case(rare.ReturnsParameter, 1),
    "in place, modules": case(rare.InPlaceModules, 2),
    "collected in a list": case(rare.Collects, 1),
    "plain numbers kept": case(rare.Counts, 2),
    "several results": case(rare.Several, 2),
    "a teacher": case(rare.Teacher, 3),
    "own functions' other results": case(rare.OwnFunctions, 1),
    "own functions and a shared value": case(rare.OwnFunctionAndShared, 2),
    "a functional call": case(rare.FunctionalCall, 2),
    "views": case(rare.Views, 1),
    "a branch on requires_grad": case(rare.RequiresGradBranch, 2),
    "complex": case(side.Complex, 2),
    "written arguments": case(side.WritesArgument, 0),
    "counts in arguments": case(side.CountsInArgument, 1),
    "a hook with modules": case(side.HookWithModule, 6),
    "a number from values": case(lambda: side.ReturnsNumber("number"), 1, fake=False),
    "a decision from values": case(lambda: side.ReturnsNumber("decision"), 1, fake=False),
    "a kept number from values": case(lambda: side.ReturnsNumber("kept"), 1, fake=False),
    "running statistics": case(side.RunningStatistics, 5, models.rows(6)),
    "bfloat16": case(models.Skips, 7, precision=MixedPrecision("bf16-mixed", "cpu"), tolerance=2e-2),
}


@pytest.mark.parametrize("name", CASES)
def test_every_cut_gives_the_gradients_of_the_whole_step(name: str) -> None:
    torch.manual_seed(0)
    assert_replays(CASES[name])


EVALUATED = [
    "skip connections",
    "encoder and decoder",
    "a gate for all blocks",
    "in place, ReLU",
    "containers",
    "kept in an attribute",
    "a checkpoint",
    "functions of the batch",
    "own parameters",
    "normed weights",
    "an LSTM",
    "an encoder",
    "compiled",
    "experts in a module",
    "identities",
    "handed through",
    "parameters returned",
    "written arguments",
    "own functions' other results",
    "a teacher",
]
"""Those that may go other ways without gradients."""


@pytest.mark.parametrize("name", EVALUATED)
def test_every_cut_gives_the_results_of_the_whole_evaluation(name: str) -> None:
    assert_evaluates(CASES[name])

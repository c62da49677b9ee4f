"""A stage's backward in two parts: the gradients of what it received first, those of its weights when there is time.

Source: "Zero Bubble Pipeline Parallelism" (Qi et al. 2024). The first part runs the graph from the outputs to the
inputs and notes the gradients that arrive at each node that also leads to a weight; the second part starts from these
nodes. A node of a linear layer so computes each of its two products once.

torch has such a function, too, but where a weight is used at several nodes it can count gradients twice, or need a part
of the graph that it has freed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass(kw_only=True)
class _Start:
    """A node from which gradients of weights are computed."""

    node: Node
    """The node: on a way to an input, with an edge that leads to weights only."""

    weights: set[Node]
    """The weights that it leads to by such edges."""

    gradients: tuple[Tensor | None, ...] = ()
    """What arrived at it."""


@dataclass(kw_only=True)
class WeightPart:
    """What is left to do after the gradients of the inputs."""

    groups: list[list[_Start]] = field(default_factory=list)
    """Starts that lead to common weights, together."""

    weights: dict[Node, nn.Parameter] = field(default_factory=dict)
    """The weights by their nodes."""


def backward_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parameters: Iterable[nn.Parameter],
) -> tuple[tuple[Tensor | None, ...], WeightPart]:
    """Gradients of the inputs, and what is needed for those of the weights.

    Args:
        outputs: What the stage computed, or its loss.
        gradients: Of the outputs; ``None`` for a loss.
        inputs: What the stage received; those that take no gradient get ``None``.
        parameters: The stage's parameters.

    """
    reached = [
        (output, torch.ones_like(output) if gradient is None else gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad
    ]
    roots = [get_gradient_edge(output).node for output, _ in reached]
    sources = {get_gradient_edge(tensor).node for tensor in inputs if tensor.requires_grad}
    weights = {get_gradient_edge(each).node: each for each in parameters if each.requires_grad}
    starts = _find_starts(roots, sources, set(weights))
    handles = [start.node.register_prehook(_noting(start)) for start in starts]
    try:
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in reached],
                wanted,
                [gradient for _, gradient in reached],
                retain_graph=True,
                allow_unused=True,
            )
        )
    finally:
        for handle in handles:
            handle.remove()
    for output, _ in reached:
        output.detach_()  # what only leads to the inputs is not needed any more
    result = tuple(next(found) if tensor.requires_grad else None for tensor in inputs)
    return result, WeightPart(groups=_together(starts), weights=weights)


def backward_weights(part: WeightPart) -> None:
    """Add the gradients of the weights to their ``grad``."""
    for group in part.groups:
        targets = sorted(set().union(*(start.weights for start in group)), key=id)
        edges = [
            (GradientEdge(start.node, place), gradient)
            for start in group
            for place, gradient in enumerate(start.gradients)
            if gradient is not None
        ]
        if not edges:
            continue
        # Hooks that users put on tensors run before; and gradients may also arrive at a start from another one of the
        # group. What the start noted has both in it already.
        handles = [start.node.register_prehook(_putting(start)) for start in group]
        try:
            found = torch.autograd.grad(
                [edge for edge, _ in edges],
                [GradientEdge(node, 0) for node in targets],
                [gradient for _, gradient in edges],
                retain_graph=True,  # groups may share nodes between their starts
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        for node, gradient in zip(targets, found, strict=True):
            _add(part.weights[node], gradient)
    part.groups.clear()


def _add(weight: nn.Parameter, gradient: Tensor | None) -> None:
    if gradient is None:
        return
    if weight.grad is None:
        weight.grad = gradient.detach()
    else:
        weight.grad.add_(gradient.detach())


def _find_starts(roots: Iterable[Node], sources: set[Node], weights: set[Node]) -> list[_Start]:
    """The nodes on a way from a root to a source that have an edge by which weights, and no source, are reached."""
    to_source: dict[Node, bool] = {}
    to_weights: dict[Node, set[Node]] = {}
    starts: list[_Start] = []
    for node in _children_first(roots):
        children = [child for child, _ in node.next_functions if child is not None]
        to_source[node] = node in sources or any(to_source[child] for child in children)
        aside = [to_weights[child] for child in children if not to_source[child]]
        led = set().union(*aside) | ({node} & weights)
        if to_source[node]:
            if led:
                starts.append(_Start(node=node, weights=led))
            led = set()
        to_weights[node] = led
    return starts


def _children_first(roots: Iterable[Node]) -> Iterable[Node]:
    seen: set[Node] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack: list[tuple[Node, Any]] = [(root, iter(root.next_functions))]
        while stack:
            node, children = stack[-1]
            for child, _ in children:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append((child, iter(child.next_functions)))
                    break
            else:
                stack.pop()
                yield node


def _together(starts: Sequence[_Start]) -> list[list[_Start]]:
    """Starts in groups without a common weight."""
    groups: list[tuple[set[Node], list[_Start]]] = []
    for start in starts:
        joined = (set(start.weights), [start])
        apart = []
        for weights, members in groups:
            if weights & joined[0]:
                joined = (joined[0] | weights, members + joined[1])
            else:
                apart.append((weights, members))
        groups = [*apart, joined]
    return [members for _, members in groups]


def _noting(start: _Start) -> Any:
    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        start.gradients = tuple(gradients)

    return hook


def _putting(start: _Start) -> Any:
    def hook(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return start.gradients

    return hook

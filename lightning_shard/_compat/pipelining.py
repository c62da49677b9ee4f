"""Private API behind pipelines: the stage that torch's schedules drive, schedules by name, and compiled modules.

torch's own `PipelineStage` infers shapes by running the module once more, and has one shape for all microbatches. The
base class is made to be derived from, but its name is not public; neither are its hooks.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining._utils import _TensorMeta
from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo

from lightning_shard.pipeline.schedule import SCHEDULES, ScheduleName, rank_of_stage
from lightning_shard.pipeline.split_backward import backward_inputs, backward_weights
from lightning_shard.pipeline.stages import Wire

ForwardChunk = Callable[[int, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""Runs a stage on a microbatch, given its number and what was received; returns what to send, or the loss."""


def compiled_call(module: nn.Module) -> str:
    """The attribute through which a module is called: its forward, or what ``module.compile()`` put in its place."""
    call = getattr(module, "_compiled_call_impl", None)
    # What a pipeline has put there leads to the forward.
    return "forward" if call is None or getattr(call, "is_replay", False) else "_compiled_call_impl"


def replace_call(module: nn.Module, call: Any) -> None:
    """Let ``module(...)`` call ``call``; ``None`` puts its own call back. ``module.compile()`` uses the same door."""
    if call is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        vars(module)["_compiled_call_impl"] = call


def call_with_hooks(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What ``module(...)`` does when nothing is in its place."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


class _StageModule(nn.Module):
    """What the base class takes for the stage's module."""

    def __init__(self, run: ForwardChunk, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        super().__init__()
        self.chunk = 0
        self._run = run
        self._owned = parameters

    def forward(self, *received: Tensor) -> tuple[Tensor, ...]:
        return self._run(self.chunk, received)

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self._owned())


class ReplayStage(_PipelineStageBase):
    """A stage whose shapes are known beforehand, and may differ from microbatch to microbatch."""

    def __init__(
        self,
        run: ForwardChunk,
        parameters: Callable[[], Sequence[nn.Parameter]],
        stage: int,
        stages: int,
        device: torch.device,
        group: "dist.ProcessGroup | None",
    ) -> None:
        self._module = _StageModule(run, parameters)
        super().__init__(self._module, stage, stages, device, group)
        self.on_backward: Callable[[Tensor | None], None] = lambda loss: None
        self._receives: list[tuple[Wire, ...]] = []
        self._left: dict[int, Callable[[], Any]] = {}

    def prepare(self, receives: list[tuple[Wire, ...]], sends: list[tuple[Wire, ...]]) -> None:
        """Allocate what the microbatches of the coming steps are received into.

        Args:
            receives: For each microbatch what comes in.
            sends: For each microbatch what goes out.

        """
        self.chunks = len(receives)
        self._receives = receives
        self.args_recv_info = {
            chunk: tuple(self._buffer(wire, self.stage_index - 1) for wire in wires)
            for chunk, wires in enumerate(receives)
        }
        self.grad_recv_info = {
            chunk: tuple(self._gradient_buffer(wire) for wire in wires) for chunk, wires in enumerate(sends)
        }
        most = max((len(wires) for wires in sends), default=0)
        self.act_send_info = {place: [self.stage_index + 1] if not self.is_last else [] for place in range(most)}
        if self.is_last:
            self.act_send_info[0] = []

    def _buffer(self, wire: Wire, source: int) -> _RecvInfo:
        return _RecvInfo(
            f"{wire.source} for stage {self.stage_index}",
            source,
            torch.empty(wire.shape, dtype=wire.dtype, device=self.device),
            tensor_meta=_TensorMeta.from_tensor(
                torch.empty(wire.shape, dtype=wire.dtype, device="meta", requires_grad=wire.gradient)
            ),
        )

    def _gradient_buffer(self, wire: Wire) -> _RecvInfo:
        if wire.gradient:
            return self._buffer(wire, self.stage_index + 1)
        return _RecvInfo(f"no gradient of {wire.source}", self.stage_index + 1, None, tensor_meta=None)

    # --- what the base class leaves open; everything is prepared already ---

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: Any = False
    ) -> None:
        assert num_microbatches == self.chunks, (num_microbatches, self.chunks)

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Any = None,
        target: Any = None,
        received_grad_meta: Any = None,
        loss_kwargs: Any = None,
    ) -> None:
        assert num_microbatches == self.chunks, (num_microbatches, self.chunks)

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        raise AssertionError("buffers are prepared beforehand")

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []  # `meet_neighbours` has met them

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        # A step that failed may have left some.
        self.bwd_cache.clear()
        self._left.clear()

    # --- forward ---

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        self._module.chunk = fwd_chunk_id
        received = self._retrieve_recv_activations(fwd_chunk_id) if not self.is_first else ()
        # Past the base class, which would wrap the user's errors into its own.
        output = self.submod(*received)
        self.fwd_cache[fwd_chunk_id] = (output, list(received))
        if self.is_last and save_forward_output:
            self.output_chunks.append(output)
        return output

    # --- backward ---

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        self.on_backward(loss)
        outputs, received = self.fwd_cache.pop(bwd_chunk_id)
        if self.is_last:
            outputs, gradients = (loss,), (None,)
        else:
            gradients = self._retrieve_recv_grads(bwd_chunk_id)
        if full_backward:
            found = self._full(outputs, gradients, received)
        else:
            found = self._inputs_only(bwd_chunk_id, outputs, gradients, received)
        self.bwd_cache[bwd_chunk_id] = found

    def _full(self, outputs: Any, gradients: Any, received: list[Tensor]) -> tuple[Tensor | None, ...]:
        if not any(output.requires_grad for output in outputs):
            return tuple(None for _ in received)
        return stage_backward(outputs, gradients, received)

    def _inputs_only(
        self, chunk: int, outputs: Any, gradients: Any, received: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        # Weights are found by way of the inputs; where none takes a gradient, the weights' turn does everything.
        if not any(tensor.requires_grad for tensor in received):
            self._left[chunk] = lambda: self._full(outputs, gradients, received)
            return tuple(None for _ in received)
        if not any(output.requires_grad for output in outputs):
            self._left[chunk] = lambda: None
            return tuple(None for _ in received)
        found, part = backward_inputs(outputs, gradients, received, self._module.parameters())
        self._left[chunk] = lambda: backward_weights(part)
        return found

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self.has_backward:
            self._left.pop(bwd_chunk_id)()

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_first:
            return []
        operations = []
        peer = self._resolve_peer_global_rank(self.stage_index - 1)
        gradients = self.bwd_cache.pop(bwd_chunk_id)
        for wire, gradient in zip(self._receives[bwd_chunk_id], gradients, strict=True):
            if not wire.gradient:
                continue
            if gradient is None:  # this microbatch did not use it
                gradient = torch.zeros(wire.shape, dtype=wire.dtype, device=self.device)
            operations.append(dist.P2POp(dist.isend, gradient.contiguous(), peer, self.group))
        return operations


def place_stages(stages: Sequence[ReplayStage], schedule: ScheduleName, ranks: int, per_rank: int) -> None:
    """Tell stages on which rank of their group the others are."""
    for stage in stages:
        stage.stage_index_to_group_rank = {
            number: rank_of_stage(schedule, number, ranks, per_rank) for number in range(stage.num_stages)
        }


def meet_neighbours(stages: Sequence[ReplayStage]) -> None:
    """Send and receive once between neighbouring stages, in one order, so that no later order decides. Collective.

    On CUDA two ranks' first message makes a communicator of theirs, for which each waits for the other.
    """
    here = {stage.stage_index: stage for stage in stages}
    one = stages[0]
    for number in range(one.num_stages - 1):
        first, second = here.get(number), here.get(number + 1)
        if (first is None) == (second is None):  # both here, or neither
            continue
        stage = first or second
        assert stage is not None
        peer = stage._resolve_peer_global_rank(number + 1 if first is not None else number)
        message = torch.zeros(1, device=stage.device)
        for sends in (first is not None, first is None):
            (dist.send if sends else dist.recv)(message, peer, group=stage.group)


def make_schedule(schedule: ScheduleName, stages: Sequence[ReplayStage], microbatches: int, loss: Any) -> Any:
    """The schedule of torch for this rank's stages.

    Args:
        schedule: Its name.
        stages: The stages of this rank.
        microbatches: How many microbatches a step has.
        loss: Makes the loss of a stage's output and a target, or ``None`` without a backward.

    """
    # At an error a schedule logs all of its actions as errors, and the error itself is lost among them.
    torch_schedules.logger.setLevel(logging.CRITICAL)
    kind = torch_schedules.get_schedule_class(SCHEDULES[schedule].torch_name)
    several = issubclass(kind, torch_schedules.PipelineScheduleMulti)
    return kind(list(stages) if several else stages[0], microbatches, loss_fn=loss, scale_grads=False)


class _FillDrain(torch_schedules._PipelineScheduleRuntime):
    """All forwards, then all backwards, for stages placed in any way: GPipe's order."""

    def __init__(self, stages: Sequence[ReplayStage], microbatches: int, loss: Any) -> None:
        ranks = dict(stages[0].stage_index_to_group_rank)
        super().__init__(  # type: ignore[no-untyped-call]
            list(stages), microbatches, loss_fn=loss, scale_grads=False
        )
        # The base class has told the stages that they lie in a loop.
        self.stage_index_to_group_rank = ranks
        for stage in stages:
            stage.stage_index_to_group_rank = ranks
        action, kind = torch_schedules._Action, torch_schedules._ComputationType
        placed: dict[int, list[int]] = {}
        for number, rank in ranks.items():
            placed.setdefault(rank, []).append(number)
        every = range(microbatches)
        self.pipeline_order = {
            rank: [
                *[action(number, kind.FORWARD, chunk) for number in sorted(numbers) for chunk in every],
                *[action(number, kind.FULL_BACKWARD, chunk) for number in sorted(numbers)[::-1] for chunk in every],
            ]
            for rank, numbers in sorted(placed.items())
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


def make_fill_drain(stages: Sequence[ReplayStage], microbatches: int, loss: Any) -> Any:
    """GPipe's order for stages placed as another schedule places them; it takes any number of microbatches."""
    return _FillDrain(stages, microbatches, loss)


def run_forward_only(stages: Sequence[ReplayStage], microbatches: int) -> list[Any]:
    """Run the forwards of all microbatches, stage by stage; returns the last stage's outputs, if it is here."""
    sends: list[Any] = []
    here = {stage.stage_index: stage for stage in stages}
    outputs: list[Any] = []
    for number in sorted(here):
        stage = here[number]
        stage.has_backward = False
        stage.clear_runtime_states()
        for chunk in range(microbatches):
            if number - 1 not in here:
                for work in torch_schedules._batch_p2p(stage.get_fwd_recv_ops(chunk)):
                    work.wait()
            output = stage.forward_one_chunk(chunk, (), save_forward_output=False)
            if number + 1 in here:
                here[number + 1].set_local_fwd_input(output, chunk)
            elif not stage.is_last:
                sends.append((torch_schedules._batch_p2p(stage.get_fwd_send_ops(chunk)), output))
            else:
                outputs.append(output)
            stage.fwd_cache.pop(chunk)
    for works, _ in sends:
        for work in works:
            work.wait()
    return outputs


def has_tensor_hooks(parameter: nn.Parameter) -> bool:
    """Whether a hook of ``register_hook`` is on a parameter."""
    return bool(parameter._backward_hooks)


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether a hook of ``register_post_accumulate_grad_hook`` is on a parameter; there is no public list of them."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))

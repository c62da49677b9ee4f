"""Record a step: run it once on a copy of the module, on fake tensors where that is possible."""

import io
import warnings
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric, MetricCollection

from lightning_shard._compat.dry_run import (
    ValueWanted,
    attached_trainer,
    fake_mode,
    quiet_module,
    quiet_trainer,
    stand_in_metric,
)
from lightning_shard._compat.pipelining import call_with_hooks, compiled_call, replace_call
from lightning_shard._compat.process import is_compiled
from lightning_shard._compat.recording import OperatorWatch, has_backward_hooks, unwatched, version
from lightning_shard.pipeline.absent import AbsentTensor
from lightning_shard.pipeline.functions import METRIC, operation_name
from lightning_shard.pipeline.recorder import Recorder
from lightning_shard.pipeline.structure import tensors_in
from lightning_shard.pipeline.trace import Trace
from lightning_shard.units.dry_copy import DryCopier, cuda_in_use
from lightning_shard.units.usage import step_arguments
from lightning_shard.units.watch import guess_value

_SHAPE_ONLY = frozenset(
    "zeros_like ones_like full_like empty_like rand_like randn_like randint_like"
    " new_zeros new_ones new_full new_empty new_empty_strided new_tensor".split()
)
"""Functions that take nothing but shape, dtype and device from a tensor."""

_MOST_GUESSES = 64
"""A loop that waits for a value to change would never end."""


class NeedsValues(Exception):
    """The step cannot run on fake tensors: it reads values of tensors."""


def record_step(
    module: "pl.LightningModule",
    step: str,
    batch: Any,
    device: torch.device,
    precision: Precision,
    *,
    fake: bool,
    guess: bool = False,
) -> Trace:
    """Run ``step`` of a copy of ``module`` once and record it. Nothing of the original changes.

    Args:
        module: The module, attached to its Trainer; its tensors may be on any device, the meta device included, or be
            absent.
        step: ``"training_step"``, ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.
        batch: A microbatch.
        device: Where the step will run.
        precision: In whose context it will.
        fake: Run on fake tensors, which take neither memory nor time that depend on sizes; else on the real ones, with
            buffers copied.
        guess: Where a fake tensor's values are wanted, go on with made-up ones.

    Raises:
        NeedsValues: If the step cannot run on fake tensors.
        Exception: What the step raises on real ones.

    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    recorder = Recorder(step, names)
    recorder.trace.fake = fake
    with ExitStack() as stack:
        stack.enter_context(isolate_rng(include_cuda=cuda_in_use()))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(redirect_stdout(io.StringIO()))
        try:
            _run(module, step, batch, device, precision, recorder, names, guess, stack)
        except Exception as error:
            if not fake:
                raise
            what = "it reads values of tensors" if isinstance(error, ValueWanted) else f"{type(error).__name__}"
            raise NeedsValues(f"{what} ({(str(error).strip().splitlines() or [''])[0]})") from error
    return recorder.trace


def _run(
    module: "pl.LightningModule",
    step: str,
    batch: Any,
    device: torch.device,
    precision: Precision,
    recorder: Recorder,
    names: dict[int, str],
    guess: bool,
    stack: ExitStack,
) -> None:
    fake = recorder.trace.fake
    mode = fake_mode()
    trainer = attached_trainer(module)
    replaced: list[tuple[Any, Any]] = [] if trainer is None else [(trainer, quiet_trainer(trainer, step))]
    # What pipelines keep on the module is no part of it.
    replaced += [(value, value) for name, value in vars(module).items() if name.startswith("_lightning_shard")]
    copier = (_FakeCopier if fake else _RealCopier)(mode, device, replaced)
    clone: pl.LightningModule = copier(module)
    microbatch = copier(batch)
    clone.train(step == "training_step")
    for name, parameter in clone.named_parameters():
        names[id(parameter)] = name
    for submodule in clone.modules():
        if isinstance(submodule, pl.LightningModule):
            quiet_module(submodule, device)
        elif fake and not any(True for _ in submodule.parameters()):
            stand_in_metric(submodule)
    recorder.begins_with(microbatch, clone)
    _wrap(clone, recorder, {name for name, each in module.named_modules() if compiled_call(each) != "forward"})
    seen: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        recorder.saved(tensor, seen)
        return tensor

    stack.enter_context(torch.compiler.set_stance("force_eager"))
    stack.enter_context(torch.set_grad_enabled(step == "training_step"))
    if fake:
        stack.enter_context(mode)
    stack.enter_context(precision.forward_context())
    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _same))
    stack.enter_context(OperatorWatch(recorder.add_flops, recorder.drew))
    stack.enter_context(_Functions(recorder, guess))
    method = getattr(clone, step)
    before = _settings(clone)
    result = method(*step_arguments(method, microbatch))
    recorder.use(result)
    after = _settings(clone)
    recorder.trace.settings = [key for key, value in after.items() if before.get(key, _NOTHING) != value]
    recorder.trace.returns = result is not None
    loss = result.get("loss") if isinstance(result, dict) else result
    if step == "training_step" and isinstance(loss, Tensor):
        recorder.trace.loss = recorder.value_of(loss)
    recorder.locate(clone)


class _FakeCopier(DryCopier):
    """Leaves out what the replay put into the module."""

    def _fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, AbsentTensor):
            with self._mode:
                fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
                return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return super()._fake(tensor)

    def _module(self, module: nn.Module) -> nn.Module:
        clone = super()._module(module)
        forward = vars(clone).get("forward")
        if getattr(forward, "is_replay", False):
            del vars(clone)["forward"]
        return clone


class _RealCopier(_FakeCopier):
    """Twins of the real tensors: parameters share their memory, everything else is copied."""

    def _fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _wrap(clone: nn.Module, recorder: Recorder, compiled: set[str]) -> None:
    """Record the calls of every module's forward; what is compiled, or a script, is one piece."""
    whole: list[str] = []
    for name, submodule in clone.named_modules():
        if not name or any(name.startswith(prefix) for prefix in whole):
            continue
        if name in compiled or is_compiled(submodule) or isinstance(submodule, torch.jit.ScriptModule):
            whole.append(f"{name}.")
        if isinstance(submodule, torch.jit.ScriptModule):
            continue
        if isinstance(submodule, Metric | MetricCollection):
            for method in ("forward", "update"):
                vars(submodule)[method] = _noting(getattr(submodule, method), recorder)
        vars(submodule)["forward"] = _recorded(submodule, name, recorder)
        replace_call(submodule, _noting_hooks(submodule, recorder))


def _recorded(module: nn.Module, name: str, recorder: Recorder) -> Callable[..., Any]:
    forward = module.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        record = recorder.enter(name, (args, kwargs), has_backward_hooks(module))
        before = _settings(module)
        hooked, recorder.in_hooks = recorder.in_hooks, False
        try:
            result = forward(*args, **kwargs)
            after = _settings(module)
            record.settings = {key: value for key, value in after.items() if before.get(key, _NOTHING) != value}
            recorder.leave(record, result)
        finally:
            recorder.unwind(record)
            recorder.in_hooks = hooked
        return result

    return call


def _noting_hooks(module: nn.Module, recorder: Recorder) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        outside, recorder.in_hooks = recorder.in_hooks, True
        try:
            return call_with_hooks(module, args, kwargs)
        finally:
            recorder.in_hooks = outside

    return call


_NOTHING = object()


def _settings(module: nn.Module) -> dict[str, Any]:
    """A module's own plain attributes, which another module may read."""
    return {key: value for key, value in vars(module).items() if key != "training" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _noting(method: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder.use((args, kwargs), METRIC)
        with unwatched():
            return method(*args, **kwargs)

    return call


class _Functions(TorchFunctionMode):
    """Hands every function of tensors to the recorder."""

    def __init__(self, recorder: Recorder, guess: bool) -> None:
        super().__init__()
        self._recorder = recorder
        self._guesses = _MOST_GUESSES if guess else 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operation_name(func)
        if name is None:
            if func is Tensor.register_hook:
                self._recorder.hooked(args[0])
            return func(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        versions = [version(tensor) for tensor in given]
        operation = self._recorder.begin(name, (args, kwargs), name in _SHAPE_ONLY)
        try:
            result = func(*args, **kwargs)
        except ValueWanted as error:
            if not self._guesses:
                raise
            self._guesses -= 1
            result = guess_value(name, error, args, kwargs)
            self._recorder.trace.guessed = self._recorder.trace.guessed or f"{operation.source}: {name}"
        written = [tensor for tensor, before in zip(given, versions, strict=True) if version(tensor) != before]
        if name == "__set__.data":
            written = [args[0]]
        self._recorder.finish(operation, (args, kwargs), result, written)
        return result


def _same(tensor: Any) -> Any:
    return tensor

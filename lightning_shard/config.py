"""The options that users write: frozen dataclasses, checked when they are made.

Every field carries its docstring, so that the command line can show it. An option that can be judged without a model,
a device or a Trainer is judged here; the rest is judged by the strategy before the first step.
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn

OffloadDevice = Literal["cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where ZeRO keeps model states that need not live on the training device.

    Source: ZeRO-Offload (Ren et al. 2021) for the CPU, ZeRO-Infinity (Rajbhandari et al. 2021) for NVMe.

    Raises:
        ValueError: If a value is impossible by itself, or NVMe is asked for without ``nvme_path``.

    """

    optimizer: OffloadDevice | None = "cpu"
    """Where optimizer states (and the fp32 master weights) live and are updated: ``"cpu"``, ``"nvme"`` (stage 3 only)
    or ``None`` for the training device."""

    parameters: OffloadDevice | None = None
    """Where parameter partitions live between their uses: ``"cpu"``, ``"nvme"`` or ``None`` for the training device.
    Stage 3 only."""

    nvme_path: str | None = None
    """Folder on a local NVMe drive for swap files. Needed when ``optimizer`` or ``parameters`` is ``"nvme"``."""

    pin_memory: bool = False
    """Page-lock the CPU buffers: faster copies to and from a GPU, at the cost of memory that cannot be swapped out."""

    ratio: float = 1.0
    """Share of the optimizer states that is updated on the CPU, in (0, 1]. Below 1 the rest stays on the GPU
    (stage 3 with DeepSpeed's CPU Adam only)."""

    cpu_adam: bool | None = None
    """Run DeepSpeed's compiled CPU Adam in place of ``torch.optim.Adam`` / ``AdamW`` on the offloaded partition.
    ``None`` chooses it on GPUs, where it hides the update's cost, and not on CPU, where it would only add a compile.
    Other optimizers always run as they are."""

    def __post_init__(self) -> None:
        for field, value in (("optimizer", self.optimizer), ("parameters", self.parameters)):
            if value not in ("cpu", "nvme", None):
                raise ValueError(f"Offload({field}={value!r}): choose 'cpu', 'nvme' or None.")
        if self.optimizer is None and self.parameters is None:
            raise ValueError(
                "Offload(optimizer=None, parameters=None) offloads nothing: name a device for one of them, or pass"
                " offload=None to the strategy."
            )
        if "nvme" in (self.optimizer, self.parameters) and not self.nvme_path:
            raise ValueError(
                "Offload to NVMe needs a folder for its swap files: Offload(..., nvme_path='/path/on/a/local/drive')."
            )
        if self.nvme_path and "nvme" not in (self.optimizer, self.parameters):
            raise ValueError(
                f"Offload(nvme_path={self.nvme_path!r}) would not be used: neither optimizer={self.optimizer!r} nor"
                f" parameters={self.parameters!r} is 'nvme'. Set one of them to 'nvme', or leave nvme_path out."
            )
        if self.cpu_adam and self.optimizer is None:
            raise ValueError("Offload(cpu_adam=True) runs on an offloaded optimizer partition, but optimizer=None.")
        if not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"Offload(ratio={self.ratio}): the share that the CPU updates must be in (0, 1].")
        if self.ratio < 1.0 and self.optimizer != "cpu":
            raise ValueError(
                f"Offload(ratio={self.ratio}) splits the optimizer between CPU and GPU, so it needs optimizer='cpu';"
                f" got optimizer={self.optimizer!r}."
            )
        if self.ratio < 1.0 and self.cpu_adam is False:
            raise ValueError(
                f"Offload(ratio={self.ratio}) is a feature of DeepSpeed's CPU Adam; it cannot go with cpu_adam=False."
            )


@dataclass(frozen=True, kw_only=True)
class ZeroPlusPlus:
    """ZeRO++ (Wang et al. 2023): less traffic between nodes at stage 3. Needs CUDA.

    Raises:
        ValueError: If nothing is switched on, or ``hpz_partition_size`` is not positive.

    """

    hpz_partition_size: int = 1
    """hpZ: ranks that share a secondary copy of the parameters (usually the GPUs of a node), so that the backward
    gather stays inside the node. 1 switches it off."""

    quantized_weights: bool = False
    """qwZ: gather the weights in int8."""

    quantized_gradients: bool = False
    """qgZ: reduce the gradients in int4, by all-to-all."""

    def __post_init__(self) -> None:
        if self.hpz_partition_size < 1:
            raise ValueError(
                f"ZeroPlusPlus(hpz_partition_size={self.hpz_partition_size}): ranks per group, at least 1."
            )
        if self.hpz_partition_size == 1 and not self.quantized_weights and not self.quantized_gradients:
            raise ValueError(
                "ZeroPlusPlus() switches nothing on: set hpz_partition_size, quantized_weights or quantized_gradients,"
                " or pass zero_plus_plus=None."
            )


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """How ``deepspeed.checkpointing.checkpoint`` keeps the activations that it saves.

    The module decides *what* is checkpointed by calling ``deepspeed.checkpointing.checkpoint`` in its forward; these
    settings decide *where* the saved inputs live.
    """

    partition: bool = False
    """Partition the saved activations over the model-parallel ranks."""

    cpu: bool = False
    """Keep the saved activations in CPU memory."""

    contiguous_memory: bool = False
    """Copy the saved activations into one buffer against fragmentation. Needs ``partition``."""

    def __post_init__(self) -> None:
        if self.contiguous_memory and not self.partition:
            raise ValueError("ActivationCheckpointing(contiguous_memory=True) needs partition=True.")


@dataclass(frozen=True, kw_only=True)
class SizeUnits:
    """FSDP units by size: a module becomes a unit when it holds enough parameters that no unit inside it has taken.

    Raises:
        ValueError: If ``min_params`` is not positive.

    """

    min_params: int = 20_000_000
    """A unit is closed when its unclaimed parameters reach this many elements."""

    def __post_init__(self) -> None:
        if self.min_params < 1:
            raise ValueError(f"SizeUnits(min_params={self.min_params}): elements, at least 1.")


@dataclass(frozen=True, kw_only=True)
class ClassUnits:
    """FSDP units by class: every module of one of the classes becomes a unit.

    Raises:
        ValueError: If there is no class, or one of them is no module class and no import path.

    """

    classes: list[type[nn.Module] | str]
    """Classes of modules, or their import paths such as ``"torch.nn.TransformerEncoderLayer"``. A subclass counts."""

    def __post_init__(self) -> None:
        if not self.classes:
            raise ValueError("ClassUnits(classes=[]): name at least one class of modules.")
        for each in self.classes:
            if isinstance(each, str):
                if not all(part.isidentifier() for part in each.split(".")) or "." not in each:
                    raise ValueError(
                        f"ClassUnits(classes=[{each!r}]): not an import path. Write package.module.Class, for example"
                        " 'torch.nn.TransformerEncoderLayer'."
                    )
            elif not (isinstance(each, type) and issubclass(each, nn.Module)):
                raise ValueError(f"ClassUnits(classes=[{each!r}]): neither a class of modules nor an import path.")


DType = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """The dtypes of FSDP2: weights are stored and updated in the module's own dtype, and used in others.

    Raises:
        ValueError: If nothing is set.

    """

    compute: DType | None = "bf16"
    """Dtype in which parameters are gathered and used, in forward and backward; ``None`` for their own."""

    reduce: DType | None = "fp32"
    """Dtype in which gradients are reduced over the ranks; ``None`` for that of ``compute``."""

    output: DType | None = None
    """Dtype to which floating-point outputs of a step are cast; ``None`` leaves them as they are."""

    def __post_init__(self) -> None:
        if self.compute is None and self.reduce is None and self.output is None:
            raise ValueError("MixedPrecision() with every dtype None changes nothing; pass mixed_precision=None.")

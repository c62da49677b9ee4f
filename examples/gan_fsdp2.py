"""A GAN with two optimizers and a loop of its own, as an ordinary LightningModule.

A generator learns to throw points onto a ring of eight small clouds, a discriminator to tell its points from real ones.
Nothing in them knows of shards: ``Trainer(strategy="fsdp2")`` is all it takes. As a script this file trains on two CPU
ranks in some seconds, and draws what the generator has learned: ``python examples/gan_fsdp2.py --help``.
"""

import argparse
import math

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_shard  # noqa: F401 - registers the names

CLOUDS = 8
SPREAD = 0.05
"""Standard deviation of a cloud; the ring has the radius 1."""


class Block(nn.Module):
    """A hidden layer; a network repeats it, so that each becomes a unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations ``[rows, width]`` to the same shape."""
        return F.leaky_relu(self.linear(x), 0.2)


def network(inputs: int, width: int, layers: int, outputs: int) -> nn.Sequential:
    """A feed-forward network from ``[rows, inputs]`` to ``[rows, outputs]``."""
    blocks = (Block(width) for _ in range(layers))
    return nn.Sequential(nn.Linear(inputs, width), nn.LeakyReLU(0.2), *blocks, nn.Linear(width, outputs))


class RingGAN(pl.LightningModule):
    """A generator and a discriminator, each with its own optimizer.

    Args:
        noise: Numbers that the generator makes a point of.
        width: Size of the activations.
        layers: Hidden layers of each network.
        lr: Learning rate of both.

    """

    def __init__(self, noise: int = 4, width: int = 64, layers: int = 2, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.lr = lr
        self.generator = network(noise, width, layers, 2)
        self.discriminator = network(2, width, layers, 1)

    def forward(self, noise: Tensor) -> Tensor:
        """Points ``[rows, 2]`` made of noise ``[rows, noise]``."""
        points: Tensor = self.generator(noise)
        return points

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Train both networks on real points ``[rows, 2]`` and noise ``[rows, noise]``."""
        real, noise = batch
        for_generator, for_discriminator = self.optimizers()  # type: ignore[attr-defined]

        self.toggle_optimizer(for_discriminator)
        fake = self(noise).detach()
        judged_real, judged_fake = self.discriminator(torch.cat([real, fake])).chunk(2)
        discriminator_loss = F.softplus(-judged_real).mean() + F.softplus(judged_fake).mean()
        for_discriminator.zero_grad()
        self.manual_backward(discriminator_loss)
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)

        self.toggle_optimizer(for_generator)
        generator_loss = F.softplus(-self.discriminator(self(noise))).mean()
        for_generator.zero_grad()
        self.manual_backward(generator_loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)

        losses = {"discriminator": discriminator_loss, "generator": generator_loss}
        self.log_dict(losses, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Adam for each network; with little momentum, as the two chase each other."""
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(each.parameters(), lr=self.lr, betas=(0.5, 0.99)) for each in networks]


class Drawing(pl.Callback):
    """Keeps points of the trained generator."""

    def __init__(self, rows: int = 1000) -> None:
        self.rows = rows
        self.points = torch.empty(0, 2)

    @torch.no_grad()
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Generate on every rank: the generator's parameters are gathered on the way."""
        assert isinstance(pl_module, RingGAN)
        noise = torch.randn(self.rows, pl_module.hparams["noise"], generator=torch.Generator().manual_seed(1))
        self.points = pl_module(noise.to(pl_module.device)).float().cpu()


def centres() -> Tensor:
    """The middles of the clouds, ``[8, 2]``."""
    angles = torch.arange(CLOUDS) * 2 * math.pi / CLOUDS
    return torch.stack([angles.cos(), angles.sin()], dim=1)


class Ring(pl.LightningDataModule):
    """Real points and noise for the generator.

    A step's global batch is the same rows for any number of ranks; each rank reads its own part of it.

    Args:
        steps: Batches.
        batch_size: Points per step over all ranks; must be a multiple of their number.
        noise: Numbers that the generator makes a point of.

    """

    def __init__(self, steps: int = 500, batch_size: int = 256, noise: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randint(CLOUDS, (steps * batch_size,), generator=generator)
        points = centres()[chosen] + SPREAD * torch.randn(len(chosen), 2, generator=generator)
        self.rows = TensorDataset(points, torch.randn(len(chosen), noise, generator=generator))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Points ``[batch_size / ranks, 2]`` and noise ``[batch_size / ranks, noise]``.

        Raises:
            ValueError: If the ranks cannot share a batch evenly.

        """
        assert self.trainer is not None
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        ranks = place["num_replicas"]
        if self.batch_size % ranks:
            raise ValueError(f"batch_size={self.batch_size} is not a multiple of the {ranks} ranks that share it.")
        # Always this sampler, for one process too: rank r of N takes every Nth row.
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(self.rows, shuffle=False, **place)
        return DataLoader(self.rows, batch_size=self.batch_size // ranks, sampler=sampler)


def covered(points: Tensor) -> tuple[int, float]:
    """What points ``[rows, 2]`` have hit.

    Returns:
        How many clouds hold at least a quarter of their fair share of the points, and the share of the points that lie
        in any. A cloud ends at four standard deviations from its middle.

    """
    distance, nearest = torch.cdist(points, centres()).min(dim=1)
    inside = distance <= 4 * SPREAD
    counts = torch.bincount(nearest[inside], minlength=CLOUDS)
    return int((counts >= len(points) / CLOUDS / 4).sum()), float(inside.float().mean())


def plot(points: Tensor, columns: int = 49, rows: int = 23) -> str:
    """Points ``[n, 2]`` in the square from -1.4 to 1.4 as text: the more in a place, the darker its sign."""
    counts = torch.zeros(rows, columns, dtype=torch.long)
    x, y = ((points / 2.8 + 0.5) * torch.tensor([columns, rows])).floor().long().T
    seen = (x >= 0) & (x < columns) & (y >= 0) & (y < rows)
    counts.index_put_((rows - 1 - y[seen], x[seen]), torch.ones(int(seen.sum()), dtype=torch.long), accumulate=True)
    return "\n".join("".join(" .:+#"[min(4, int(count).bit_length())] for count in line) for line in counts).rstrip()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--strategy", default="fsdp2", help="any name of the Trainer's strategy argument")
    parser.add_argument("--devices", type=int, default=2, help="number of ranks")
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--precision", default="32-true", help="precision of the Trainer")
    parser.add_argument("--steps", type=int, default=500, help="steps of each optimizer")
    parser.add_argument("--batch-size", type=int, default=256, help="points per step over all ranks")
    for name, value in (("noise", 4), ("width", 64), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{name} of the networks")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of both optimizers")
    return parser.parse_args()


def main() -> None:
    """Train, and draw what was learned."""
    options = parse()
    pl.seed_everything(0, verbose=False)
    drawing = Drawing()
    trainer = pl.Trainer(
        strategy=options.strategy,
        devices=options.devices,
        accelerator=options.accelerator,
        precision=options.precision,
        max_epochs=1,
        callbacks=[drawing],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = RingGAN(options.noise, options.width, options.layers, options.lr)
    trainer.fit(model, datamodule=Ring(options.steps, options.batch_size, options.noise))
    if not trainer.is_global_zero:
        return
    hit, share = covered(drawing.points)
    losses = ", ".join(f"{name} {trainer.callback_metrics[name]:.6f}" for name in ("discriminator", "generator"))
    print(f"\n{plot(drawing.points)}\n")
    print(f"Under {options.strategy} on {options.devices} ranks, {options.steps} steps; last losses: {losses}.")
    print(f"{hit} of {CLOUDS} clouds covered; {share:.0%} of the points lie in one.", flush=True)


if __name__ == "__main__":
    main()

"""The models that pipelines must train as one process does: ordinary Lightning code, each in its usual shape."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

STEPS = 5
ROWS = 8


class Stepped(pl.LightningModule):
    """The steps that people write, around `loss(batch)` and `predict(batch)`."""

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def predict(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.predict(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class MLP(Stepped):
    """A plain stack."""

    def __init__(self) -> None:
        super().__init__()
        widths = [12, 20, 16, 24, 20, 16, 12]
        layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(12, 4))

    def predict(self, batch: Any) -> Tensor:
        return self.net(batch[0])

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.predict(batch), batch[1])


class Attention(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class GPT(Stepped):
    """A decoder whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(40, 16)
        self.position = nn.Parameter(torch.randn(12, 16) * 0.02)
        self.blocks = nn.ModuleList(Attention(16, hidden) for hidden in (32, 48, 40, 64, 32, 48))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position[: ids.shape[1]]
        mask = torch.triu(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device), 1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

    def predict(self, batch: Any) -> Tensor:
        return self(batch["ids"])

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["ids"]).flatten(0, 1), batch["next"].flatten())


class Residual(nn.Module):
    """A residual block with activations in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)
        self.two = nn.Conv2d(channels, channels, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.two(self.relu(self.norm(self.one(x)))))


class CNN(Stepped):
    """A residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True))
        self.one = nn.Sequential(Residual(6), Residual(6))
        self.down = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.two = nn.Sequential(Residual(8), Residual(8))
        self.head = nn.Linear(8, 4)

    def predict(self, batch: Any) -> Tensor:
        return self.head(self.two(self.down(self.one(self.stem(batch[0])))).mean((2, 3)))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.predict(batch), batch[1])


class Stream(Stepped):
    """Layers add to a stream in the step itself, which logs and counts between them; batches have 8 or 6 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 10)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(10, hidden), nn.Linear(hidden, 10)) for hidden in (8, 12, 9, 14)
        )
        self.gate = nn.Parameter(torch.randn(10))
        self.last = nn.Linear(10, 4)
        self.size = MeanMetric()

    def predict(self, batch: Any) -> Tensor:
        x = self.first(batch[0])
        gate = torch.sigmoid(self.gate) * 2
        for number, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x)) * gate
            if self.training:
                self.log(f"mean {number}", x.mean())
        return self.last(x)

    def loss(self, batch: Any) -> Tensor:
        logits = self.predict(batch)
        self.size.update(logits.detach().abs().mean())
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss.item(), batch_size=len(batch[1]))


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(1, outputs), nn.ReLU())


class UNet(Stepped):
    """Skip connections across the whole depth."""

    def __init__(self, c: int = 6) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _conv(3, c), _conv(c, 2 * c), _conv(2 * c, 2 * c)
        self.up2, self.up1, self.out = _conv(4 * c, c), _conv(2 * c, c), nn.Conv2d(c, 3, 1)

    def predict(self, batch: Any) -> Tensor:
        one = self.down1(batch)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.middle(F.max_pool2d(two, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), two], 1))
        return self.out(self.up1(torch.cat([F.interpolate(x, scale_factor=2), one], 1)))

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.predict(batch), batch)


class FromHub(Stepped):
    """A Hugging Face model built from a small config; its own loss, as its users have it."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()

    def predict(self, batch: Any) -> Tensor:
        return self.model(**batch).logits

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=48, n_embd=16, n_layer=5, n_head=4, n_positions=24, bos_token_id=0, eos_token_id=0, **off
    )
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 5}
    return LlamaForCausalLM(LlamaConfig(vocab_size=48, num_attention_heads=4, num_key_value_heads=2, **sizes))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(vocab_size=48, **sizes, **off))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 4}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=4, **sizes, **off))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_ff": 40, "d_kv": 4, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4}
    config = T5Config(vocab_size=48, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **sizes)
    return T5ForConditionalGeneration(config)


def _ids(step: int, vocabulary: int = 40) -> Tensor:
    return torch.randint(1, vocabulary, (ROWS, 10), generator=torch.Generator().manual_seed(step))


def _image(step: int) -> Tensor:
    return torch.randn(ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(step))


def _label(step: int) -> Tensor:
    return torch.randint(0, 4, (ROWS,), generator=torch.Generator().manual_seed(100 + step))


def _some(step: int) -> slice:
    return slice(ROWS - 2 * (step % 2))


def _row(step: int) -> Tensor:
    return torch.randn(ROWS, 12, generator=torch.Generator().manual_seed(step))


MODELS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[int], Any]]] = {
    "MLP in nn.Sequential": (MLP, lambda step: (_row(step), _label(step))),
    "GPT, tied embeddings": (GPT, lambda step: {"ids": _ids(step), "next": _ids(step + 50)}),
    "residual CNN": (CNN, lambda step: (_image(step), _label(step))),
    "U-Net with skips": (UNet, _image),
    "residual stream in the step": (Stream, lambda step: (_row(step)[_some(step)], _label(step)[_some(step)])),
    "HF GPT-2 (tied)": (lambda: FromHub(gpt2), lambda step: {"input_ids": _ids(step), "labels": _ids(step)}),
    "HF Llama": (lambda: FromHub(llama), lambda step: {"input_ids": _ids(step), "labels": _ids(step)}),
    "HF BERT": (lambda: FromHub(bert), lambda step: {"input_ids": _ids(step), "labels": _label(step) % 2}),
    "HF ViT": (lambda: FromHub(vit), lambda step: {"pixel_values": _image(step), "labels": _label(step)}),
    "HF T5 (tied)": (lambda: FromHub(t5), lambda step: {"input_ids": _ids(step), "labels": _ids(step + 50)}),
}
"""Each model with what makes its batches."""

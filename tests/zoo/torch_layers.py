"""Layers and habits of PyTorch that no other case has. None of them is in a design document."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_case import (
    CLASSES,
    HIDDEN,
    LENGTH,
    MOST_RECORDS,
    VOCABULARY,
    Tree,
    case,
    class_loss,
    floats,
    random_images,
    random_labels,
    random_tokens,
    squared_error,
    token_ids,
    token_loss,
)


def text_to_translate(generator: torch.Generator) -> tuple[Tree, Tree]:
    source, _ = random_tokens(generator)
    target = torch.randint(3, VOCABULARY, (MOST_RECORDS, LENGTH), generator=generator)
    given = F.pad(target[:, :-1], (1, 0), value=1)
    return (source, given), {"tokens": target, "counted": torch.ones_like(target)}


class Translator(nn.Module):
    """`nn.Transformer`, with one table for source, target and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.transformer = nn.Transformer(
            HIDDEN,
            nhead=2,
            num_encoder_layers=1,
            num_decoder_layers=1,
            dim_feedforward=32,
            batch_first=True,
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], dtype=self.embed.weight.dtype
        )
        states = self.transformer(self.embed(source), self.embed(target), tgt_mask=causal)
        return states @ self.embed.weight.T


@case("torch/transformer", text_to_translate, token_loss, held_out=True)
def transformer() -> nn.Module:
    return Translator()


def codes_to_decode(generator: torch.Generator) -> tuple[Tree, Tree]:
    return random_images(generator, 6), random_images(generator, 1, 8, 8)


@case("torch/transposed_convolutions", codes_to_decode, squared_error, held_out=True)
def transposed_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 32),
        nn.Unflatten(1, (8, 2, 2)),
        nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1),
    )


@case("torch/convolutions_3d", floats(1, 5, 6, 6), class_loss, held_out=True)
def convolutions_3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.MaxPool3d((1, 2, 2)),
        nn.Conv3d(4, 4, 3),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )


@case("torch/dilated_convolutions_1d", floats(2, 20), class_loss, held_out=True)
def dilated_convolutions_1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, dilation=2, padding="same", padding_mode="circular"),
        nn.PReLU(4),
        nn.Conv1d(4, 4, 3, dilation=4, groups=2),
        nn.InstanceNorm1d(4, affine=True),
        nn.GELU(),
        nn.AdaptiveMaxPool1d(2),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


@case("torch/embedding_bag", token_ids, class_loss, held_out=True)
def embedding_bag() -> nn.Module:
    return nn.Sequential(
        nn.EmbeddingBag(VOCABULARY, 8, mode="mean"), nn.LeakyReLU(), nn.Linear(8, CLASSES)
    )


def pairs(generator: torch.Generator) -> tuple[Tree, Tree]:
    inputs = [random_images(generator, 4), random_images(generator, 5)]
    return inputs, random_labels(generator)


@case("torch/bilinear", pairs, class_loss, held_out=True)
def bilinear() -> nn.Module:
    return nn.Bilinear(4, 5, CLASSES)


class FewNumbers(nn.Module):
    """A scalar parameter, one that is used twice, and one that is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.square = nn.Parameter(torch.randn(6, 6) / 3)
        self.spare = nn.Parameter(torch.ones(2))
        self.classify = nn.Linear(6, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        rows = torch.tanh(rows @ self.square)
        rows = torch.tanh(rows @ self.square.T + self.scale)
        return self.classify(rows) * self.scale


@case("torch/scalar_and_shared_parameters", floats(6), class_loss, held_out=True)
def scalar_and_shared_parameters() -> nn.Module:
    return FewNumbers()


@case("torch/layer_norm_of_images", floats(3, 6, 6), class_loss, held_out=True)
def layer_norm_of_images() -> nn.Module:
    """A norm whose weight has the shape of a whole record, and untied channels after it."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, groups=1, padding=1, bias=False),
        nn.LayerNorm((4, 6, 6)),
        nn.SiLU(),
        nn.Conv2d(4, 8, 3, groups=4),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


class CellLoop(nn.Module):
    """An LSTM cell in a Python loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 8)
        self.start = nn.Parameter(torch.zeros(8))
        self.classify = nn.Linear(8, CLASSES)

    def forward(self, sequences: Tensor) -> Tensor:
        hidden = self.start.expand(len(sequences), -1)
        memory = torch.zeros_like(hidden)
        for step in sequences.unbind(1):
            hidden, memory = self.cell(step, (hidden, memory))
        return self.classify(hidden)


@case("torch/lstm_cell", floats(LENGTH, 3), class_loss, held_out=True)
def lstm_cell() -> nn.Module:
    return CellLoop()


class PoolingAttention(nn.Module):
    """One learned query looks at a record's tokens; keys and values have learned extra rows."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 8))
        self.attend = nn.MultiheadAttention(
            8, 2, dropout=0.1, add_bias_kv=True, kdim=5, vdim=5, batch_first=True
        )
        self.classify = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        query = self.query.expand(len(tokens), -1, -1)
        pooled, _ = self.attend(query, tokens, tokens)
        return self.classify(pooled[:, 0])


@case("torch/attention_with_bias", floats(LENGTH, 5), class_loss, held_out=True)
def attention_with_bias() -> nn.Module:
    return PoolingAttention()


class FourierLayer(nn.Module):
    """A Fourier neural operator: complex weights on the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(2, 6)
        self.weights = nn.Parameter(torch.randn(4, 6, 6, 2) / 6)
        self.classify = nn.Linear(6, CLASSES)

    def forward(self, signals: Tensor) -> Tensor:
        lifted = self.lift(signals)
        spectrum = torch.fft.rfft(lifted, dim=1)[:, :4]
        spectrum = torch.einsum("bfi,fio->bfo", spectrum, torch.view_as_complex(self.weights))
        mixed = torch.fft.irfft(spectrum, n=signals.shape[1], dim=1)
        return self.classify(F.gelu(lifted + mixed).mean(1))


@case("torch/fourier_operator", floats(12, 2), class_loss, held_out=True)
def fourier_operator() -> nn.Module:
    return FourierLayer()


class UNet(nn.Module):
    """Down, up by interpolation, and a skip connection; a loss for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.Conv2d(8, 1, 3, padding=1, padding_mode="reflect")

    def forward(self, images: Tensor) -> Tensor:
        shallow = F.relu(self.down(images))
        deep = F.relu(self.middle(F.avg_pool2d(shallow, 2)))
        deep = F.interpolate(deep, scale_factor=2, mode="bilinear", align_corners=False)
        return self.up(torch.cat([shallow, deep], dim=1))


def images_to_restore(generator: torch.Generator) -> tuple[Tree, Tree]:
    clean = random_images(generator, 1, 8, 8)
    return clean + 0.1 * random_images(generator, 1, 8, 8), clean


@case("torch/unet", images_to_restore, squared_error, held_out=True)
def unet() -> nn.Module:
    return UNet()

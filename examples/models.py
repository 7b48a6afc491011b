"""The three models of SWIFT's evaluation, scaled down until they train on a laptop; the other examples use them.

Data is scikit-learn's handwritten digits, or, for BERT, generated sentences. It never downloads anything.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

WIDTH, NUM_WORDS, LENGTH = 32, 64, 16


class WideBlock(nn.Module):
    """Two convolutions beside a shortcut, after their normalization (Wide-ResNet)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.shortcut(x)


def wide_resnet() -> nn.Sequential:
    """(N, 1, 8, 8) -> (N, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), WideBlock(8, WIDTH), nn.MaxPool2d(2), WideBlock(WIDTH, 2 * WIDTH),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * WIDTH, 10),
    )  # fmt: skip


class Patches(nn.Module):
    """(N, 1, 8, 8) -> (N, 16, WIDTH): patches of 2 x 2 and where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, WIDTH, 2, stride=2)
        self.place = nn.Parameter(torch.randn(16, WIDTH) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2) + self.place


class Words(nn.Module):
    """(N, LENGTH) numbers of words -> (N, LENGTH, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(NUM_WORDS, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.word(x) + self.place


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def layers(number: int) -> list[nn.Module]:
    return [nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True) for _ in range(number)]


def vit() -> nn.Sequential:
    """(N, 1, 8, 8) -> (N, 10)."""
    return nn.Sequential(Patches(), *layers(4), Mean(), nn.Linear(WIDTH, 10))


def bert() -> nn.Sequential:
    """(N, LENGTH) -> (N, LENGTH, NUM_WORDS): which word stands where."""
    return nn.Sequential(Words(), *layers(4), nn.Linear(WIDTH, NUM_WORDS))


MODELS = {"wide-resnet": wide_resnet, "vit": vit, "bert": bert}


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of classes, in the last dimension."""
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def data_of(model: str, size: int = 512) -> TensorDataset:
    """What that model learns: the digit of an image, or the words of a sentence, a seventh of which is masked."""
    if model != "bert":
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
        return TensorDataset(images[:size], torch.from_numpy(digits.target).long()[:size])
    generator = torch.Generator().manual_seed(0)
    # A sentence counts up from somewhere, in steps of its own.
    first, step = (torch.randint(1, NUM_WORDS, (size, 1), generator=generator) for _ in range(2))
    words = (first + step * torch.arange(LENGTH)) % (NUM_WORDS - 1) + 1
    masked = torch.where(torch.rand(words.shape, generator=generator) < 1 / 7, 0, words)
    return TensorDataset(masked, words)

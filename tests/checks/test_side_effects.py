"""A pass over private records leaves nothing behind in a model: in no buffer or parameter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

import tacit
from tacit import PerSampleClip
from tacit.checks import watched_step
from tacit.errors import MixesRecords
from tacit.lipschitz import BoundedInput, SpectralLinear
from tacit.sampling import batch_of


class Keeps(nn.Module):
    """Remembers the mean of what it saw, in training: in place, through a kernel, or anew."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 3)
        self.register_buffer("mu", torch.zeros(4))
        self.register_buffer("sigma", torch.ones(4))
        self.book = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                mean = x.mean(dim=0)
                if self.how == "in place":
                    self.mu.lerp_(mean, 0.1)
                elif self.how == "anew":
                    self.mu = 0.9 * self.mu + 0.1 * mean
                elif self.how == "codebook":
                    self.book.copy_(mean)
                elif self.how == "kernel" and len(x) > 1:
                    F.batch_norm(x, self.mu, self.sigma, training=True)
        return self.layer(x)


def batch(n=8):
    inputs = torch.randn(n, 4)
    return batch_of(inputs, torch.randint(3, (n,)), divisor=8, scheme=tacit.sampling.Poisson(0.5))


@pytest.mark.parametrize("how", ["in place", "anew", "codebook", "kernel"])
def test_per_sample_clipping_refuses_a_model_that_remembers(how):
    with pytest.raises(MixesRecords, match="writes values of records into"):
        PerSampleClip(1.0)(Keeps(how), F.cross_entropy, batch())
    PerSampleClip(1.0)(Keeps("nothing"), F.cross_entropy, batch())


@pytest.mark.parametrize("before", ["evaluation", "nobody"])
def test_a_harmless_first_pass_does_not_end_the_watch(before):
    model, query = Keeps("kernel"), PerSampleClip(1.0)
    if before == "evaluation":
        query(model.eval(), F.cross_entropy, batch())
        model.train()
    else:
        query(model, F.cross_entropy, batch(0))
    with pytest.raises(MixesRecords, match="into 'mu'"):
        query(model, F.cross_entropy, batch())


@pytest.mark.parametrize("normed", [spectral_norm, parametrizations.spectral_norm])
def test_without_a_proof_every_write_is_refused(normed):
    model = nn.Sequential(normed(nn.Linear(4, 4)), nn.Linear(4, 3))
    with pytest.raises(MixesRecords, match="was written"), watched_step(model):
        model(torch.randn(5, 4))


def test_clipless_refuses_a_layer_that_remembers():
    class Remembers(nn.Module):
        exact = True

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            with torch.no_grad():
                self.seen.add_(x.sum(dim=0))
            return x

        def output_norm(self, x):
            return x.norm

        def lipschitz(self, x):
            return 1.0

        def gradient_norms(self, x, cotangent):
            return {}

    model = nn.Sequential(BoundedInput(1.0), Remembers(), SpectralLinear(4, 3))
    with pytest.raises(MixesRecords, match=r"into '.*1\.layer\.seen'"):
        tacit.Clipless()(model, tacit.losses.CrossEntropy(), batch())

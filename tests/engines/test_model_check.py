"""Models whose sums could not be right are refused, by name and with the way out."""

from __future__ import annotations

import pytest
import torch
from engine_checks import batch_for, quadratic, run_engine
from torch import nn

from tacit import PerSampleClip
from tacit.engines import BookKeeping, PerRecord
from tacit.errors import MixesRecords

D = 5


def reals(n):
    return torch.randn(n, D, dtype=torch.float64)


def tokens(n):
    return torch.randint(0, 7, (n, 4))


class BatchMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        h = self.layer(x)
        return h - h.mean(dim=0)


class Overwrites(nn.Module):
    """Changes a layer's input after the layer has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        x = x.clone()
        y = self.layer(x)
        x.zero_()
        return y


def test_a_mean_over_records_is_refused_with_line_and_remedy():
    model = BatchMean().double()
    for count in (4, 5):
        with pytest.raises(MixesRecords, match=r"aten\.mean at test_model_check\.py") as raised:
            PerSampleClip(1.0)(model, quadratic, batch_for(reals(count)))
        assert "PerRecord" in str(raised.value)


@pytest.mark.parametrize("engine", [BookKeeping(), PerRecord()])
def test_a_table_that_rewrites_itself_is_refused_by_every_engine(engine):
    model = nn.Embedding(9, D, max_norm=1.0).double()
    with pytest.raises(MixesRecords, match="without max_norm"):
        PerSampleClip(1.0, engine=engine)(model, quadratic, batch_for(tokens(4)))


def test_an_input_overwritten_after_use_is_refused():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_engine(Overwrites().double(), batch_for(reals(1)))

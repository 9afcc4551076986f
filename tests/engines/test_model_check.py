"""Models whose sums could not be right are refused, by name and with the way out."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from engine_checks import batch_for, quadratic, run_engine
from torch import Tensor, nn

import tacit
from tacit import PerSampleClip
from tacit.engines import BookKeeping, PerRecord, model_check
from tacit.engines.book_keeping import planned_pass, record_gradients
from tacit.engines.clipping import ClipTask
from tacit.engines.model_check import _tolerance
from tacit.errors import MixesRecords
from tacit.torch_internals import Graph

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


class Cast(nn.Module):
    """Adapters in float32 on a frozen body in bfloat16, as peft makes them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(32, 32).bfloat16() for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(32, 4, bias=False) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(4, 32, bias=False) for _ in range(depth))
        self.head = nn.Linear(32, 3)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.bfloat16()
        for body, down, up in zip(self.body, self.down, self.up, strict=True):
            x = x + torch.tanh(body(x) + up(down(x.float())).bfloat16())
        return self.head(x.float())


def test_the_comparison_allows_for_the_coarsest_type_of_the_program():
    """On a GPU two passes in bfloat16 differ by more than 1% of a gradient."""
    torch.manual_seed(0)
    model, data = Cast(4), torch.randn(6, 32)
    task = clip_task(model)
    assert _tolerance(task) == _tolerance(clip_task(nn.Linear(2, 2).bfloat16())) == 0.1
    assert _tolerance(clip_task(nn.Linear(2, 2))) == 5e-3
    assert _tolerance(clip_task(nn.Linear(2, 2).double())) == 1e-6
    losses = nn.functional.cross_entropy(Casts()(data), torch.arange(6) % 3, reduction="none")
    assert _tolerance(clip_task(Casts()), Graph(losses).dtypes()) == 0.1
    batch = tacit.sampling.batch_of(
        data, torch.arange(6) % 3, divisor=6.0, scheme=tacit.sampling.Poisson(0.5)
    )
    bounded = tacit.PerSampleClip(1.0)(model, nn.CrossEntropyLoss(), batch)
    assert all(bool(s.isfinite().all()) for s in bounded.blocks[0].sums)


class Casts(nn.Module):
    """Weights in float32, products in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.bfloat16(), self.layer.weight.bfloat16()).float()


def clip_task(model: nn.Module) -> ClipTask:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return ClipTask(model, nn.CrossEntropyLoss(), trained, (tuple(trained),), (1.0,))


class PeekingAtTheBatch(nn.Module):
    """Scales each record by what it reads of the whole batch, outside of PyTorch's dispatcher."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.layer, self.looks = nn.Linear(D, 3), looks

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[0] if self.looks else 3
        return self.layer(x.to(self.layer.weight.dtype)) / size


@pytest.mark.parametrize("most", [0, 1 << 29])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_too_large_for_float64_is_compared_all_the_same(monkeypatch, most, dtype):
    monkeypatch.setattr(model_check, "_MOST_DOUBLED", most)
    kinds = []
    cast = model_check._in_type
    monkeypatch.setattr(
        model_check, "_in_type", lambda finer, *rest: kinds.append(finer) or cast(finer, *rest)
    )
    batch = tacit.sampling.batch_of(
        torch.randn(6, D), torch.arange(6) % 3, divisor=6.0, scheme=tacit.sampling.Poisson(0.5)
    )
    loss = nn.CrossEntropyLoss()
    PerSampleClip(1.0)(PeekingAtTheBatch(looks=False).to(dtype), loss, batch)
    with pytest.raises(MixesRecords, match="how many records"):
        PerSampleClip(1.0)(PeekingAtTheBatch(looks=True).to(dtype), loss, batch)
    copied = torch.float64 if most else torch.float32
    assert set(kinds) == ({copied} if most or dtype is torch.bfloat16 else set())


def test_a_check_that_ran_out_of_memory_begins_again_without_what_it_held(monkeypatch):
    held, left = [], []
    check = model_check._check_model

    def once(task, batch, most, *rest):
        left.extend(reference() is not None for reference in held)
        if held:
            return check(task, batch, most, *rest)
        large = torch.zeros(1000)
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(model_check, "_check_model", once)
    PerSampleClip(1.0)(nn.Linear(D, 3).double(), quadratic, batch_for(reals(4)))
    assert left == [False]


class Remembered(nn.Module):
    """Keeps weak references to its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        object.__setattr__(self, "activations", [])

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        self.activations.append(weakref.ref(y))
        return self.layer(y)


def test_a_planned_pass_leaves_no_activations_to_the_garbage_collector():
    """They are as large as those of plain training, and a check makes several such passes."""
    model = Remembered()
    task = clip_task(model)
    gc.collect()
    gc.disable()
    try:
        planned = planned_pass(task, torch.randn(4, D), torch.arange(4), 4)
        record_gradients(planned.plan, planned.graph, planned.losses, task)
        assert any(kept() is not None for kept in model.activations)
        del planned
        assert not any(kept() is not None for kept in model.activations)
    finally:
        gc.enable()

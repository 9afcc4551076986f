"""What can be said of recordings without a GPU: constants are read, and the key holds the rest.

A recorded step that kept an old threshold would add records of norm C_old under noise for C_new.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from engine_checks import assert_same, batch_for, quadratic
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tacit
from tacit import Clip, Normalise
from tacit.queries import BookKeeping, Replay, Replayed
from tacit.queries.bounded_gradient import trainable
from tacit.queries.engines import Task


class NobodyAsks(TorchDispatchMode):
    """Fails where a number is read off a tensor: a recording would hold it for good."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor was read"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    return Task(
        model, quadratic, trainable(model), tacit.by_layer(model), (0.5, 0.1, 2.0), counted=True
    )


def recorded(task, piece):
    """What a graph would hold: one run that reads its constants from a tensor."""
    norms = torch.tensor(task.norms, dtype=torch.float64)
    held = dataclasses.replace(task, norms=tuple(norms.unbind()))

    def run():
        with NobodyAsks():
            return BookKeeping().sums_and_keep(held, piece)[0]

    return norms, run


@pytest.mark.parametrize("rule", [Clip(), Normalise()], ids=repr)
@pytest.mark.parametrize("views", [1, 2])
def test_constants_in_a_tensor_are_the_constants_in_force(task, rule, views):
    piece = batch_for(torch.randn(6, 4, dtype=torch.float64))
    task = dataclasses.replace(task, rule=rule, views=views)
    norms, run = recorded(task, piece)
    for in_force in [(0.5, 0.1, 2.0), (0.05, 0.01, 0.2), (3.0, 1e-3, 1e3)]:
        norms.copy_(torch.tensor(in_force, dtype=torch.float64))
        expected = BookKeeping().clipped_sums(dataclasses.replace(task, norms=in_force), piece)
        found = run()
        assert_same(found.sums, expected.sums, tolerance=1e-12)
        assert torch.allclose(torch.stack(found.counts), torch.stack(expected.counts))


def test_the_watch_sees_a_number_that_is_read(task):
    piece = batch_for(torch.randn(6, 4, dtype=torch.float64))
    with pytest.raises(AssertionError, match="was read"), NobodyAsks():
        float(BookKeeping().clipped_sums(task, piece).counts[0])


def test_the_key_is_for_everything_but_the_constants(task):
    piece = batch_for(torch.randn(6, 4, dtype=torch.float64))
    key = Replay._key(task, piece)

    def other(**change):
        return Replay._key(dataclasses.replace(task, **change), piece)

    assert key == other() == other(norms=(1.0, 2.0, 3.0))
    assert key == other(rule=Clip())
    changes = [
        other(rule=Normalise()),
        other(rule=Normalise(0.5)),
        other(views=2),
        other(counted=False),
        other(blocks=tacit.by_parameter(task.model)),
        other(loss=nn.MSELoss()),
        Replay._key(task, piece.first(5)),
        Replay._key(task, piece.with_mask(torch.ones(6, dtype=torch.bool))),
    ]
    assert len({key, *changes}) == 1 + len(changes)


def test_a_finished_run_gives_its_recordings_back() -> None:
    for engine, query in (
        (Replay(), lambda e: tacit.PerSampleClip(0.1, engine=e)),
        (Replayed(), lambda e: tacit.Clipless(gradient_clip=0.1, engine=e)),
    ):
        engine._recordings["held"] = object()  # type: ignore[assignment]
        records = tacit.Records(torch.randn(40, 4), torch.randint(2, (40,)), 2, public_size=40)
        model = tacit.models.lipschitz_mlp((4,), 2, hidden=(4,))
        tacit.Trainer(
            model,
            tacit.losses.CrossEntropy(),
            query(engine),
            tacit.PoissonSampler(records, 0.5, steps=2),
            torch.optim.SGD(model.parameters(), lr=0.1),
            tacit.Budget(3.0, 1e-4),
            progress=False,
        ).fit()
        assert not engine._recordings

"""The two questions asked of an engine: are its sums right, and is one record's share bounded?"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

import tacit
from tacit import PerSampleClip
from tacit.engines import Automatic, BookKeeping, Recorder
from tacit.engines.clipping import ClipTask
from tacit.queries.bounded_gradient import trainable
from tacit.sampling import Poisson, batch_of

torch.set_num_threads(1)

COUNTS = st.sampled_from([0, 1, 2, 3, 5])
GROUPINGS = st.sampled_from([None, tacit.by_layer, tacit.by_parameter])
# The least clips every record, the largest none.
NORMS = st.sampled_from([1e-3, 1.0, 1e6])
SEEDS = st.integers(0, 2**31)


def quadratic(outputs, targets):
    """½‖f(x) − y‖² of each record, whatever the shape of f(x); y is one number."""
    flat = outputs.reshape(len(outputs), -1)
    return 0.5 * (flat - targets.to(flat.dtype)[:, None]).square().sum(dim=1)


def batch_for(inputs, targets=None, max_physical=None):
    if targets is None:
        dtype = inputs.dtype if inputs.is_floating_point() else torch.float64
        targets = torch.linspace(-1, 1, len(inputs), dtype=dtype, device=inputs.device)
    return batch_of(inputs, targets, divisor=1.0, scheme=Poisson(0.5), max_physical=max_physical)


def sums_of(query, model, batch, loss=quadratic) -> dict[str, torch.Tensor]:
    bounded = query(model, loss, batch)
    return {n: s for block in bounded.blocks for n, s in zip(block.names, block.sums, strict=True)}


def one_by_one(model, batch, max_norm, grouping=None, loss=quadratic) -> dict[str, torch.Tensor]:
    """Σ_i Π_h(g_i), with nothing but autograd and a Python loop."""
    parameters = trainable(model)
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    for x, y in zip(batch.inputs, batch.targets, strict=True):
        value = loss(model(x.unsqueeze(0)), y.unsqueeze(0)).sum()
        grads = torch.autograd.grad(
            value, parameters.values(), allow_unused=True, materialize_grads=True
        )
        alone = dict(zip(parameters, grads, strict=True))
        for names in PerSampleClip(1.0, blocks=grouping).blocks_of(model):
            norm = float(torch.cat([alone[n].double().reshape(-1) for n in names]).norm())
            scale = min(1.0, max_norm / norm) if norm > 0 else 1.0
            for name in names:
                sums[name] += scale * alone[name]
    return sums


def assert_same(found, expected, tolerance=1e-10, floor=1e-3) -> None:
    """Equal up to `tolerance` of each sum; of `floor`, where the records' shares cancel."""
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        error = float((found[name].double() - reference.double()).norm())
        assert error <= tolerance * max(float(reference.norm()), floor), (name, error)


def check_exact(model, inputs, max_norm, grouping=None, *, loss=quadratic, floor=0.0) -> None:
    """Book-keeping's sums are those of a loop over single records."""
    batch = batch_for(inputs)
    found = sums_of(
        PerSampleClip(max_norm, blocks=grouping, engine=BookKeeping()), model, batch, loss
    )
    expected = one_by_one(model, batch, max_norm, grouping, loss)
    assert_same(found, expected, floor=max(floor, 0.1 * min(max_norm, 1.0)))


def run_engine(model, batch, loss=quadratic):
    """Book-keeping alone, without the checks that a query makes first."""
    parameters = trainable(model)
    return BookKeeping().clipped_sums(
        ClipTask(model, loss, parameters, (tuple(parameters),), (1.0,)), batch
    )


def recording_engine(**options) -> Automatic:
    """For a run that is long enough to compile its steps at once."""
    engine = Automatic(Recorder(**options))
    engine.expect(10**9)
    return engine

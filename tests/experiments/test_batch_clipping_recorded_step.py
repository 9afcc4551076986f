"""The experiments' own step does what the library does: the same sums, and the same noise."""

from __future__ import annotations

import pytest
import torch

import tacit
from experiments.batch_clipping.recorded_step import RecordedStep
from experiments.batch_clipping.training import Setting, network
from tacit.queries.bounded_gradient import trainable
from tacit.queries.thresholds import Constants

Z = 0.7


def records(count: int) -> tacit.Records:
    torch.manual_seed(count)
    inputs, targets = torch.randn(count, 3, 16, 16), torch.randint(10, (count,))
    return tacit.Records(inputs, targets, public_size=count, name=f"{count} made up")


def the_librarys(setting, model, private, blocks, found: Constants):
    """The sum before noise over its divisor, the noise of each parameter, and the rows of sets."""
    max_norm: object = list(found.norms) if len(found.norms) > 1 else found.norms[0]
    if found.factors is not None:

        class Fixed(tacit.queries.LayerFactors):
            def constants(self, expected, step):
                return found

        max_norm = Fixed(records(9), 1.0)
    sampler = tacit.MiniSetSampler(
        private, setting.set_size, chosen=setting.batch_size // setting.set_size
    )
    of_query = None if setting.constants == "full" else blocks
    if setting.clipping == "individual":
        query: object = tacit.PerSampleClip(max_norm, blocks=of_query)
    else:
        query = tacit.BatchClip(max_norm, setting.set_size, blocks=of_query)
    mechanism = tacit.Mechanism(
        query, sampler, Z, relation=tacit.Relation.REPLACE_ONE, allocation=tacit.PerLayerNoise()
    )
    (batch,) = sampler
    loss = tacit.losses.CrossEntropy()
    bounded = mechanism.query(model, loss, batch)
    mechanism.privatise(model, loss, batch)
    sums = {}
    for block in bounded.blocks:
        times = block.factors or (1.0,) * len(block.names)
        sums |= {n: s / m for n, s, m in zip(block.names, block.sums, times, strict=True)}
    rows = torch.from_numpy(sampler.set_of_row).argsort(stable=True)
    return {n: s / bounded.divisor for n, s in sums.items()}, mechanism.noise_of, rows


KINDS = {
    "batch": {},
    "full": {"constants": "full"},
    "factors": {"constants": "factors"},
    "general": {"clipping": "general", "sets": 3},
    "individual": {"clipping": "individual", "norm": "group"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_librarys(kind: str) -> None:
    setting = Setting("convnet", batch_size=12, augment=False, **KINDS[kind])
    private = records(12)
    torch.manual_seed(0)
    model = network(setting)
    blocks = tacit.by_layer(model)
    norms = tuple(0.01 * (h + 1) for h in range(len(blocks)))
    if setting.constants == "full":
        blocks, found = (tuple(trainable(model)),), Constants((0.05,))
    elif setting.constants == "factors":
        found = Constants((0.1,), tuple(1.0 + h for h in range(len(blocks))))
    else:
        found = Constants(norms)
    wanted, noise, rows = the_librarys(setting, model, private, blocks, found)

    step = RecordedStep(setting, model, private, blocks, Z, per_epoch=1)
    step.set_constants(found)
    stds = step.std.split(step.sizes)
    for (name, _), std in zip(step.parameters.items(), stds, strict=True):
        assert std.unique().item() / step.count == pytest.approx(noise[name], rel=2.0**-8)
    step.std.zero_()  # then the step is the clipped sum alone
    step.rate.fill_(1.0)
    step.fill(rows[None])
    before = {n: p.detach().clone() for n, p in step.parameters.items()}
    step()
    for name, p in step.parameters.items():
        moved = before[name] - p.detach()
        torch.testing.assert_close(moved, wanted[name].to(moved.dtype), rtol=1e-3, atol=1e-6)
        assert bool(moved.any()), name


def test_noise_of_another_size_would_be_seen() -> None:
    """The planted bug: constants that are halved after the noise was set."""
    setting = Setting("convnet", batch_size=12, augment=False, constants="full")
    model, private = network(setting), records(12)
    blocks = (tuple(trainable(model)),)
    _, noise, _ = the_librarys(setting, model, private, blocks, Constants((0.05,)))
    step = RecordedStep(setting, model, private, blocks, Z, per_epoch=1)
    step.set_constants(Constants((0.025,)))
    (std,) = {float(s.unique()) for s in step.std.split(step.sizes)}
    assert std / step.count != pytest.approx(next(iter(noise.values())), rel=0.1)

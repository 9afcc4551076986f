"""Pre-activations of any network, by every engine, and nothing left behind."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tacit
from tacit import PerSampleClip
from tacit.engines import Automatic, BookKeeping, PerRecord
from tacit.errors import UnsupportedModule
from tacit.losses import (
    CrossEntropy,
    Focal,
    PreActivationPenalty,
    RecordLoss,
    TailoredLoss,
    watched,
)
from tacit.queries.bounded_gradient import trainable
from tacit.sampling import Poisson, batch_of

torch.set_num_threads(1)
PENALTY = PreActivationPenalty()


class Twice(nn.Module):
    """One layer used twice, one in a submodule, one frozen, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(4, 6)), nn.Tanh())
        self.frozen = nn.Linear(6, 5).requires_grad_(False)
        self.idle = nn.Linear(5, 5).requires_grad_(False)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        x = self.shared(x).tanh()
        x = self.shared(x).tanh()
        return self.last(self.frozen(self.inner(x)).tanh())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(checkpoint(self.block, x, use_reentrant=False).tanh())


class Tokens(nn.Module):
    """A layer of positions, then a pooled one."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(2, 3)
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.each(x.reshape(len(x), 2, 2)).tanh().mean(dim=1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.encoder(x.reshape(len(x), 2, 2)).flatten(1))


def convolutions() -> nn.Sequential:
    front = [nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    return nn.Sequential(*front, nn.ConvTranspose2d(3, 2, 2), nn.Flatten(), nn.Linear(8, 3))


NETWORKS = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3)),
    "in-place": lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)),
    "twice": Twice,
    "checkpointed": Checkpointed,
    "tokens": Tokens,
    "attention": Attention,
    "convolutions": convolutions,
    "one layer": lambda: nn.Linear(4, 3),
    "one layer inside": lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 3)),
    "lipschitz": lambda: tacit.models.lipschitz_mlp((4,), 3, hidden=(4,)),
    "normalised": lambda: nn.Sequential(
        nn.Linear(4, 6, bias=False), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)
    ),
}
NAMES = list(NETWORKS)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().double()


def batch_for(count=5, max_physical=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return batch_of(
        x, torch.arange(count) % 3, divisor=1.0, scheme=Poisson(0.5), max_physical=max_physical
    )


def by_hand(model, x):
    """Σ_{m<M} ‖h^m‖²/d_m of one record, by hooks of the test's own that keep everything."""
    kept = []
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    handles = [m.register_forward_hook(lambda _m, _a, h: kept.append(h.clone())) for m in layers]
    outputs = model(x.unsqueeze(0))
    for handle in handles:
        handle.remove()
    return outputs, sum((h.square().sum() / h.numel() for h in kept[:-1]), torch.zeros(1).double())


def tailored_by_hand(loss, model, x, y):
    outputs, penalty = by_hand(model, x)
    easy = 0.5 * (outputs - F.one_hot(y, 3)).square().sum() + penalty / loss.beta
    hard = Focal(loss.gamma)(outputs, y.unsqueeze(0))
    return loss.alpha * hard + (1 - loss.alpha) * easy


def one_by_one(model, loss, batch, max_norm):
    """Σ_i clip(g_i), by autograd and a Python loop."""
    parameters = trainable(model)
    total = {n: torch.zeros_like(p) for n, p in parameters.items()}
    for x, y in zip(batch.inputs, batch.targets, strict=True):
        value = tailored_by_hand(loss, model, x, y).sum()
        grads = torch.autograd.grad(value, parameters.values(), materialize_grads=True)
        norm = float(torch.cat([g.flatten() for g in grads]).norm())
        for n, g in zip(parameters, grads, strict=True):
            total[n] += min(1.0, max_norm / norm) * g
    return total


def sums_of(query, model, loss, batch):
    return {
        n: s
        for block in query(model, loss, batch).blocks
        for n, s in zip(block.names, block.sums, strict=True)
    }


def assert_same(found, expected, tolerance=1e-9):
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        torch.testing.assert_close(found[name], reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_a_loop(name):
    model, batch = made(name), batch_for()
    with watched(model, PENALTY):
        found = PENALTY.per_record(model(batch.inputs), batch.targets)
    expected = torch.stack([by_hand(model, x)[1].squeeze() for x in batch.inputs])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert bool((found == 0).all()) == name.startswith("one layer")


@pytest.mark.parametrize("engine", [BookKeeping, PerRecord, Automatic])
@pytest.mark.parametrize("name", NAMES)
def test_every_engine_gives_the_sums_of_a_loop(name, engine):
    model, loss = made(name), TailoredLoss(1.0, beta=0.5, gamma=2.0)
    loss.at(0.7)
    for max_norm in (1e-2, 1e6):
        for physical in (None, 2):
            batch = batch_for(max_physical=physical)
            query = PerSampleClip(max_norm, engine=engine())
            found = sums_of(query, model, loss, batch)
            assert_same(found, one_by_one(model, loss, batch, max_norm))


class Own(RecordLoss):
    """A user's loss, which engines run record by record."""

    def per_record(self, outputs, targets):
        return outputs.square().sum(dim=1) * (1 + targets)


@pytest.mark.parametrize("name", ["mlp", "twice", "convolutions"])
def test_engines_agree_on_weighted_sums(name):
    model, batch = made(name), batch_for()
    loss = 0.3 * PENALTY + 2 * Focal(5.0) + TailoredLoss(0.5, beta=0.2, gamma=1.0) + 0.1 * Own()
    found = [
        sums_of(PerSampleClip(0.3, engine=engine), model, loss, batch)
        for engine in (BookKeeping(), PerRecord(), Automatic())
    ]
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
    without = sums_of(PerSampleClip(0.3), model, 2 * Focal(5.0) + 0.1 * Own(), batch)
    assert any(not torch.allclose(found[0][n], without[n]) for n in without)


@pytest.mark.parametrize("name", ["mlp", "twice", "convolutions"])
def test_views_are_averaged_like_any_loss(name):
    model, loss, batch = made(name), TailoredLoss(1.0, beta=0.5, gamma=2.0), batch_for()
    views = tacit.data.Augmentation(3, lambda x: x * (1 + torch.arange(len(x)) % 3)[:, None])
    parameters = trainable(model)
    expected = {n: torch.zeros_like(p) for n, p in parameters.items()}
    for x, y in zip(batch.inputs, batch.targets, strict=True):
        value = torch.stack([tailored_by_hand(loss, model, k * x, y) for k in (1, 2, 3)]).mean()
        grads = torch.autograd.grad(value, parameters.values())
        norm = float(torch.cat([g.flatten() for g in grads]).norm())
        for n, g in zip(parameters, grads, strict=True):
            expected[n] += min(1.0, 0.5 / norm) * g
    for engine in (BookKeeping(), PerRecord()):
        query = PerSampleClip(0.5, engine=engine, augmentation=views)
        assert_same(sums_of(query, model, loss, batch), expected)


@pytest.mark.parametrize("set_size", [1, 3])
def test_mini_sets_are_clipped_with_their_penalties(set_size):
    model, loss, batch = made("mlp"), TailoredLoss(1.0, beta=0.5, gamma=2.0), batch_for(6)
    scheme = tacit.sampling.MiniSets(6 // set_size, set_size, chosen=6 // set_size)
    groups = torch.arange(6) // set_size
    drawn = dataclasses.replace(batch, scheme=scheme, groups=groups)
    found = sums_of(tacit.BatchClip(0.2, set_size), model, loss, drawn)
    parameters = trainable(model)
    expected = {n: torch.zeros_like(p) for n, p in parameters.items()}
    for group in groups.unique():
        rows = (groups == group).nonzero().flatten()
        of_each = [tailored_by_hand(loss, model, batch.inputs[i], batch.targets[i]) for i in rows]
        grads = torch.autograd.grad(torch.stack(of_each).mean(), parameters.values())
        norm = float(torch.cat([g.flatten() for g in grads]).norm())
        for n, g in zip(parameters, grads, strict=True):
            expected[n] += min(1.0, 0.2 / norm) * g
    assert_same(found, expected)


def test_a_compiled_model_is_run_as_it_was_written():
    model, loss = made("mlp"), TailoredLoss(1.0, beta=0.5, gamma=2.0)
    compiled = torch.compile(model, backend="eager")
    batch = batch_for()
    compiled(batch.inputs)  # compiled before anybody watches
    for engine in (BookKeeping(), PerRecord()):
        found = sums_of(PerSampleClip(0.1, engine=engine), compiled, loss, batch)
        found = {n.removeprefix("_orig_mod."): s for n, s in found.items()}
        assert_same(found, one_by_one(model, loss, batch, 0.1))
    records = tacit.Records(batch.inputs, batch.targets)
    before = tacit.evaluate(model, records, loss).loss
    assert tacit.evaluate(compiled, records, loss).loss == pytest.approx(before)
    assert torch.equal(compiled(batch.inputs), model(batch.inputs))


def test_half_precision_does_not_overflow():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).to(torch.bfloat16)
    with torch.no_grad():
        model[0].weight.fill_(1e15)
    with watched(model, PENALTY):
        found = PENALTY.per_record(model(torch.ones(2, 4, dtype=torch.bfloat16)), torch.zeros(2))
    assert found.dtype == torch.float32
    assert found.isfinite().all()


# --- one record's share -------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [BookKeeping(), PerRecord()], ids=["book", "func"])
@pytest.mark.parametrize("name", ["mlp", "twice", "convolutions", "tokens"])
def test_a_record_moves_the_sum_by_at_most_the_clip(name, engine):
    """A neighbour with one record more, of any size: the penalty grows with its square."""
    model, loss = made(name), TailoredLoss(0.0, beta=1e-3, gamma=5.0)
    query = PerSampleClip(0.1, engine=engine)
    here = batch_for(6)
    full = sums_of(query, model, loss, here)
    for size in (1e-3, 1.0, 1e3, 1e8):
        inputs = here.inputs.clone()
        inputs[0] *= size
        grown = batch_of(inputs, here.targets, divisor=1.0, scheme=here.scheme)
        full = sums_of(query, model, loss, grown)
        without = sums_of(query, model, loss, grown.only(torch.arange(6) > 0))
        moved = torch.cat([(full[n] - without[n]).flatten() for n in full]).norm()
        assert moved <= 0.1 * (1 + 1e-9)
        assert size < 1 or moved > 0.099


class SharedPenalty(TailoredLoss):
    """A planted bug: everybody is given the penalty of the whole batch."""

    def per_record(self, outputs, targets):
        alone = super().per_record(outputs, targets)
        return alone + (alone.detach().mean() * outputs.square().sum(dim=1))


def test_a_penalty_that_lets_records_meet_is_caught():
    model = made("mlp")
    loss, here = SharedPenalty(0.0, beta=1e-3, gamma=5.0), batch_for(6)
    inputs = here.inputs.clone()
    inputs[0] *= 1e4

    def moved(loss) -> float:
        with watched(model, loss):
            grads = []
            for rows in (slice(0, 6), slice(1, 6)):
                outputs = model(inputs[rows])
                each = loss.per_record(outputs, here.targets[rows])
                grads.append(torch.autograd.grad(each[-1], model[0].weight)[0])
        return float((grads[0] - grads[1]).norm())

    assert moved(loss) > 1e3
    assert moved(TailoredLoss(0.0, beta=1e-3, gamma=5.0)) < 1e-9
    # An engine does not trust the subclass with the batch, and says so.
    with pytest.raises(ValueError, match="cuts a loss it does not know into single records"):
        PerSampleClip(0.1)(model, loss, here)


def test_a_record_that_is_not_finite_adds_nothing():
    model, loss, here = made("mlp"), TailoredLoss(0.0, beta=1.0, gamma=2.0), batch_for(5)
    inputs = here.inputs.clone()
    inputs[2] = torch.tensor([1e200, -1e200, 1e200, float("nan")], dtype=torch.float64)
    wild = batch_of(inputs, here.targets, divisor=1.0, scheme=here.scheme)
    for engine in (BookKeeping(), PerRecord()):
        query = PerSampleClip(0.1, engine=engine)
        others = sums_of(query, model, loss, here.only(torch.arange(5) != 2))
        assert_same(sums_of(query, model, loss, wild), others)


# --- whose pre-activations ----------------------------------------------------------------------


def test_two_models_alive_at_once_do_not_mix():
    one, two, batch = made("mlp"), made("twice"), batch_for()
    x, y = batch.inputs, batch.targets

    def alone(model):
        with watched(model, PENALTY):
            return PENALTY.per_record(model(x), y)

    expected = alone(one), alone(two)
    with watched(one, PENALTY), watched(two, PENALTY):
        for _ in range(2):
            assert torch.equal(PENALTY.per_record(one(x), y), expected[0])
            assert torch.equal(PENALTY.per_record(two(x), y), expected[1])
    with watched(one, PENALTY):
        outputs = one(x)
        assert torch.equal(alone(two), expected[1])
        assert torch.equal(PENALTY.per_record(outputs, y), expected[0])


def test_threads_do_not_mix():
    model, batch = made("mlp"), batch_for()
    y, found, barrier = batch.targets, {}, threading.Barrier(2)

    def work(scale):
        with watched(model, PENALTY):
            for _ in range(5):
                barrier.wait(10)
                outputs = model(scale * batch.inputs)
                barrier.wait(10)
                found[scale] = PENALTY.per_record(outputs, y).detach()

    threads = [threading.Thread(target=work, args=(s,)) for s in (1.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for scale in (1.0, 3.0):
        with watched(model, PENALTY):
            expected = PENALTY.per_record(model(scale * batch.inputs), y).detach()
        assert torch.equal(found[scale], expected)


def hooks_of(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_an_exception_leaves_nothing_behind():
    model, batch = made("mlp"), batch_for()

    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError("broken")

    broken = nn.Sequential(*model[:2], Broken(), *model[2:])
    loss = TailoredLoss(0.0, beta=1.0, gamma=2.0)
    fused = torch.backends.mha.get_fastpath_enabled()
    for engine in (BookKeeping(), PerRecord()):
        with pytest.raises(KeyError):
            PerSampleClip(0.1, engine=engine)(broken, loss, batch)
        assert hooks_of(broken) == 0
    assert torch.backends.mha.get_fastpath_enabled() == fused
    with pytest.raises(ValueError, match="no pre-activations were recorded"):
        loss(model(batch.inputs), batch.targets)
    # Within one context, a pass that failed does not count into the next.
    with watched(broken, PENALTY):
        with pytest.raises(KeyError):
            broken(batch.inputs)
        with pytest.raises(ValueError, match="no pre-activations"):
            PENALTY(torch.zeros(5, 3), batch.targets)


def test_memory_is_let_go():
    """The layers' outputs go with the graph, while the context lasts; so does the model after."""
    model, batch = made("mlp"), batch_for()
    kept = []
    handle = model[0].register_forward_hook(lambda _m, _a, h: kept.append(weakref.ref(h)))
    with watched(model, PENALTY):
        value = PENALTY(model(batch.inputs), batch.targets)
        value.backward()
        del value
        gc.collect()
        assert kept[0]() is None
    handle.remove()
    PerSampleClip(0.1)(model, TailoredLoss(0.0, beta=1.0, gamma=2.0), batch)
    reference = weakref.ref(model)
    del model, handle
    gc.collect()
    assert reference() is None


# --- what cannot be done ------------------------------------------------------------------------


class RecordsSecond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.first(x.T.unsqueeze(2)).movedim(0, 1).tanh().mean(dim=1))


class Scaled(nn.Module):
    """A parameter of the model's own that acts before a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(self.scale * x).tanh())


def test_a_layer_whose_rows_are_no_records_is_refused():
    torch.manual_seed(0)
    model, loss = RecordsSecond().double(), TailoredLoss(0.0, beta=1.0, gamma=2.0)
    with pytest.raises(UnsupportedModule, match="whose pre-activations these are is unknown"):
        PerSampleClip(0.1)(model, loss, batch_for())
    batch = batch_for()
    found = sums_of(PerSampleClip(0.1, engine=PerRecord()), model, loss, batch)
    assert_same(found, one_by_one(model, loss, batch, 0.1))


def test_another_loss_on_the_same_model_is_planned_anew():
    torch.manual_seed(0)
    model, loss, batch = Scaled().double(), TailoredLoss(0.0, beta=0.1, gamma=2.0), batch_for()
    query = PerSampleClip(0.1)
    query(model, CrossEntropy(), batch)
    for asked in (query, PerSampleClip(0.1, engine=PerRecord())):
        found = sums_of(asked, model, loss, batch)
        assert_same(found, one_by_one(model, loss, batch, 0.1))


def test_layers_that_are_not_called_are_noticed():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = F.linear(x, self.first.weight).tanh()
            return F.linear(h, self.last.weight)

    model, batch = Functional().double(), batch_for()
    with watched(model, PENALTY), pytest.raises(UnsupportedModule, match="called none of them"):
        PENALTY(model(batch.inputs), batch.targets)


def test_outputs_of_another_pass_are_noticed():
    model, batch = made("mlp"), batch_for()
    with watched(model, PENALTY):
        outputs = model(batch.inputs)
        model(batch.inputs[:2])
        with pytest.raises(ValueError, match="5 records after a forward pass of 2"):
            PENALTY(outputs, batch.targets)


def test_a_loss_of_one_s_own_says_that_it_needs_them():
    class Doubled:
        needs_pre_activations = True

        def __call__(self, outputs, targets):
            return 2 * PENALTY(outputs, targets)

    model, batch = made("mlp"), batch_for()
    query = PerSampleClip(1e6, engine=PerRecord())
    found = sums_of(query, model, Doubled(), batch)
    once = sums_of(query, model, PENALTY, batch)
    assert_same(found, {n: 2 * s for n, s in once.items()})
    with pytest.raises(ValueError, match="needs_pre_activations = True"):
        query(model, lambda h, y: PENALTY(h, y), batch)


def test_a_loss_that_asks_for_nothing_is_not_watched():
    model = made("mlp")
    with watched(model, CrossEntropy()):
        assert hooks_of(model) == 0
    with watched(model, PENALTY):
        assert hooks_of(model) == 3 + 2
    assert hooks_of(model) == 0

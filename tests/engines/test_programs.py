"""A step that runs other operators than the proved pass is proved anew, before its release.

Python may take another way in any step: an augmentation of the batch with a probability, a schedule
that switches mixing on. The autograd graph does not always show it.
"""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tacit
from tacit.engines import BookKeeping
from tacit.errors import MixesRecords
from tacit.sampling.poisson import Poisson
from tacit.sampling.sampler import batch_of

STEPS, MIXED = 12, 5  # not a step at which a model is checked


class Network(nn.Module):
    """Mixes in one step of many, in a way that needs no gradient."""

    def __init__(self, change) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(6, 8), nn.Linear(8, 3), change
        self.schedule = {"step": 0, "passes": 0}  # where no check of settings looks

    def forward(self, x: Tensor) -> Tensor:
        self.schedule["passes"] += 1
        now = self.schedule["step"] == MIXED
        x = self.change(x, now)
        return self.last(self.first(x).tanh())


def centred(x, now):
    return x - x.mean(0) if now else x


def permuted(x, now):
    return x[torch.randperm(len(x))] if now else x


def rolled(x, now):
    return x.roll(int(now), 0)


def exchanged(x, now):
    """The same operators, on another operand."""
    public = torch.ones_like(x)
    return x + (x if now else public).flip(0)


def used(x, now):
    """The same operators, of which one that mixes is not used as a rule."""
    mean, own = x.mean(0).expand_as(x), 0 * x
    return x - (mean if now else own)


def summed(x, now):
    """In Python, hash(-1) is hash(-2)."""
    return x.cumsum(-2 if now else -1)


def recast(x, now):
    """A cast of another view of the same memory."""
    return (x[:1].expand_as(x) if now else x.view(x.shape)).double().float()


def indexed(x, now):
    """The same operators with other values of a public index, which counts its rows as a rule."""
    return x[torch.arange(len(x)) * torch.tensor(int(not now))]


def overwritten(x, now):
    index = torch.arange(len(x))
    return x[index.mul_(torch.tensor(int(not now)))]


def begun_elsewhere(x, now):
    """The same operators; where a range of positions begins is a float, which changes nothing."""
    rows = torch.cat([x, x[:1].expand_as(x)])
    start = float(len(x) * now)
    return rows[torch.arange(start, start + len(x), dtype=torch.int64)]


def retyped(x, now):
    """The same operators on an index of another type: a mask of all rows, or the odd numbers."""
    table, kind = torch.cat([x, x]), torch.int64 if now else torch.uint8
    return table[torch.arange(1 - len(table), len(table), 2, dtype=kind)][: len(x)]


def put(x, now):
    rows = torch.zeros(len(x), dtype=torch.int64) if now else torch.arange(len(x)) + 0
    spread = x.new_zeros(len(x), len(x), x.shape[1])
    spread[rows, torch.arange(len(x))] = x
    return spread.sum(1)


def doubled(x, now):
    return 2 * x if now else x


def drawn(x, now):
    return x + torch.randn_like(x) if random.random() < 0.3 else x


def steps(change, piece=None):
    torch.manual_seed(0)
    model = Network(change)
    batch = batch_of(
        torch.randn(9, 6), torch.arange(9) % 3, divisor=9.0, scheme=Poisson(0.5), max_physical=piece
    )
    query = tacit.PerSampleClip(1.0)
    for step in range(STEPS):
        model.schedule["step"] = step
        yield query(model, F.cross_entropy, batch)


@pytest.mark.parametrize("piece", [None, 4])
@pytest.mark.parametrize(
    "change",
    [
        centred,
        permuted,
        rolled,
        exchanged,
        used,
        summed,
        recast,
        indexed,
        overwritten,
        begun_elsewhere,
        retyped,
        put,
    ],
)
def test_mixing_is_refused_in_the_step_that_mixes(change, piece):
    running = steps(change, piece)
    for _ in range(MIXED):
        next(running)
    with pytest.raises(MixesRecords, match=re.escape("records meet")):
        next(running)


def test_the_same_program_is_planned_once():
    """Numbers that Python hands to operators, and memory that is used again, change nothing."""
    model = Network(lambda x, now: (x * 2.0 + torch.tensor([1.0])).clone())
    query = tacit.PerSampleClip(1.0, engine=BookKeeping())
    batch = batch_of(torch.randn(9, 6), torch.arange(9) % 3, divisor=9.0, scheme=Poisson(0.5))

    def steps():
        for _ in range(STEPS):
            query(model, F.cross_entropy, batch)
            yield model

    assert planned_once(steps())


def planned_once(steps) -> bool:
    """Whether a later step is one pass: a program that is planned anew runs again."""
    passes = [model.schedule["passes"] for model in steps]
    return passes[0] > 1 and all(b - a == 1 for a, b in pairwise(passes[-3:]))


@pytest.mark.parametrize("change", [doubled, drawn])
def test_another_way_that_keeps_records_apart_is_taken(change):
    random.seed(0)
    assert len(list(steps(change))) == STEPS


# What an earlier step has left behind ------------------------------------------------------------


class Keeps(nn.Module):
    """Reads a public table in every step but one, and there what an earlier step has left."""

    def __init__(self, keep) -> None:
        super().__init__()
        self.first, self.last, self.keep = nn.Linear(6, 8), nn.Linear(8, 3), keep
        self.table, self.held = torch.randn(9, 6), [torch.randn(9, 6)]
        self.schedule = {"step": 0, "passes": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.schedule["passes"] += 1
        now = self.schedule["step"] == MIXED
        other = self.held[-1] if now else self.table
        hidden = self.first(x + other[0]).tanh()
        self.keep(self, x, hidden)
        return self.last(hidden)


def keep_records(model, x, hidden):
    model.held.append(x)


def keep_a_part(model, x, hidden):
    model.held.append(x.detach().clone())


def keep_in_place(model, x, hidden):
    model.held[0][: len(x)] = x.flip(0)


def keep_by_cast(model, x, hidden):
    model.held.append(x.double().float())


def keep_a_cotangent(model, x, hidden):
    hidden.register_hook(lambda g: model.held.append(g[:, :6]))


def keep_nothing(model, x, hidden):
    pass


def keep_a_new_table(model, x, hidden):
    model.table = model.table + 1.0


def keep_a_table_like_the_records(model, x, hidden):
    model.held.append(torch.ones_like(x))


def keep_a_note(model, x, hidden):
    model.note = 0.9 * getattr(model, "note", 0.0) + x.detach().mean()


def kept(keep, piece=None, engine=None, between=lambda model: None, make=Keeps):
    """A query for each step, over records that are new in each."""
    torch.manual_seed(0)
    model, query = make(keep), tacit.PerSampleClip(1.0, engine=engine)
    for step in range(STEPS):
        model.schedule["step"] = step
        labels = torch.arange(9) % 3
        batch = batch_of(
            torch.randn(9, 6), labels, divisor=9.0, scheme=Poisson(0.5), max_physical=piece
        )
        between(model)
        query(model, F.cross_entropy, batch)
        yield model


@pytest.mark.parametrize("piece", [None, 4])
@pytest.mark.parametrize(
    "keep", [keep_records, keep_a_part, keep_in_place, keep_by_cast, keep_a_cotangent]
)
def test_what_an_earlier_step_has_left_is_not_read_in_the_place_of_a_public_tensor(keep, piece):
    running = kept(keep, piece)
    for _ in range(MIXED):
        next(running)
    with pytest.raises(MixesRecords, match=r"(is stateful|records meet).*other\[0\]"):
        next(running)


@pytest.mark.parametrize("keep", [keep_records, keep_a_part, keep_in_place])
def test_record_by_record_nothing_that_was_left_is_read_either(keep):
    running = kept(keep, engine=tacit.engines.PerRecord())
    for _ in range(MIXED):
        next(running)
    with pytest.raises(MixesRecords, match="is stateful"):
        next(running)


@pytest.mark.parametrize("engine", [BookKeeping, tacit.engines.PerRecord])
@pytest.mark.parametrize("keep", [keep_nothing, keep_a_table_like_the_records, keep_a_note])
def test_public_tensors_and_notes_may_be_kept(keep, engine):
    assert len(list(kept(keep, engine=engine()))) == STEPS


def test_a_table_may_be_another_in_each_step():
    def between(model):
        model.table, model.held = torch.randn(9, 6), [torch.randn(9, 6)]

    assert planned_once(kept(keep_nothing, engine=BookKeeping(), between=between))


class FlatWeights(nn.Module):
    """A recurrent layer as cuDNN runs it: one operator takes all weights and gives them back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.empty(0).set_(self.weight.untyped_storage(), 0, (6,), (1,))
        given = [self.weight], 1, flat, x[:1], None, 2, 6, 0, 1, False, 0.0, True, False, (), None
        return self.last(torch.ops.aten._cudnn_rnn(x, *given)[0])


def cudnn_rnn(x, weight, stride, flat, *rest):
    return x * flat, x.new_empty(0), x.new_empty(0), x.new_empty(0), flat


def cudnn_rnn_backward(x, weight, stride, flat, hx, cx, output, cotangent, *rest):
    found = [(cotangent * x).sum(0)]
    return cotangent * flat, torch.zeros_like(hx), torch.zeros_like(hx), found


def test_weights_that_an_operator_gives_back_are_not_left_behind():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_cudnn_rnn", cudnn_rnn, "CPU")
    library.impl("_cudnn_rnn_backward", cudnn_rnn_backward, "CPU")
    batch = batch_of(torch.randn(9, 6), torch.arange(9) % 3, divisor=9.0, scheme=Poisson(0.5))
    tacit.PerSampleClip(1.0, engine=tacit.engines.PerRecord())(
        FlatWeights(), F.cross_entropy, batch
    )


def test_a_tensor_of_the_storage_that_an_earlier_step_left_is_known_by_it():
    class FromStorage(Keeps):
        def forward(self, x: Tensor) -> Tensor:
            other = self.held[-1] if self.schedule["step"] == MIXED else self.table
            rows = torch.empty(0).set_(other.untyped_storage(), 0, (1, 6), (6, 1))
            hidden = self.first(x + rows).tanh()
            self.keep(self, x, hidden)
            return self.last(hidden)

    running = kept(keep_records, make=FromStorage)
    for _ in range(MIXED):
        next(running)
    with pytest.raises(MixesRecords, match=r"is stateful|records meet"):
        next(running)


# Another way in the backward pass ----------------------------------------------------------------


class Changed(torch.autograd.Function):
    """The identity, with a backward pass of its own."""

    @staticmethod
    def forward(ctx, hidden, change, schedule):
        ctx.change, ctx.schedule = change, schedule
        return hidden.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return ctx.change(cotangent, ctx.schedule["step"] == MIXED), None, None


def in_a_function(hidden, change, schedule):
    return Changed.apply(hidden, change, schedule)


def in_a_hook(hidden, change, schedule):
    hidden.register_hook(lambda g: change(g, schedule["step"] == MIXED))
    return hidden


def in_a_hook_of_that_step(hidden, change, schedule):
    if schedule["step"] == MIXED:
        hidden.register_hook(lambda g: change(g, True))
    return hidden


def in_a_node(hidden, change, schedule):
    hidden.grad_fn.register_prehook(lambda gs: (change(gs[0], schedule["step"] == MIXED),))
    return hidden


def recomputed(hidden, change, schedule):
    """A checkpointed block: its second pass is part of the backward pass."""
    passes = []

    def block(z):
        passes.append(1)
        return change(z, len(passes) > 1 and schedule["step"] == MIXED).sin()

    return checkpoint(block, hidden, use_reentrant=False)


class Backwards(nn.Module):
    def __init__(self, change, where) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.change, self.where = change, where
        self.schedule = {"step": 0, "passes": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.schedule["passes"] += 1
        return self.last(self.where(self.first(x).tanh(), self.change, self.schedule).tanh())


def averaged(g, now):
    return g.mean(0, keepdim=True).expand_as(g) if now else 1 * g


def rolled_back(g, now):
    return g.roll(int(now), 0)


def returned(g, now):
    """The same operators; which result is given back is no operator's."""
    mixed, own = g.flip(0), g * 1.0
    return mixed if now else own


def halved(g, now):
    return g / 2 if now else 1 * g


def unchanged(g, now):
    return 0.5 * g


class OneLayer(Backwards):
    """Nothing but the layer's own gradient joins cotangents with numbers of the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return self.where(self.last(F.pad(x, (0, 2))), self.change, self.schedule)


class SavesThroughHooks(nn.Module):
    """What the layer has saved for its own gradient is another record's in one step."""

    def __init__(self, when_packed: bool) -> None:
        super().__init__()
        self.last, self.when_packed = nn.Linear(6, 3), when_packed
        self.schedule = {"step": 0, "passes": 0}

    def forward(self, x: Tensor) -> Tensor:
        rolled, now = x.roll(1, 0), self.schedule["step"] == MIXED

        def exchanged(saved: Tensor) -> Tensor:
            return rolled if now and saved.shape == x.shape else saved

        def unchanged(saved: Tensor) -> Tensor:
            return saved

        hooks = (exchanged, unchanged) if self.when_packed else (unchanged, exchanged)
        if not now:
            return self.last(x)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            return self.last(x)


@pytest.mark.parametrize("when_packed", [True, False])
def test_where_hooks_save_tensors_records_run_one_by_one(when_packed):
    torch.manual_seed(0)
    model, query = SavesThroughHooks(when_packed), tacit.PerSampleClip(1.0, engine=BookKeeping())
    batch = batch_of(torch.randn(9, 6), torch.arange(9) % 3, divisor=9.0, scheme=Poisson(0.5))
    for model.schedule["step"] in range(MIXED):
        plain = query(model, F.cross_entropy, batch)
    model.schedule["step"] = MIXED
    with pytest.warns(UserWarning, match="no rule for saved_tensors_hooks"):
        alone = query(model, F.cross_entropy, batch)
    for one, other in zip(plain.blocks[0].sums, alone.blocks[0].sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def backward_steps(change, where, engine=None, make=Backwards):
    torch.manual_seed(0)
    model, query = make(change, where), tacit.PerSampleClip(1.0, engine=engine)
    batch = batch_of(torch.randn(9, 6), torch.arange(9) % 3, divisor=9.0, scheme=Poisson(0.5))
    for step in range(STEPS):
        model.schedule["step"] = step
        yield query(model, F.cross_entropy, batch), model


PLACES = [in_a_function, in_a_hook, in_a_hook_of_that_step, in_a_node]


def exchanged_back(g, now):
    return g[torch.randperm(len(g))] if now else 1 * g


@pytest.mark.parametrize("where", [in_a_function, in_a_hook, in_a_hook_of_that_step])
@pytest.mark.parametrize("change", [averaged, rolled_back, returned, exchanged_back])
def test_a_cotangent_in_another_records_place_is_refused(change, where):
    """Its label is one record's, and the layer would join it with the numbers of another."""
    running = backward_steps(change, where, make=OneLayer)
    for _ in range(MIXED):
        next(running)
    with pytest.raises(MixesRecords, match=r"in the backward pass|records meet"):
        next(running)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("change", [averaged, rolled_back, returned])
def test_mixing_in_a_backward_pass_is_refused_in_the_step_that_mixes(change, where):
    running = backward_steps(change, where)
    for _ in range(MIXED):
        next(running)
    with pytest.raises(MixesRecords, match=r"in the backward pass|records meet"):
        next(running)


@pytest.mark.parametrize("change", [averaged, rolled_back])
def test_a_checkpointed_block_that_runs_otherwise_again_is_refused(change):
    running = backward_steps(change, recomputed)
    for _ in range(MIXED):
        next(running)
    with pytest.raises(MixesRecords):
        next(running)


@pytest.mark.parametrize("where", [*PLACES, recomputed])
def test_another_way_back_that_keeps_records_apart_is_taken(where):
    sums = [[bounded.blocks[0].sums[0], model] for bounded, model in backward_steps(halved, where)]
    assert len(sums) == STEPS
    assert not torch.equal(sums[MIXED][0], sums[0][0])
    torch.testing.assert_close(sums[MIXED + 1][0], sums[0][0])


@pytest.mark.parametrize("where", [in_a_function, in_a_hook, in_a_node, recomputed])
def test_the_same_way_back_is_planned_once(where):
    found = backward_steps(unchanged, where, engine=BookKeeping())
    assert planned_once(model for _, model in found)


@pytest.mark.parametrize("where", [in_a_function, in_a_hook])
def test_a_way_back_that_is_drawn_at_random_is_exact(where):
    """Planned for the way that it took, or run record by record: never by another way's plan."""
    drawn = random.Random(0)

    def change(g, now):
        return g.flip(0).flip(0) if drawn.random() < 0.5 else 1 * g

    found = [bounded.blocks[0].sums[0] for bounded, _ in backward_steps(change, where)]
    for sums in found[1:]:
        torch.testing.assert_close(sums, found[0], rtol=1e-5, atol=1e-5)

"""What labels cannot see: a record's place in the batch, its company, and how many there are.

A program that depends on them is refused, or runs each record alone. Either way one record that is
added moves the clipped sum by at most its constant.
"""

from __future__ import annotations

import random
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mixing_models import FEATURES, WIDTH, Network, class_loss
from reference import Start, record_gradients
from torch import nn

import tacit
from tacit.engines.book_keeping import planned_pass
from tacit.engines.clipping import ClipTask
from tacit.errors import MixesRecords
from tacit.sampling.poisson import Poisson
from tacit.sampling.sampler import batch_of


def batch_for(rows, labels=None, piece=None):
    labels = torch.arange(len(rows)) % 3 if labels is None else labels
    return batch_of(rows, labels, divisor=1.0, scheme=Poisson(0.5), max_physical=piece)


def moved_by_one_record(model, rows, loss=class_loss) -> float:
    """How far the first record moves the sum of the others, in units of the constant."""
    query, labels = tacit.PerSampleClip(max_norm=1.0), torch.arange(len(rows)) % 3
    sums = []
    for some in (slice(None), slice(1, None)):
        torch.manual_seed(5)
        (block,) = query(model, loss, batch_for(rows[some], labels[some])).blocks
        sums.append(torch.cat([total.flatten() for total in block.sums]))
    return float((sums[0] - sums[1]).norm())


def beside(draw):
    """Even and odd rows are told apart, beside a random draw."""

    def change(hidden):
        sign = torch.where(torch.arange(len(hidden)) % 2 == 0, 1.0, -1.0)[:, None]
        return hidden * sign + 0 * draw(hidden)

    return change


def noisy(hidden):
    return hidden + 0.1 * torch.randn_like(hidden)


def in_a_thread(hidden):
    found = []
    thread = threading.Thread(target=lambda: found.append(hidden.detach().abs().amax(0)))
    thread.start()
    thread.join()
    return hidden * (1 + 1e-2 * found[0])


table = torch.arange(4000.0).sin()

REFUSED = {
    "positions along the batch": lambda h: h + table[: len(h), None],
    "a count of the rows": lambda h: h + torch.arange(len(h))[:, None],
    "even and odd rows": lambda h: (
        h * torch.where(torch.arange(len(h)) % 2 == 0, 3.0, -3.0)[:, None]
    ),
    "the first row is special": lambda h: torch.cat([2 * h[:1], h[1:]]),
    "the last row is special": lambda h: torch.cat([h[:-1], 2 * h[-1:]]),
    "the number of rows": lambda h: h * (1 + 1e-3 * len(h)),
    "the number of rows beside draws": lambda h: noisy(h) * (1 + 1e-3 * len(h)),
    "many rows": lambda h: h * (-1 if len(h) > 32 else 1),
    "many rows beside draws": lambda h: noisy(h) * (-1 if len(h) > 32 else 1),
    "a place beside a Poisson draw": beside(lambda h: torch.poisson(torch.full_like(h, 2.0))),
    "a place beside log-normal draws": beside(lambda h: torch.empty_like(h).log_normal_()),
    "a place beside a multinomial draw": beside(lambda h: h.softmax(1).multinomial(2).sum()),
    "a place beside a gamma draw": beside(
        lambda h: torch.distributions.Gamma(torch.ones(WIDTH), torch.ones(WIDTH)).sample()
    ),
    "what a thread has read": in_a_thread,
    "what a thread has read beside draws": lambda h: in_a_thread(noisy(h)),
}


@pytest.mark.parametrize("piece", [None, 7, 1])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, piece):
    if name.startswith("many") and piece is not None:
        pytest.skip("no piece has so many rows")
    torch.manual_seed(0)
    rows = torch.randn(40, FEATURES)
    with pytest.raises(MixesRecords, match=r"place|beside|number"):
        tacit.PerSampleClip(max_norm=1.0)(
            Network(REFUSED[name]), class_loss, batch_for(rows, None, piece)
        )


def test_a_loss_divided_by_the_number_of_records_is_refused_beside_draws():
    def loss(outputs, labels):
        return F.cross_entropy(outputs, labels, reduction="none") / len(labels)

    with pytest.raises(MixesRecords, match="how many"):
        tacit.PerSampleClip(max_norm=1.0)(Network(noisy), loss, batch_for(torch.randn(9, FEATURES)))


def with_a_count(hidden):
    return hidden * (1 + 1e-3 * hidden[hidden[:, 0] > 0].shape[0])


def by_rank(hidden):
    return hidden + torch.zeros_like(hidden).masked_scatter(hidden > -9, 5 * table)


def at_selected_rows(hidden):
    rows = (hidden[:, 0] > 0).nonzero()[:, 0]
    return hidden.index_add(0, rows, table[: len(rows), None].expand(-1, WIDTH))


def caught(hidden):
    squares = hidden[:, :, None] * hidden[:, None, :] + 0.1 * torch.eye(WIDTH)
    for more in (0.0, 1.0):
        try:
            factor = torch.linalg.cholesky(squares + more * torch.eye(WIDTH))
            return hidden + factor.diagonal(dim1=1, dim2=2) * (1 + more)
        except torch.linalg.LinAlgError:
            continue
    return hidden


ALONE = {
    "a branch on how many": lambda h: -h if len((h[:, 0].abs() > 20).nonzero()) else h,
    "how many were selected": with_a_count,
    "the rank among the selected": by_rank,
    "places of selected rows": at_selected_rows,
    "an error that is caught": caught,
}


@pytest.mark.parametrize("name", ALONE)
def test_what_selects_rows_runs_alone_and_keeps_the_bound(name):
    torch.manual_seed(0)
    model, rows = Network(ALONE[name]), torch.randn(12, FEATURES)
    rows[0] = torch.tensor([400.0, 0, 0, 0, 0])
    with pytest.warns(UserWarning, match="one by one"):
        moved = moved_by_one_record(model, rows)
    assert moved <= 1 + 1e-3


class Experts(nn.Module):
    """Each record's rows go to the experts that its gate chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(FEATURES, 2), nn.Linear(FEATURES, 3)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    def forward(self, rows):
        share = self.gate(rows).softmax(-1)
        chosen, out = share.argmax(-1), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, mine, expert(rows[mine]) * share[mine, number, None])
        return self.head(out)


@pytest.mark.parametrize("first", [1, 2, 5, 6])
def test_experts_train_whoever_chooses_them(first):
    """Also where an expert gets the rows of one record only."""
    torch.manual_seed(0)
    model, rows = Experts().double(), torch.randn(6, FEATURES, dtype=torch.float64)
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.weight[:, 0] = torch.tensor([5.0, -5.0])
        model.gate.bias.zero_()
    rows[:, 0] = torch.where(torch.arange(6) < first, 1.0, -1.0)
    labels, start = torch.arange(6) % 3, Start(model, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (block,) = tacit.PerSampleClip(max_norm=0.1)(model, class_loss, batch_for(rows)).blocks
    expected = record_gradients(model, class_loss, rows, labels, start=start)
    for found, total in zip(block.sums, expected.clipped_sums(0.1), strict=True):
        torch.testing.assert_close(found, total, rtol=1e-9, atol=1e-12)


class Shuffled(nn.Module):
    """A layer on a random permutation of the records, which is then taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, rows):
        hidden, order = self.first(rows), torch.randperm(len(rows))
        turned = torch.tanh(self.middle(hidden[order]))
        return self.last(hidden + torch.zeros_like(hidden).index_add(0, order, turned))


@pytest.mark.parametrize("count", [2, 3, 6, 9])
def test_a_permutation_that_is_drawn_anew_is_not_the_planned_one(count):
    torch.manual_seed(0)
    model, rows = Shuffled().double(), torch.randn(count, FEATURES, dtype=torch.float64)
    query, labels = tacit.PerSampleClip(max_norm=0.05), torch.arange(count) % 3
    for step in range(10):
        start = Start(model, seed=step)
        expected = record_gradients(model, class_loss, rows, labels, start=start)
        start.go_back()
        (block,) = query(model, class_loss, batch_for(rows)).blocks
        for found, total in zip(block.sums, expected.clipped_sums(0.05), strict=True):
            torch.testing.assert_close(found, total, rtol=1e-9, atol=1e-12)


class SetOnce(Network):
    """Divides by what it saw first, or by the largest that it has seen."""

    def __init__(self, keep) -> None:
        super().__init__(lambda h: h)
        self.keep, self.scale = keep, None

    def forward(self, rows):
        hidden = self.first(rows)
        self.scale = self.keep(self.scale, float(hidden.detach().abs().max()))
        return self.last(hidden / self.scale)


KEPT = {
    "set once": lambda held, now: now if held is None else held,
    "the largest so far": lambda held, now: max(held or 0.0, now),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_from_the_first_records_is_refused_record_by_record(name):
    query = tacit.PerSampleClip(max_norm=1.0, engine=tacit.engines.PerRecord())
    rows = torch.randn(6, FEATURES) * torch.arange(1.0, 7.0)[:, None]
    for some in (rows, rows.flip(0)):
        with pytest.raises(MixesRecords, match="stateful"):
            query(SetOnce(KEPT[name]), class_loss, batch_for(some))
    query(SetOnce(lambda held, now: now), class_loss, batch_for(rows))


def noise_of_numpy(hidden):
    return hidden + 0.1 * torch.from_numpy(np.random.randn(*hidden.shape)).to(hidden)


def signs_of_python(hidden):
    signs = torch.tensor([random.choice((-1.0, 1.0)) for _ in range(len(hidden))])
    return hidden * signs[:, None]


class OwnGenerator(Network):
    def __init__(self) -> None:
        super().__init__(lambda h: h + torch.from_numpy(self.draws.normal(size=h.shape)).to(h))
        self.draws = np.random.default_rng(0)


LEGAL = {
    "draws of NumPy": lambda: Network(noise_of_numpy),
    "draws of Python": lambda: Network(signs_of_python),
    "a generator of its own": OwnGenerator,
    "a scripted block": lambda: nn.Sequential(
        torch.jit.script(nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU())), nn.Linear(WIDTH, 3)
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_models_pass(name):
    query = tacit.PerSampleClip(max_norm=1.0)
    model = LEGAL[name]()
    for _ in range(2):
        query(model, class_loss, batch_for(torch.randn(6, FEATURES)))


@pytest.mark.parametrize("count", [2, 4, 9])
def test_an_index_that_counts_the_records_is_planned_once(count):
    """The attention masks of Transformers: rows by `arange`, places by numbers made from one."""

    def places(hidden):
        rows, columns = torch.arange(len(hidden)), torch.arange(WIDTH) + 0
        return hidden[rows[:, None], columns] + hidden[rows, torch.full((len(hidden),), 2)][:, None]

    model = Network(places)
    parameters = dict(model.named_parameters())
    task = ClipTask(model, class_loss, parameters, (tuple(parameters),), (1.0,))
    rows = torch.randn(count, FEATURES)
    plan = planned_pass(task, rows, torch.zeros(count, dtype=torch.long), count).plan
    assert plan.isolation.proves
    assert not plan.dynamic

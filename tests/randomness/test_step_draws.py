"""What a model and its augmentation draw in a step is keyed by the stream, whatever the seed."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import tacit
from tacit.queries.bounded_gradient import BoundedGradient
from tacit.randomness import Randomness, step_draws

torch.set_num_threads(1)
N = 64
RECORDS = tacit.Records(
    torch.randn(N, 6, generator=torch.Generator().manual_seed(0)),
    torch.arange(N) % 3,
    num_classes=3,
    public_size=N,
)
LOSS = tacit.losses.CrossEntropy()


class Noted:
    """A query whose sums are noted, without noise."""

    def __init__(self, query) -> None:
        self.query, self.unit, self.sums = query, query.unit, []

    def __call__(self, model, loss, batch) -> BoundedGradient:
        found = self.query(model, loss, batch)
        self.sums.append(torch.cat([s.reshape(-1) for b in found.blocks for s in b.sums]))
        return found


def clip(**more):
    return tacit.PerSampleClip(0.1, **more), tacit.PoissonSampler(
        RECORDS, expected_batch_size=N, steps=9
    )


def sets(**more):
    sampler = tacit.MiniSetSampler(RECORDS, 2, steps=9, rate=1.0, seed=0)
    return tacit.BatchClip(0.1, 2, **more), sampler


def clipless(**more):
    return tacit.Clipless(**more), clip()[1]


def plain() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def dropped() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def seed_all() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def drawn() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


def noted(made, model, seed=None, steps=1, before=lambda step: None) -> list[torch.Tensor]:
    query, sampler = made
    query = Noted(query)
    mechanism = tacit.Mechanism(
        query, sampler, 1.0, relation=tacit.Relation.ADD_OR_REMOVE_ONE, seed=seed
    )
    seed_all()
    for step in range(steps):
        before(step)
        mechanism.privatise(model, LOSS, sampler.next_batch())
    return query.sums


DRAWS = {
    "torch": lambda x: x + torch.randn_like(x),
    "numpy": lambda x: x + torch.from_numpy(np.random.randn(*x.shape)).float(),
    "python": lambda x: x + torch.tensor([random.gauss(0, 1) for _ in x])[:, None],
}


def views(kind):
    return tacit.data.Augmentation(3, DRAWS[kind])


@pytest.mark.parametrize("make", [clip, sets])
def test_a_known_seed_of_pytorch_does_not_repeat_masks(make) -> None:
    first, second = (noted(make(), dropped())[0] for _ in range(2))
    assert not torch.allclose(first, second, rtol=1e-3)
    first, second = (noted(make(), dropped(), seed=1)[0] for _ in range(2))
    assert torch.allclose(first, second)


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("make", [clip, sets])
def test_nor_views(make, kind) -> None:
    made = [make(augmentation=views(kind)) for _ in range(4)]
    first, second = (noted(one, plain())[0] for one in made[:2])
    assert not torch.allclose(first, second, rtol=1e-3)
    first, second = (noted(one, plain(), seed=1)[0] for one in made[2:])
    assert torch.allclose(first, second)


def test_a_model_that_begins_to_draw_later() -> None:
    found = []
    for _ in range(2):
        model = dropped()
        model[1].p = 0.0
        model[1].eval()

        def later(step: int, model=model) -> None:
            if step == 2:
                model[1].p = 0.5
                model[1].train()

        made = clip()
        made[1].reseed(0)
        found.append(noted(made, model, steps=3, before=later))
    assert torch.allclose(found[0][1], found[1][1])
    assert not torch.allclose(found[0][2], found[1][2], rtol=1e-3)


def test_each_step_has_draws_of_its_own() -> None:
    """Were a generator only set once, the masks of one step would tell those of the next."""
    source, states = Randomness(3), []
    for step in (0, 1, 1):
        with step_draws(source, step, torch.device("cpu")):
            states.append([*drawn(), torch.get_rng_state()[24:200].tolist()])
    assert states[1] == states[2]
    assert not set(states[0][:3]) & set(states[1][:3])
    assert states[0][3] != states[1][3]


def test_a_known_generator_leaves_nothing_in_a_step() -> None:
    """PyTorch keeps the second number of a Gaussian pair for the next call."""
    seen = []
    for _ in range(2):
        seed_all()
        torch.randn(())
        with step_draws(Randomness(), 0, torch.device("cpu")):
            seen.append(float(torch.randn(())))
    assert seen[0] != seen[1]


def test_views_follow_the_record_and_not_its_row() -> None:
    """Crops and flips of a record are the same in pieces and whole, and when another is missing."""
    images = torch.rand(12, 1, 6, 6)
    augmentation = tacit.data.Augmentation(3, tacit.RandomCropFlip(padding=2))
    ids = torch.arange(12)
    source = Randomness(5)

    def views(rows: torch.Tensor) -> torch.Tensor:
        with step_draws(source, 4, torch.device("cpu")):
            return augmentation.views_of(images[rows], ids[rows]).unflatten(0, (-1, 3))

    whole = views(ids)
    some = torch.tensor([7, 2, 11])
    assert torch.equal(views(some), whole[some])
    assert not torch.equal(whole[:, 0], whole[:, 1])


def test_steps_that_draw_in_two_threads_do_not_meet() -> None:
    """Else one would put the generator back while the other draws from it."""
    inside, most = [], []

    def step() -> None:
        inside.append(1)
        most.append(len(inside))
        torch.rand(1)
        time.sleep(0.02)
        inside.pop()

    def work() -> None:
        source = Randomness()
        for number in range(5):
            with step_draws(source, number, torch.device("cpu")):
                step()

    seed_all()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    found = drawn()
    seed_all()
    assert found == drawn()


def test_an_empty_batch_decides_nothing() -> None:
    model, (query, sampler) = dropped(), clip()
    query = Noted(query)
    mechanism = tacit.Mechanism(query, sampler, 1.0)
    mechanism.privatise(model, LOSS, sampler.next_batch().first(0))
    batch = sampler.next_batch()
    for _ in range(2):
        torch.manual_seed(0)  # as somebody may who evaluates in between
        mechanism.privatise(model, LOSS, batch)
    assert not torch.allclose(*query.sums[-2:], rtol=1e-3)


@pytest.mark.parametrize("build", [plain, dropped])
def test_the_generators_are_as_they_were_after_each_step(build) -> None:
    noted(clip(), build(), steps=3)
    found = drawn()
    seed_all()
    assert found == drawn()


def test_an_error_in_the_first_step_gives_the_generator_back() -> None:
    def broken(outputs, targets):
        raise KeyError("no")

    model, (query, sampler) = plain(), clip()
    torch.manual_seed(0)
    with pytest.raises(KeyError):
        tacit.Mechanism(query, sampler, 1.0).privatise(model, broken, sampler.next_batch())
    found = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(found, torch.rand(3))


def test_numpys_kept_number_survives_a_step() -> None:
    """NumPy keeps the second number of a Gaussian pair too."""
    np.random.seed(3)
    np.random.randn()
    expected = np.random.get_state(legacy=False)
    with step_draws(Randomness(), 0, torch.device("cpu")):
        np.random.randn()
    found = np.random.get_state(legacy=False)
    assert found["has_gauss"] == expected["has_gauss"] == 1
    assert np.random.randn() == expected["gauss"]


def test_ranks_draw_masks_of_their_own() -> None:
    """The masks of two records must be independent, also where two ranks run the records."""
    source, found = Randomness(1), []
    for rank in (0, 1, 2, 0):
        with step_draws(source, 0, torch.device("cpu"), rank):
            found.append((torch.rand(8), np.random.rand(8), random.random()))
    assert torch.equal(found[0][0], found[3][0])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.isclose(found[one][0], found[other][0]).any()
        assert not np.isclose(found[one][1], found[other][1]).any()
        assert found[one][2] != found[other][2]

"""Several views of a record: their mean gradient is clipped once, whatever layers it comes from."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clip_loop import assert_equal_to_loop, clip, loop, normalise
from torch import nn

import tacit
from tacit import AdaptiveNorm, Normalise, PerSampleClip, RandomCropFlip
from tacit.data import Augmentation
from tacit.engines import Automatic, BookKeeping, PerRecord
from tacit.errors import MixesRecords
from tacit.lipschitz.layers import SpectralConv2d, SpectralLinear
from tacit.queries import Clip
from tacit.queries.views import ViewBatches
from tacit.sampling import Poisson, batch_of

torch.set_num_threads(1)

ENGINES = {"book-keeping": BookKeeping, "per-record": PerRecord, "automatic": Automatic}


def quadratic(outputs, targets):
    flat = outputs.reshape(len(outputs), -1)
    return 0.5 * (flat - targets.to(flat.dtype)[:, None]).square().sum(dim=1)


def stretched(views):
    """View k of each row, by its place: nothing is drawn, so a loop can do the same."""

    def transform(rows):
        k = (torch.arange(len(rows)) % views).view(-1, *(1,) * (rows.dim() - 1))
        return rows * (1 + 0.5 * k) if rows.is_floating_point() else (rows + k) % 9

    return Augmentation(views, transform)


def views_in(augmentation):
    return lambda x: augmentation.views_of(x[None])


def batch_for(inputs, max_physical=None):
    targets = torch.linspace(-1, 1, len(inputs), dtype=torch.float64)
    return batch_of(inputs, targets, divisor=3.0, scheme=Poisson(0.5), max_physical=max_physical)


def reals(*shape):
    return lambda n: torch.randn(n, *shape, dtype=torch.float64)


def tokens(n):
    return torch.randint(0, 9, (n, 5))


class Fixed(nn.Module):
    """A layer between others, so that gradients arrive at it from above."""

    def __init__(self, layer, pick=lambda y: y) -> None:
        super().__init__()
        self.layer, self.pick = layer, pick

    def forward(self, x):
        return torch.tanh(self.pick(self.layer(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Own(nn.Module):
    """A parameter without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x):
        return torch.tanh(x * self.scale)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


LAYERS = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), reals(4)),
    "linear, ghost": (lambda: nn.Linear(60, 50), reals(2, 60)),
    "linear, on positions": (lambda: Fixed(nn.Linear(4, 3)), reals(6, 4)),
    "spectral linear": (lambda: Fixed(SpectralLinear(4, 3)), reals(6, 4)),
    "layer norm": (lambda: Fixed(nn.LayerNorm(4)), reals(3, 4)),
    "layer norm, two dims": (lambda: Fixed(nn.LayerNorm((3, 4))), reals(3, 4)),
    "rms norm": (lambda: Fixed(nn.RMSNorm(4)), reals(4)),
    "group norm": (lambda: Fixed(nn.GroupNorm(2, 4)), reals(4, 3, 3)),
    "instance norm": (lambda: Fixed(nn.InstanceNorm2d(4, affine=True)), reals(4, 3, 3)),
    "embedding": (lambda: Fixed(nn.Embedding(9, 4)), tokens),
    "embedding, with padding": (lambda: Fixed(nn.Embedding(9, 4, padding_idx=2)), tokens),
    "embedding bag": (lambda: Fixed(nn.EmbeddingBag(9, 4)), tokens),
    "attention": (Attention, reals(3, 4)),
    "gru": (lambda: Fixed(nn.GRU(4, 3, batch_first=True), lambda y: y[0]), reals(3, 4)),
    "a parameter of its own": (Own, reals(4)),
    "tied weights": (Tied, reals(4)),
}
CONVOLUTIONS = [
    nn.Conv1d(3, 4, 3, padding=1),
    nn.Conv1d(3, 4, 3, stride=2, padding=2, dilation=2),
    nn.Conv1d(3, 40, 3),
    nn.Conv1d(30, 40, 2, stride=3),
    nn.Conv2d(3, 4, 3, padding=1),
    nn.Conv2d(3, 4, (2, 3), stride=(3, 2), padding=(1, 2), bias=False),
    nn.Conv2d(3, 6, 3, stride=2, groups=3, dilation=(2, 1)),
    nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular"),
    nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    nn.Conv2d(3, 4, 1, stride=4),
    nn.Conv3d(3, 2, 2, stride=(2, 1, 1), padding=1),
    nn.ConvTranspose2d(3, 2, 3, stride=2),
    SpectralConv2d(3, 4, 3, padding=1),
]
SIZES = {nn.Conv1d: (11,), nn.Conv2d: (7, 6), nn.Conv3d: (5, 3, 3), nn.ConvTranspose2d: (4, 3)}
SIZES[SpectralConv2d] = (7, 6)


def check(model, inputs, engine, views=3, grouping=None):
    augmentation = stretched(views)
    query = PerSampleClip(
        AdaptiveNorm(1.0), augmentation=augmentation, blocks=grouping, engine=engine
    )
    batch = batch_for(inputs)
    bounded = query(model, quadratic, batch)
    norms = [1.0] * len(bounded.blocks)
    expected = loop(model, quadratic, batch, norms, grouping, views=views_in(augmentation))
    assert_equal_to_loop(bounded, *expected)


@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_layer(name):
    torch.manual_seed(0)
    make, draw = LAYERS[name]
    for grouping in (None, tacit.by_parameter):
        check(make().double(), draw(4), BookKeeping(), grouping=grouping)


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("above", [False, True])
def test_every_kind_of_convolution(layer, above):
    """Laid end to end, whatever the stride and the padding; alone, and below another one."""
    torch.manual_seed(0)
    size = SIZES[type(layer)]
    model = nn.Sequential(layer, nn.Tanh())
    if above:
        kind = type(layer)
        model = nn.Sequential(kind(2, layer.in_channels, 1), nn.Tanh(), layer, nn.Tanh())
    channels = 2 if above else layer.in_channels
    check(model.double(), reals(channels, *size)(4), BookKeeping(), views=2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize(
    ("rule", "scale"), [(Clip(), clip), (Normalise(), normalise(0.01))], ids=["clip", "normalise"]
)
@pytest.mark.parametrize("max_physical", [None, 1, 4, 7])
def test_engines_rules_masks_and_pieces(engine, count, rule, scale, max_physical):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()
    batch = batch_for(reals(1, 4, 4)(count), max_physical)
    batch = batch.with_mask(torch.arange(count) != 1)
    if count > 3:
        batch.records.inputs[3] = torch.nan
    augmentation = stretched(3)
    query = PerSampleClip(
        AdaptiveNorm(0.8), rule=rule, augmentation=augmentation, engine=ENGINES[engine]()
    )
    bounded = query(model, quadratic, batch)
    expected = loop(model, quadratic, batch, [0.8], None, scale, views_in(augmentation))
    assert_equal_to_loop(bounded, *expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("views", [1, 2, 5])
def test_views_that_are_all_the_same_are_one_view(engine, views):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).double()
    batch = batch_for(reals(2, 4, 4)(5))
    plain = PerSampleClip(0.7)(model, quadratic, batch)
    same = Augmentation(views, lambda rows: rows)
    seen = PerSampleClip(0.7, augmentation=same, engine=ENGINES[engine]())(model, quadratic, batch)
    for one, other in zip(plain.blocks[0].sums, seen.blocks[0].sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


def test_a_record_with_many_views_is_one_record():
    """Sixteen views far beyond the threshold add what one would: at most C."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(108, 10))
    batch = batch_of(
        100 * torch.randn(1, 1, 8, 8), torch.zeros(1).long(), divisor=1.0, scheme=Poisson(0.5)
    )
    query = PerSampleClip(0.1, augmentation=Augmentation(16, RandomCropFlip(2)))
    for _ in range(10):
        (block,) = query(model, nn.CrossEntropyLoss(), batch).blocks
        assert float(torch.cat([s.flatten() for s in block.sums]).norm()) <= 0.1


def test_a_view_that_is_not_finite_takes_its_record_along_and_nobody_else():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    batch = batch_for(reals(3)(4))

    def spoils_one(rows):
        seen = rows.clone()
        seen[3 * 2 + 1] = torch.inf  # the second view of the third record
        return seen

    broken = PerSampleClip(0.5, augmentation=Augmentation(3, spoils_one))
    whole = PerSampleClip(0.5, augmentation=Augmentation(3, lambda rows: rows))
    masked = batch.with_mask(torch.arange(4) != 2)
    for one, other in zip(
        broken(model, quadratic, batch).blocks[0].sums,
        whole(model, quadratic, masked).blocks[0].sums,
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_views_of_a_piece_are_drawn_once_even_if_a_record_is_left_out():
    """Else who is left out would change everybody else's views."""
    torch.manual_seed(0)
    calls = []

    def noisy(rows):
        calls.append(len(rows))
        return rows + torch.randn_like(rows)

    inputs = reals(3)(6)
    inputs[2] = torch.nan
    query = PerSampleClip(0.5, augmentation=Augmentation(4, noisy, rows_apart=True))
    model = nn.Linear(3, 2).double()
    for _ in range(3):  # the model is checked before the first and the second step
        calls.clear()
        query(model, quadratic, batch_for(inputs))
    assert calls == [24]


def test_the_physical_limit_counts_views():
    batch = batch_for(reals(3)(10), max_physical=8)
    sizes = [len(piece) for piece in ViewBatches(stretched(3)).of(batch)]
    assert sizes == [6, 6, 6, 6, 6]
    assert [len(p) for p in ViewBatches(stretched(9)).of(batch)] == [9] * 10


def mixup(rows):
    share = torch.rand(len(rows), *(1,) * (rows.dim() - 1))
    return share * rows + (1 - share) * rows[torch.randperm(len(rows))]


MIXING = {
    "mixup": mixup,
    "less the batch's mean": lambda rows: rows - rows.mean(dim=0),
    "shuffled": lambda rows: rows[torch.randperm(len(rows))],
    "shifted by a row": lambda rows: rows.roll(1, 0),
    "half a batch on": lambda rows: rows + rows.roll(len(rows) // 2, 0),
    "shuffled by NumPy": lambda rows: rows[torch.from_numpy(np.random.permutation(len(rows)))],
}


@pytest.mark.parametrize("max_physical", [None, 1])
@pytest.mark.parametrize("views", [1, 4])
@pytest.mark.parametrize("name", MIXING)
def test_a_transform_that_mixes_records_is_refused(name, views, max_physical):
    torch.manual_seed(1)
    query = PerSampleClip(1.0, augmentation=Augmentation(views, MIXING[name]))
    with pytest.raises(MixesRecords, match="other records"):
        query(nn.Linear(3, 2).double(), quadratic, batch_for(reals(3)(12), max_physical))


class TwoColumns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2).double()

    def forward(self, left, right):
        return self.body(left + right)


@pytest.mark.parametrize("name", MIXING)
def test_a_transform_that_mixes_a_column_of_a_tree_is_refused(name):
    torch.manual_seed(1)

    def transform(rows):
        return {"left": rows["left"] * 1.5, "right": MIXING[name](rows["right"])}

    inputs = {"left": reals(3)(12), "right": reals(3)(12)}
    with pytest.raises(MixesRecords, match="other records"):
        PerSampleClip(1.0, augmentation=Augmentation(2, transform))(
            TwoColumns(),
            quadratic,
            batch_of(inputs, torch.zeros(12).double(), divisor=3.0, scheme=Poisson(0.5)),
        )


def test_a_transform_that_remembers_is_refused():
    held = [torch.zeros(3, dtype=torch.float64)]

    def less_the_last(rows):
        seen, held[0] = rows - held[0], rows[-1]
        return seen

    query = PerSampleClip(1.0, augmentation=Augmentation(1, less_the_last))
    with pytest.raises(MixesRecords, match="remembers earlier ones"):
        query(nn.Linear(3, 2).double(), quadratic, batch_for(reals(3)(12), 1))


def test_a_generator_of_its_own_needs_a_promise():
    """Nobody can set it back, so nobody can see whether records meet."""
    own = torch.Generator().manual_seed(3)
    model, batch = nn.Linear(3, 2).double(), batch_for(reals(3)(6))

    def noisy(rows):
        return rows + torch.randn(rows.shape, generator=own, dtype=rows.dtype)

    with pytest.raises(MixesRecords, match="rows_apart=True"):
        PerSampleClip(1.0, augmentation=Augmentation(2, noisy))(model, quadratic, batch)
    PerSampleClip(1.0, augmentation=Augmentation(2, noisy, rows_apart=True))(
        model, quadratic, batch
    )


def test_the_check_leaves_the_generator_where_it_was():
    model, batch = nn.Linear(3, 2).double(), batch_for(reals(3)(6))
    found = []
    for promised in (False, True):
        noisy = Augmentation(2, lambda rows: rows + torch.randn_like(rows), rows_apart=promised)
        torch.manual_seed(7)
        query = PerSampleClip(1.0, augmentation=noisy)
        found.append(query(model, quadratic, batch).blocks[0].sums[0])
    assert torch.equal(*found)


def test_a_transform_that_loses_rows_is_refused():
    with pytest.raises(ValueError, match="one of each"):
        Augmentation(2, lambda rows: rows[:-1]).views_of(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="at least 1"):
        Augmentation(0, lambda rows: rows)


# Crops and flips.


def all_crops(image, padding, reflect):
    """Every crop of the padded image, and its mirror images."""
    mode = {"mode": "reflect"} if reflect else {"value": 0.0}
    padded = F.pad(image[None], (padding,) * 4, **mode)[0]
    height, width = image.shape[1:]
    crops = [
        padded[:, dy : dy + height, dx : dx + width]
        for dy in range(2 * padding + 1)
        for dx in range(2 * padding + 1)
    ]
    return crops + [crop.flip(2) for crop in crops]


@pytest.mark.parametrize("reflect", [True, False])
@pytest.mark.parametrize("size", [(6, 7), (7, 6)])
def test_a_view_is_a_crop_of_the_padded_image_and_each_is_as_likely(reflect, size):
    torch.manual_seed(0)
    image = torch.randn(2, *size)
    views = RandomCropFlip(2, reflect=reflect)(image.expand(4000, *image.shape))
    crops = torch.stack(all_crops(image, 2, reflect))
    same = (views[:, None] == crops[None]).flatten(2).all(dim=2)
    assert (same.sum(dim=1) == 1).all()
    counts = same.sum(dim=0)
    assert len(counts) == 50
    assert counts.min() > 40
    assert counts.max() < 130


def test_rows_are_drawn_on_their_own_and_whole_images_move_together():
    torch.manual_seed(0)
    image = torch.arange(64.0).view(1, 8, 8)
    twice = torch.cat([image, 100 + image])  # two channels of one image
    views = RandomCropFlip(3)(twice.expand(50, 2, 8, 8))
    torch.testing.assert_close(views[:, 1], 100 + views[:, 0])
    assert len(torch.unique(views[:, 0].flatten(1), dim=0)) > 30


def test_nothing_moves_without_padding_and_flips():
    images = torch.randn(5, 3, 4, 4)
    assert torch.equal(RandomCropFlip(0, flip=False)(images), images)
    both = RandomCropFlip(0)(images), images
    mirrored = [(view == image.flip(2)).all() for view, image in zip(*both, strict=True)]
    unmoved = [(view == image).all() for view, image in zip(*both, strict=True)]
    assert all(m != u for m, u in zip(mirrored, unmoved, strict=True))


def test_what_cannot_be_cropped_is_refused():
    with pytest.raises(ValueError, match="images"):
        RandomCropFlip()(torch.zeros(3, 8))
    with pytest.raises(ValueError, match="reflect=False"):
        RandomCropFlip(4)(torch.zeros(3, 1, 4, 9))
    assert RandomCropFlip(4, reflect=False)(torch.ones(3, 1, 4, 9)).shape == (3, 1, 4, 9)
    with pytest.raises(ValueError, match="padding"):
        RandomCropFlip(-1)
    assert dataclasses.replace(RandomCropFlip(), padding=2) == RandomCropFlip(2)

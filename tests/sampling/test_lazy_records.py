"""Records that are read when they are needed are the records in memory, bit by bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from lazy_data import FORMS, IDS, TREE, Items, N, X, Y, lazy_and_in_memory, mapped, pair

import tacit
from tacit import Records
from tacit.data import as_records
from tacit.errors import DataError, NotPublic
from tacit.pytrees import tensors_of
from tacit.queries.record_overlap import require_held_out, require_public

SAMPLERS = {
    "poisson": lambda r, **kw: tacit.PoissonSampler(r, expected_batch_size=9, steps=6, **kw),
    "fixed": lambda r, **kw: tacit.FixedSizeSampler(r, 7, steps=6, **kw),
    "shuffle": lambda r, **kw: tacit.ShuffleSampler(r, 15, steps=7, **kw),
    "sets": lambda r, **kw: tacit.MiniSetSampler(r, 3, steps=6, chosen=4, **kw),
}


def equal(one, other) -> bool:
    a, b = tensors_of(one), tensors_of(other)
    same = len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )
    return same and not any(type(t) is not torch.Tensor for t in a)


def same_batches(one, other) -> bool:
    pairs = list(zip(one, other, strict=True))
    for a, b in pairs:
        assert torch.equal(a.indices, b.indices)
        assert a.epoch is None or a.epoch[1] == b.epoch[1]
        assert (a.drawn.sampling, a.drawn.step) == (b.drawn.sampling, b.drawn.step)
        assert equal((a.inputs, a.targets), (b.inputs, b.targets))
        for piece, other_piece in zip(a.physical(), b.physical(), strict=True):
            assert equal((piece.inputs, piece.targets), (other_piece.inputs, other_piece.targets))
    return bool(pairs)


@pytest.mark.parametrize("padding", [{}, {"padded": True, "max_physical_batch": 4}, {"pad_to": 8}])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("form", FORMS)
def test_batches_are_those_of_records_in_memory(form, sampler, padding, tmp_path):
    lazy, whole = lazy_and_in_memory(form, tmp_path)
    assert lazy.is_lazy
    assert not whole.is_lazy
    make = SAMPLERS[sampler]
    one, other = make(lazy, seed=5, **padding), make(whole, seed=5, **padding)
    assert same_batches(one, other)
    assert same_batches(one, other)  # another pass


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_taken_left_out_and_split_as_in_memory(form, tmp_path):
    lazy, whole = lazy_and_in_memory(form, tmp_path)
    mask = torch.arange(N) % 3 == 1
    for rows in (slice(5, 30, 4), mask, torch.tensor([3, 3, 39, 0]), slice(0, 0)):
        some = lazy.take(rows)
        assert some.is_lazy
        assert equal(some.read().inputs, whole.take(rows).inputs)
        assert equal(
            some.take(slice(1, 3)).read().targets, whole.take(rows).take(slice(1, 3)).targets
        )
        assert torch.equal(some.record_ids, whole.take(rows).record_ids)
    assert equal(lazy.without(7).read().inputs, whole.without(7).inputs)
    halves = zip(tacit.split_public(lazy, 0.3), tacit.split_public(whole, 0.3), strict=True)
    assert all(equal(a.read().inputs, b.inputs) for a, b in halves)
    assert lazy.shape == whole.shape
    assert len(lazy) == N


def test_a_dataset_reads_an_item_once_for_inputs_and_targets():
    read = []

    def item(row):
        read.append(row)
        return pair(row)

    records = Records.lazy(Items(item), public_size=N)
    read.clear()
    batch = tacit.PoissonSampler(records, 0.5, seed=1).next_batch()
    _ = batch.inputs, batch.targets, batch.inputs
    assert sorted(read) == batch.indices.tolist()


def test_a_cut_batch_reads_no_more_than_a_piece_at_once():
    sizes = []

    class Source:
        def __len__(self):
            return N

        def read_rows(self, rows):
            sizes.append(len(rows))
            return X[rows], Y[rows]

    records = Records.lazy(Source(), prefetch=0, public_size=N)
    sampler = tacit.PoissonSampler(records, 0.9, max_physical_batch=5, seed=1)
    for piece in sampler.next_batch().physical():
        _ = piece.inputs, piece.targets
    assert max(sizes) == 5


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: x.mean(),
        lambda x: torch.nn.Linear(3, 1)(x),
        lambda x: torch.cat([x, x]),
        lambda x: x.numpy(),
        lambda x: x.clone(),
        lambda x: x == 0,
        lambda x: x.tolist(),
    ],
)
def test_values_that_are_not_in_memory_are_refused_with_the_way_out(use):
    records = Records.lazy((X, Y))
    with pytest.raises(DataError, match=r"take\(rows\).read\(\)"):
        use(records.inputs)
    use(records.take(slice(0, 5)).read().inputs)


def test_a_column_shows_what_is_public():
    column = Records.lazy((X, Y)).inputs
    assert "40" not in repr(column)
    assert column.shape == (N, 3)
    assert column.dtype is torch.float32
    assert torch.equal(column[2:4], X[2:4])
    assert torch.equal(column[torch.tensor([5])], X[5:6])


def test_device_and_type_are_those_that_are_delivered():
    records = Records.lazy((X, Y)).to("meta")
    assert records.device == torch.device("meta")
    wide = Records(Records.lazy((X, Y)).inputs.to(torch.float64), Y)
    assert wide.read().inputs.dtype is torch.float64


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (
            lambda i: (torch.ones(3 + (i == 9)), 0),
            r"inputs of record 9 .*\(4,\).*\(3,\).*max_length",
        ),
        (lambda i: (X[i], 0 if i != 9 else 0.5), r"targets of record 9 .*float32.*int64.*convert"),
        (lambda i: {"a": X[i]} | ({"b": X[i]} if i == 9 else {}), r"inputs\['b'\].*9.*same keys"),
        (lambda i: {"a": X[i], "t": "text" if i == 9 else 1}, r"record 9 .*tokenizer"),
        (lambda i: 1 / (i - 9) and pair(i), r"record 9 cannot be read: ZeroDivisionError"),
    ],
)
def test_an_item_unlike_the_first_is_refused_with_its_row_and_a_warning(item, says):
    records = Records.lazy(Items(item), public_size=N)
    with pytest.raises(DataError, match=says) as caught:
        _ = tacit.PoissonSampler(records, 1.0).next_batch().inputs
    assert "private" in str(caught.value)


def test_a_source_that_gives_other_shapes_is_refused():
    class Source:
        def __len__(self):
            return N

        def read_rows(self, rows):
            return torch.ones(len(rows), len(rows))

    with pytest.raises(DataError, match="Source gave tensors of shapes"):
        Records.lazy(Source()).take(slice(0, 3)).read()


def test_streams_and_loaders_are_refused_with_the_reason():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([pair(0)])

    for stream in (Stream(), (pair(i) for i in range(3)), iter([pair(0)])):
        for read in (as_records, Records.lazy):
            with pytest.raises(TypeError, match="stream, and the guarantee needs random access"):
                read(stream)
    with pytest.raises(TypeError, match=r"loader\.dataset"):
        as_records(torch.utils.data.DataLoader(Items(pair)))


@pytest.mark.parametrize(
    "wrong",
    [{"num_workers": -1}, {"num_workers": 1.5}, {"prefetch": -1}, {"timeout": 0}, {"timeout": "a"}],
)
def test_wrong_options_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Records.lazy((X, Y), **wrong)
    with pytest.raises(ValueError, match="empty"):
        Records.lazy(Items(pair, size=0))


def test_small_datasets_are_read_into_memory_and_large_ones_when_needed():
    assert not as_records(Items(pair)).is_lazy
    large = Items(lambda row: (torch.zeros(2**20), row % 2), size=300)  # 1.2 GB
    assert as_records(large).is_lazy


def test_a_random_transform_draws_for_each_record_and_step_on_its_own():
    def item(row):
        noise = float(torch.rand(())), float(np.random.rand()), random.random()
        return torch.tensor([*noise, float(row)]), 0

    def batches(seed, items=item, steps=3):
        records = Records.lazy(Items(items), public_size=N)
        sampler = tacit.PoissonSampler(records, 0.5, steps=steps, seed=seed)
        return [(batch.inputs.double(), batch.indices) for batch in sampler]

    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first, again = batches(1), batches(1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, again, strict=True))
    drawn = torch.cat([x[:, :3] for x, _ in first])
    assert len(drawn.unique()) == drawn.numel()  # of every record and step, and every generator

    # Without one record everybody else's draws are the same.
    one = first[0][1][0]
    records = Records.lazy(Items(item), public_size=N)
    sampler = tacit.PoissonSampler(records, 0.5, steps=3, seed=1)
    rest = next(iter(sampler)).only(slice(1, None))
    assert torch.equal(rest.inputs.double(), first[0][0][1:]), one


def test_an_array_that_was_changed_in_memory_keeps_its_changes(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    changed = np.load(tmp_path / "x.npy", mmap_mode="c")
    changed[3] = 7
    assert Records(changed, Y).take(slice(3, 4)).read().inputs.tolist() == [[7, 7, 7]]
    swapped = np.load(tmp_path / "x.npy", mmap_mode="r").astype(">f4")
    np.save(tmp_path / "y.npy", swapped)
    other = Records(np.load(tmp_path / "y.npy", mmap_mode="r"), Y)
    assert torch.equal(other.read().inputs, X)


def test_training_records_are_refused_as_held_out_ones(tmp_path):
    private = mapped(tmp_path)
    model = torch.nn.Linear(3, 3)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = model

        def forward(self, input_ids, x):
            return self.linear(x)

    def trainer(evaluate_on):
        trained = Model()
        return tacit.Trainer(
            trained,
            tacit.losses.CrossEntropy(),
            tacit.PerSampleClip(1.0),
            tacit.PoissonSampler(private, expected_batch_size=8, steps=2),
            torch.optim.SGD(trained.parameters(), lr=0.1),
            tacit.Budget(3.0, 1e-3),
            evaluate_on=evaluate_on,
        )

    again = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("ids", "x")}
    same_file = Records({"input_ids": again["ids"], "x": again["x"]}, Y)
    for refused in (private, private.take(slice(5)), same_file, Records(TREE, Y), private.read()):
        with pytest.raises(NotPublic):
            trainer(refused)
    other = Records({"input_ids": IDS + 1000, "x": X + 9}, Y)
    run = trainer(Records.lazy((other.inputs, Y))).fit()
    assert run.history[-1].accuracy is not None


def test_rows_of_a_mapped_array_are_read_as_items_and_by_a_source(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    array = np.load(tmp_path / "x.npy", mmap_mode="r")

    class Source:
        def __len__(self):
            return N

        def read_rows(self, rows):
            first = int(rows[0]) if len(rows) else 0
            return array[first : first + len(rows)], Y[rows]

    items = Items(lambda row: (array[row], int(Y[row])))
    for records in (Records.lazy(items), Records.lazy(Source()), as_records(items)):
        assert equal(records.read().inputs, X)


def test_views_of_one_file_are_told_apart_by_their_rows(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    one, other = (np.load(tmp_path / "x.npy", mmap_mode="r") for _ in range(2))
    private = Records(one[:30], Y[:30], public_size=30)
    for held_out in (other[30:], other[30::2]):
        require_held_out(Records(held_out, Y[: len(held_out)]), private)
    for held_out in (other[29:], other[20:22], one[::39]):
        with pytest.raises(NotPublic):
            require_held_out(Records(held_out, Y[: len(held_out)]), private)
    public, rest = tacit.split_public(Records(one, Y, public_size=N), 0.5)
    require_held_out(public, rest)
    require_public(public, rest)
    with pytest.raises(NotPublic):
        require_public(Records(other, Y, name="other"), rest)


def test_larger_sets_are_compared_by_source_and_rows_alone(tmp_path):
    rows, width = 1 << 10, 1 << 19  # 2 GiB that take no disk space
    with open(tmp_path / "rows", "wb") as file:
        file.truncate(rows * width * 4)
    array = np.memmap(tmp_path / "rows", np.float32, "r", shape=(rows, width))
    private = Records(array, torch.zeros(rows), public_size=rows)
    require_held_out(Records(torch.ones(3, width), torch.zeros(3)), private)
    with pytest.raises(NotPublic):
        require_held_out(private.take(slice(3)), private)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_nobody_is_a_batch_of_padding(prefetch):
    every = Records.lazy((X, Y), prefetch=prefetch, public_size=N)
    for nobody in (every.take(slice(0, 0)), Records.lazy((X[:0], Y[:0]), public_size=N)):
        for batch in tacit.PoissonSampler(nobody, 0.5, steps=2, padded=True, max_physical_batch=5):
            assert not batch.mask.any()
            assert torch.equal(batch.inputs, torch.zeros(5, 3))
        assert len(tacit.PoissonSampler(nobody, 0.5).next_batch().inputs) == 0

"""Records whose inputs and targets are pytrees, and what they are read from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import tacit
from tacit.records import Records, as_records

transformers = pytest.importorskip("transformers")

IDS = torch.arange(12).view(4, 3)
MASK = torch.ones(4, 3, dtype=torch.bool)
LABELS = torch.tensor([0, 1, 1, 0])


@dataclass
class Scene:
    image: torch.Tensor
    depth: torch.Tensor


def text() -> Records:
    return Records({"input_ids": IDS, "attention_mask": MASK}, LABELS, 2, public_size=4)


class Rows(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


@pytest.mark.parametrize(
    "inputs",
    [
        {"input_ids": IDS, "attention_mask": MASK},
        (IDS, MASK),
        [IDS, {"mask": MASK}],
        Scene(IDS, MASK),
        transformers.BatchEncoding({"input_ids": IDS, "attention_mask": MASK}),
    ],
    ids=lambda inputs: type(inputs).__name__,
)
def test_records_of_every_structure(inputs):
    records = Records(inputs, {"class": LABELS, "score": LABELS.float()}, public_size=4)
    assert len(records) == 4
    assert records.device == torch.device("cpu")
    assert type(records.inputs) is type(inputs)
    fewer = records.without(1)
    assert fewer.record_ids.tolist() == [0, 2, 3]
    assert fewer.targets["class"].tolist() == [0, 1, 0]
    assert records.to("meta").device == torch.device("meta")
    batch = next(iter(tacit.PoissonSampler(records, 1.0)))
    assert type(batch.inputs) is type(inputs)
    assert torch.equal(batch.targets["score"], LABELS.float())


def test_the_shape_of_a_tree_is_a_tree_of_shapes():
    assert text().shape == {"input_ids": (3,), "attention_mask": (3,)}
    assert Records((IDS, LABELS), LABELS).shape == ((3,), ())
    assert Records(IDS, LABELS).shape == (3,)


def test_a_replaced_record_is_matched_by_key():
    x = {"attention_mask": torch.zeros(3, dtype=torch.bool), "input_ids": torch.tensor([7, 7, 7])}
    other = text().replaced(2, x, 0)
    assert other.inputs["input_ids"][2].tolist() == [7, 7, 7]
    assert not other.inputs["attention_mask"][2].any()
    assert other.targets.tolist() == [0, 1, 0, 0]
    assert text().inputs["input_ids"][2].tolist() == [6, 7, 8]
    with pytest.raises(ValueError, match="structure"):
        text().replaced(2, {"input_ids": IDS[0]}, 0)


@pytest.mark.parametrize("targets", [None, ()])
def test_without_targets_a_loss_gets_the_empty_tuple(targets):
    records = Records({"x": IDS}, targets)
    assert records.targets == ()
    assert Records(IDS).targets == ()
    batch = tacit.sampling.batch_of(
        records.inputs, targets, divisor=4.0, scheme=tacit.sampling.Poisson(1.0)
    )
    assert batch.targets == ()
    assert records.without(0).targets == records.to("cpu").targets == ()
    assert records.replaced(0, {"x": IDS[1]}).inputs["x"][0].tolist() == [3, 4, 5]


def test_batches_gather_and_cut_trees():
    records = text()
    batch = tacit.sampling.batch_of(
        records.inputs,
        records.targets,
        divisor=4.0,
        scheme=tacit.sampling.Poisson(1.0),
        max_physical=3,
    )
    pieces = [piece.inputs["input_ids"] for piece in batch.physical()]
    assert [len(piece) for piece in pieces] == [3, 1]
    assert torch.equal(torch.cat(pieces), IDS)


def test_padding_of_an_empty_dataset_is_zeros_of_the_same_structure():
    nobody = Records({"input_ids": IDS[:0], "mask": MASK[:0]}, LABELS[:0], public_size=4)
    sampler = tacit.PoissonSampler(nobody, 0.5, padded=True, max_physical_batch=5)
    batch = sampler.next_batch()
    assert not batch.mask.any()
    assert batch.inputs["input_ids"].shape == (5, 3)
    assert batch.inputs["mask"].dtype is torch.bool
    assert batch.targets.tolist() == [0] * 5


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda r, **kw: tacit.PoissonSampler(r, 0.5, steps=3, **kw),
        lambda r, **kw: tacit.FixedSizeSampler(r, 2, steps=3, **kw),
        lambda r, **kw: tacit.ShuffleSampler(r, 2, steps=3, **kw),
        lambda r, **kw: tacit.MiniSetSampler(r, 2, steps=3, chosen=1, **kw),
    ],
    ids=["poisson", "fixed", "shuffle", "mini-sets"],
)
def test_every_sampler_takes_trees(make, padded):
    for batch in make(text(), padded=padded):
        assert torch.equal(batch.inputs["input_ids"], IDS[batch.indices])
        assert torch.equal(batch.targets, LABELS[batch.indices])


def test_a_public_share_of_a_tree():
    public, private = tacit.split_public(text(), 0.5)
    assert len(public) + len(private) == 4
    assert public.inputs["input_ids"].shape[1:] == (3,)


@pytest.mark.parametrize(
    ("inputs", "targets", "says"),
    [
        ({"a": IDS, "b": MASK[:3]}, LABELS, r"inputs\['a'\] has shape \(4, 3\) and inputs\['b'\]"),
        ({"a": IDS}, LABELS[:3], "4 inputs and 3 targets"),
        ({"a": IDS}, {"y": LABELS[:3]}, "4 inputs and 3 targets"),
        ({"a": IDS, "t": torch.tensor(1.0)}, LABELS, r"inputs\['t'\] is a single number"),
        ({}, LABELS, "inputs holds no tensor"),
        ({"a": IDS, "flag": True}, LABELS, r"inputs\['flag'\] is True \(bool\)"),
        ({"a": IDS, "n": 3}, LABELS, r"inputs\['n'\] is 3 \(int\)"),
        ({"a": IDS, "text": "word"}, LABELS, r"inputs\['text'\] is text; .* tokenizer"),
        ({"a": IDS, "text": ["a", "b", "c", "d"]}, LABELS, r"inputs\['text'\]\[0\] is text"),
        ({"a": np.array(["a", "b", "c", "d"])}, LABELS, "array of <U1"),
        ({"a": IDS.to_sparse()}, LABELS, "to_dense"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), LABELS, "to_padded_tensor"),
        ({"a": [[1, 2], [3]]}, [0, 1], r"inputs\['a'\] has rows of different lengths.*max_length"),
    ],
)
def test_what_is_no_record_is_refused_by_name(inputs, targets, says):
    with pytest.raises((ValueError, TypeError), match=says):
        Records(inputs, targets)


def test_lists_of_numbers_and_arrays_become_tensors():
    records = Records({"a": [[1, 2], [3, 4]], "b": np.ones((2, 1)), "none": None}, [0, 1])
    assert records.inputs["a"].tolist() == [[1, 2], [3, 4]]
    assert records.inputs["b"].dtype is torch.float64
    assert records.inputs["none"] is None
    assert records.targets.dtype is torch.int64


ENCODED = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 0]}


@pytest.mark.parametrize(
    ("item", "inputs", "target"),
    [
        ((torch.ones(3), 1), torch.ones(2, 3), 1),
        ((np.ones(3), np.int64(1)), torch.ones(2, 3, dtype=torch.float64), 1),
        ([torch.ones(3), torch.tensor(1)], torch.ones(2, 3), 1),
        ((torch.ones(3), torch.ones(2), 1), (torch.ones(2, 3), torch.ones(2, 2)), 1),
        (({"x": torch.ones(3), "m": 2}, 1), {"x": torch.ones(2, 3), "m": torch.tensor([2, 2])}, 1),
        ({"x": torch.ones(3), "labels": 1}, {"x": torch.ones(2, 3)}, 1),
        ({"x": torch.ones(3), "label": 1}, {"x": torch.ones(2, 3)}, 1),
        (
            transformers.BatchEncoding(ENCODED | {"labels": 1}),
            {k: torch.tensor([v, v]) for k, v in ENCODED.items()},
            1,
        ),
        (ENCODED, {k: torch.tensor([v, v]) for k, v in ENCODED.items()}, None),
        (torch.ones(3), torch.ones(2, 3), None),
        ((Scene(torch.ones(3), torch.ones(1)), 1), Scene(torch.ones(2, 3), torch.ones(2, 1)), 1),
        (((1.0, 2.0, 3.0), 1), torch.tensor([[1.0, 2.0, 3.0]] * 2), 1),
    ],
)
def test_items_of_a_dataset(item, inputs, target):
    records = as_records(Rows([item, item]))
    same = tacit.pytrees.map_tensors(
        lambda a, b: torch.testing.assert_close(a, b), records.inputs, inputs
    )
    assert type(same) is type(inputs) or isinstance(inputs, torch.Tensor)
    if target is None:
        assert records.targets == ()
    else:
        assert records.targets.tolist() == [target] * 2
        assert records.targets.dtype is torch.int64


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([{"input_ids": [1, 2]}, {"input_ids": [1]}], r"inputs\['input_ids'\].*\(1,\) and \(2,\)"),
        ([{"input_ids": [1, 2]}, {"input_ids": [1]}], r'padding="max_length"'),
        ([{"a": 1, "b": 2}, {"a": 1}], "same keys"),
        ([{"a": 1, "b": 2}, {"a": 1, "c": 2}], "does not have the structure"),
        ([{"a": "text", "label": 0}], r"inputs\['a'\] is text"),
        ([{"a": 1, "label": 0, "labels": 0}], "both 'labels' and 'label'"),
        ([], "empty"),
    ],
)
def test_items_that_cannot_be_stacked_say_why(items, says):
    with pytest.raises((ValueError, TypeError), match=says):
        as_records(Rows(items))


def test_columns_of_every_kind():
    encoding = transformers.BatchEncoding({"input_ids": IDS, "labels": LABELS})
    for data in (encoding, {"input_ids": IDS.numpy(), "label": LABELS.numpy()}):
        records = as_records(data)
        assert type(records.inputs) is dict
        assert list(records.inputs) == ["input_ids"]
        assert torch.equal(records.targets, LABELS)
    assert as_records({"input_ids": IDS}).targets == ()
    for data in (TensorDataset(IDS, MASK, LABELS), (IDS, MASK, LABELS)):
        records = as_records(data)
        assert records.inputs[0] is IDS
        assert records.inputs[1] is MASK
        assert records.targets is LABELS
    pair = as_records(({"input_ids": IDS}, {"y": LABELS}))
    assert pair.targets["y"] is LABELS
    assert as_records(TensorDataset(IDS)).targets == ()


@pytest.mark.parametrize("data", [IDS, IDS.numpy(), "text", [IDS, MASK, LABELS], 3, None])
def test_other_data_is_refused(data):
    with pytest.raises(TypeError, match="cannot read records"):
        as_records(data)


def test_an_augmentation_changes_the_tree_as_a_whole():
    inputs = {"image": torch.randn(2, 1, 4, 4), "size": torch.tensor([4, 4])}

    def doubled(tree):
        return {**tree, "image": 2 * tree["image"]}

    views = tacit.data.Augmentation(3, doubled).views_of(inputs)
    assert views["image"].shape == (6, 1, 4, 4)
    assert torch.equal(views["image"][1], 2 * inputs["image"][0])
    assert views["size"].tolist() == [4] * 6
    with pytest.raises(ValueError, match="structure"):
        tacit.data.Augmentation(3, lambda tree: tree["image"]).views_of(inputs)
    with pytest.raises(ValueError, match="12 rows of 6"):
        tacit.data.Augmentation(3, lambda t: {k: torch.cat([v, v]) for k, v in t.items()}).views_of(
            inputs
        )
    with pytest.raises(ValueError, match="takes the tree"):
        tacit.data.Augmentation(3, tacit.RandomCropFlip(1)).views_of(inputs)


def test_crops_of_the_images_in_a_tree_follow_record_ids():
    class CropImages:
        takes_words = True

        def __call__(self, tree, words=None):
            return {**tree, "image": tacit.RandomCropFlip(1)(tree["image"], words=words)}

    image = torch.randn(5, 1, 4, 4)
    views = tacit.data.Augmentation(2, CropImages()).views_of({"image": image}, torch.arange(5))
    assert views["image"].shape == (10, 1, 4, 4)


def test_the_repr_shows_what_is_public():
    records = Records(IDS, LABELS, num_classes=2, public_size=9, name="mine")
    assert repr(records) == "Records('mine', shape=(3,), num_classes=2, public_size=9)"

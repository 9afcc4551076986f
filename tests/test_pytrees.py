"""Trees of tensors: every structure that models take and return."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from tacit.pytrees import (
    call_model,
    flat_rows,
    logits_of,
    map_tensors,
    named_leaves,
    num_rows,
    require_plain_tensors,
    take_rows,
    tensors_of,
    with_tensors,
)

transformers = pytest.importorskip("transformers")
from transformers.modeling_outputs import SequenceClassifierOutput  # noqa: E402

Pair = namedtuple("Pair", ["x", "mask"])


@dataclass(frozen=True)
class Scene:
    image: torch.Tensor
    depth: torch.Tensor | None = None


X, M = torch.arange(8.0).view(4, 2), torch.tensor([True, False, True, True])
TREES = [
    (X, M),
    [X, {"mask": M}],
    {"x": X, "mask": M},
    OrderedDict(x=X, mask=M),
    Pair(X, M),
    Scene(X, M),
    Scene(X),
    SequenceClassifierOutput(logits=X, hidden_states=(X, X)),
    transformers.BatchEncoding({"input_ids": X, "attention_mask": M}),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_every_structure_keeps_its_type_and_loses_rows_together(tree):
    some = take_rows(tree, torch.tensor([2, 0]))
    assert type(some) is type(tree)
    assert num_rows(some) == 2
    for a, b in zip(tensors_of(some), tensors_of(tree), strict=True):
        assert torch.equal(a, b[[2, 0]])
    again = with_tensors(tree, tensors_of(tree))
    assert [id(t) for t in tensors_of(again)] == [id(t) for t in tensors_of(tree)]
    assert [leaf for _, leaf in named_leaves(tree, "tree")] == tensors_of(tree)


def test_leaves_are_named_as_python_would():
    names = [name for name, _ in named_leaves({"a": [X, None, Scene(M)]}, "inputs")]
    assert names == ["inputs['a'][0]", "inputs['a'][2].image"]


def test_several_trees_meet_by_key_and_not_by_order():
    sums = map_tensors(lambda a, b: a + b, {"a": X, "b": M}, {"b": 1, "a": X})
    assert torch.equal(sums["a"], 2 * X)
    with pytest.raises(ValueError, match="a dict of 'a' does not have the structure"):
        map_tensors(torch.add, {"a": X, "b": M}, {"a": X})
    with pytest.raises(ValueError, match="structure"):
        map_tensors(torch.add, (X, M), X)


def test_lengths_that_differ_name_the_tensors():
    with pytest.raises(ValueError, match=r"inputs\['a'\] has shape \(4, 2\).*inputs\['b'\]"):
        num_rows({"a": X, "b": X[:3]}, "inputs")
    with pytest.raises(ValueError, match="holds no tensor"):
        num_rows({}, "inputs")
    with pytest.raises(ValueError, match=r"inputs\[1\] is a single number"):
        num_rows((X, torch.tensor(1.0)), "inputs")


def test_a_model_is_called_as_its_inputs_are_structured():
    def model(x, mask=None):
        return x, mask

    for inputs in ((X, M), [X, M], {"x": X, "mask": M}, Pair(X, M)):
        assert call_model(model, inputs)[1] is M
    assert call_model(model, X) == (X, None)
    assert call_model(lambda image, depth: depth, Scene(X)) is None


def test_the_tensor_for_a_loss():
    assert logits_of(X) is X
    assert logits_of({"logits": X, "hidden": M}) is X
    assert logits_of(SequenceClassifierOutput(logits=X, hidden_states=(M, M))) is X
    assert logits_of((X,)) is X
    assert logits_of((X, M)) is None


def test_flat_rows_hold_every_number():
    rows = flat_rows({"x": X, "mask": M})
    assert rows.shape == (4, 3)
    assert torch.equal(rows[:, 2], M.float())


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "to_padded_tensor"),
        (torch.eye(3).to_sparse(), "to_dense"),
        (pack_sequence([torch.ones(3), torch.ones(2)]), "pad_packed_sequence"),
    ],
    ids=["nested", "sparse", "packed"],
)
def test_tensors_whose_rows_are_not_records_are_refused(tensor, says):
    with pytest.raises(TypeError, match=says):
        require_plain_tensors({"a": [tensor]}, "inputs")

"""What has no public name in PyTorch, run on torch 2.9, 2.11 (CUDA), 2.13 and 2.14."""

import re
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tacit import torch_internals
from tacit.engines.plain_programs import plain_program
from tacit.engines.programs import saved
from tacit.torch_internals import Graph, SavedInBlocks, saves_through_hooks, tables_of

# Private modules and functions, tables of modules and hooks, and what nodes and operators hold.
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._[a-z]\w*|from torch\S* import .*\b_[a-z]|_foreach_|\"_saved_"
    r"|\b_(cdata|version|schema|parameters|buffers|non_persistent_buffers_set)\b"
    r"|\b_(global_)?(forward|backward)(_pre)?_hooks|\b_(conv_forward|apply_instance_norm)\b"
)


def test_no_other_file_uses_private_parts_of_pytorch():
    package = Path(torch_internals.__file__).parent
    lines = {
        file.name: [line for line in file.read_text("utf-8").splitlines() if PRIVATE.search(line)]
        for file in package.rglob("*.py")
    }
    assert len(lines.pop("torch_internals.py")) > 20
    assert not {name: found for name, found in lines.items() if found}


def test_tables_hold_what_a_module_has_itself():
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module.register_buffer("cache", torch.zeros(2), persistent=False)
    own = tables_of(module)
    assert (own.parameters, list(own.buffers), own.unsaved) == ({}, ["cache"], {"cache"})
    assert list(own.children.values()) == list(module)


def test_nodes_tell_their_names_shapes_and_saved_operands():
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    graph = Graph(layer(x).sum(1))
    (addmm,) = [node for node in graph.nodes if node.name() == "AddmmBackward0"]
    assert graph.shape(graph.index[addmm], 0) == (5, 2)
    assert torch.equal(saved(addmm, "mat1"), x)
    variables = [graph.variable(i) for i in range(len(graph.nodes))]
    assert {id(v) for v in variables if v is not None} == {id(p) for p in layer.parameters()}


def test_settings_come_back():
    compiling = torch.compiler.is_compiling()
    with plain_program():
        assert torch.compiler.is_compiling()
    assert torch.compiler.is_compiling() == compiling


def test_hooks_on_saved_tensors_are_seen_unless_they_are_compared_or_only_move():
    seen = []

    def block(x):
        seen.append(saves_through_hooks())
        return x.sin()

    block(torch.ones(2))
    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False)
    with SavedInBlocks(Tensor.sum, lambda _, again: again()):
        checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        block(torch.ones(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        block(torch.ones(2))
    assert seen == [False, True, False, False, True]


def test_what_a_checkpointed_block_gives_is_compared_with_what_it_saved():
    compared = []

    def read(saved, again):
        tensor = again()
        compared.append((saved, tensor.tolist()))
        return tensor

    x = torch.tensor([2.0], requires_grad=True)
    with SavedInBlocks(Tensor.tolist, read):
        y = checkpoint(torch.square, x, use_reentrant=False)
    y.backward()
    assert compared == [([2.0], [2.0])]
    assert x.grad == 4.0

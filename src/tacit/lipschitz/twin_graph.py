"""The forward of a foreign module as a graph that can be bounded."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from tacit.errors import Refused
from tacit.lipschitz.tracing import drop_unread, functional_graph, name_of, part_of

_ADD = (operator.add, torch.add, "add")
_SUBTRACT = (operator.sub, torch.sub, "sub")
_MULTIPLY = (operator.mul, torch.mul, "mul")
_DIVIDE = (operator.truediv, torch.div, "div")
_RESHAPE = (torch.reshape, "reshape", "view")

Convert = Callable[[str, nn.Module], nn.Module]


def graph_module(
    module: nn.Module, convert: Convert, note: Callable[[str], None]
) -> fx.GraphModule:
    """A module of the same parts, converted, whose forward is the traced graph, changed as follows.

    u + αv → (u + αv)/(1 + |α|), so that a sum is no longer than the longer of its terms and its
             Lipschitz constant is at most that of the steeper one. A plain residual block is
             (1 + L)-Lipschitz, and bounds would double with each block.
    γ·u, u + β with parameters γ, β of the module itself → u. Layer scale begins near 0, where the
             branch behind it would get no gradient and all of the noise; the average above does
             its work. Biases go, as those of layers do.
    u.reshape(len(u), −1) → flatten(1), which cannot reach across records.

    `convert(path, part)` gives the part that takes a part's place, and `note` takes what was
    changed, in words. What a bound cannot be given for is refused by name.
    """
    graph = functional_graph(module, defaults=True)
    parts: dict[str, nn.Module] = {}
    fixed: set[fx.Node] = set()  # made of parameters alone
    for node in list(graph.nodes):
        sources = node.all_input_nodes
        if node.op == "get_attr":
            fixed.add(node)
        elif node.op == "call_module":
            target = str(node.target)
            if len(sources) != 1 or sources[0] in fixed or node.args != (sources[0],):
                raise Refused(f"its forward gives {target!r} something other than one value")
            if target not in parts:
                parts[target] = convert(target, part_of(module, target))
            node.kwargs = {}
        elif node.op in ("call_function", "call_method") and sources:
            if all(source in fixed for source in sources):
                fixed.add(node)
            elif any(source in fixed for source in sources):
                _drop_parameters(module, node, fixed, note)
            elif node.target in _RESHAPE:
                _flatten(graph, node)
            elif node.target in (*_ADD, *_SUBTRACT) and len(sources) + _twice(node) == 2:
                _average(graph, node, note)
    drop_unread(graph, fixed)
    graph.lint()
    return fx.GraphModule(parts, graph, type(module).__name__)


def _twice(node: fx.Node) -> bool:
    """u + u, which has one source."""
    return len(node.args) == 2 and node.args[0] is node.args[1]


def _average(graph: fx.Graph, node: fx.Node, note: Callable[[str], None]) -> None:
    alpha = node.kwargs.get("alpha", 1)
    if not isinstance(alpha, int | float):
        raise Refused(f"its forward uses {name_of(node.target)} with alpha={alpha}")
    share = 1 / (1 + abs(alpha))
    with graph.inserting_after(node):
        scaled = graph.call_function(operator.mul, (node, share))
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    note(f"{node.name} → its average: sums would double the bounds each time")


def _drop_parameters(
    module: nn.Module, node: fx.Node, fixed: set[fx.Node], note: Callable[[str], None]
) -> None:
    values = [source for source in node.all_input_nodes if source not in fixed]
    names = sorted(_parameters_behind(module, node, fixed))
    first = node.args[0] if node.args else None
    known = (
        node.target in (*_ADD, *_MULTIPLY, torch.addcmul, "addcmul")
        or (node.target in (*_SUBTRACT, *_DIVIDE) and first is values[0])
    ) and len(values) == 1
    if not known:
        raise Refused(
            f"its forward uses the tensor {', '.join(map(repr, names))} in "
            f"{name_of(node.target)}, which has no bound; put it into a layer that answers for "
            "it, such as tacit.lipschitz.SpectralLinear or AddBias"
        )
    node.replace_all_uses_with(values[0])
    node.graph.erase_node(node)
    note(f"{', '.join(names)} goes: scales and biases of single channels cost noise")


def _parameters_behind(module: nn.Module, node: fx.Node, fixed: set[fx.Node]) -> set[str]:
    waiting, names = [n for n in node.all_input_nodes if n in fixed], set()
    while waiting:
        source = waiting.pop()
        waiting += source.all_input_nodes
        if source.op != "get_attr":
            continue
        holder, _, name = str(source.target).rpartition(".")
        owner = part_of(module, holder) if holder else module
        if name not in owner._parameters:
            raise Refused(
                f"its forward uses the tensor {source.target!r}, which is no parameter; put it "
                "into a layer that answers for it"
            )
        names.add(str(source.target))
    return names


def _flatten(graph: fx.Graph, node: fx.Node) -> None:
    """u.reshape(u.shape[0], −1) and the like; other shapes are refused when the graph is read."""
    source, *sizes = node.args
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = list(sizes[0])
    if len(sizes) != 2 or sizes[1] != -1 or not _is_batch_size(sizes[0]):
        return
    with graph.inserting_before(node):
        flat = graph.call_function(torch.flatten, (source, 1))
    node.replace_all_uses_with(flat)
    graph.erase_node(node)


def _is_batch_size(size: Any) -> bool:
    if not isinstance(size, fx.Node):
        return False
    if size.target == "size":
        return size.args[1:] == (0,)
    if size.target is not operator.getitem or size.args[1] != 0:
        return False
    shape = size.args[0]
    if not isinstance(shape, fx.Node):
        return False
    return shape.target == "size" or (shape.target is getattr and shape.args[1] == "shape")

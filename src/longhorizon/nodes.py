"""Reading and writing nodes of a traced graph: what the passes that put kernels into it share."""

from typing import Any

import torch
from torch import Tensor, fx

from longhorizon import kernels

aten = torch.ops.aten

Shape = tuple[int, ...]
TURN = [1, 0, 2, 3, 4]  # batch and columns change places


def called(graph: fx.GraphModule, target: Any, arguments: tuple[Any, ...], value: Tensor, **options: Any) -> fx.Node:
    """A new node, with what its result looks like."""
    node = graph.graph.call_function(target, arguments, options)
    node.meta["val"] = value
    return node


def kind_of(
    weight: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: Any,
    output_padding: Any,
    count: Any,
    *,
    groups: bool = False,
) -> int | None:
    """Which of kernels.KINDS it is; with or without groups."""
    shape = shape_of(weight)
    if len(shape) != 4 or shape[2] != shape[3] or transposed or (count > 1) != groups:
        return None
    if len({*stride}) != 1 or len({*padding}) != 1 or {*dilation} != {1}:
        return None
    kind = (shape[2], padding[0], stride[0])
    return kernels.KINDS.index(kind) if kind in kernels.KINDS else None


def unfolded(graph: fx.GraphModule, node: Any, shape: Shape) -> fx.Node:
    """Columns first, from a node with columns in its second axis: what was folded, where that is known."""
    before = node
    while before.target in (aten.reshape.default, aten.clone.default):  # neither changes the order of the numbers
        before = before.args[0]
    if before.target is aten.permute.default and list(before.args[1]) == TURN and shape_of(before) == shape:
        return before.args[0]  # type: ignore[no-any-return]
    apart = reshaped(graph, node, shape)
    return called(graph, aten.permute.default, (apart, TURN), value_of(apart).permute(TURN))


def reshaped(graph: fx.GraphModule, node: Any, shape: Shape) -> fx.Node:
    """The node in another shape; what it was made from, where that has it."""
    if shape_of(node) == tuple(shape):
        return node  # type: ignore[no-any-return]
    if node.target is aten.reshape.default and shape_of(node.args[0]) == tuple(shape):
        return node.args[0]  # type: ignore[no-any-return]
    view = graph.graph.call_function(aten.reshape.default, (node, list(shape)))
    view.meta["val"] = value_of(node).new_empty(shape)
    return view


def value_of(node: Any) -> Tensor:
    """What a node's result looks like."""
    return node.meta["val"]  # type: ignore[no-any-return]


def shape_of(node: Any) -> Shape:
    """Of a node's result."""
    return tuple(value_of(node).shape)

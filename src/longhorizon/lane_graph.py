"""Putting the bfloat16 kernels of lane_kernels.py and norm_kernels.py into the graph of training runs side by side.

`vmap` makes one grouped convolution of the runs' own ones. Each becomes an operation on images in bfloat16 with their
channels last (halves.py), and so does BatchNorm (norm_graph.py). A sum that ends in the result of one (a residual
connection, forward and back) becomes a part of it.
"""

from operator import getitem
from typing import Any

import torch
from torch import fx

from longhorizon import convolution, lane_kernels, norm_kernels
from longhorizon.halves import Halves, merge_ways_back, source_of
from longhorizon.kernels import KINDS
from longhorizon.nodes import TURN, called, kind_of, reshaped, shape_of, unfolded, value_of
from longhorizon.norm_graph import Norms

aten = torch.ops.aten


def use_lane_kernels(graph: fx.GraphModule) -> None:
    """Put them where they apply, in the graph of a plain training step of lanes."""
    convolve, weigh = lane_kernels.operations()
    halves = Halves(graph)
    norms = Norms(graph, halves)
    for node in list(graph.graph.nodes):
        if node.target is aten.convolution.default and node.args[8] > 1:
            _convolution(graph, node, convolve, halves)
        elif node.target is aten.convolution_backward.default and node.args[9] > 1:
            _backward(graph, node, convolve, weigh, halves)
        else:
            norms.put(node)
    graph.graph.eliminate_dead_code()  # of what a node may have been read by
    for node in list(graph.graph.nodes):
        if node.target is aten.add.Tensor:
            _add_within(graph, node, halves)
    merge_ways_back(graph)
    graph.graph.eliminate_dead_code()
    if any(value_of(n).is_cuda for n in graph.graph.nodes if n.target in _taken()):
        lane_kernels.prepare(graph.graph.nodes)
        norm_kernels.prepare(graph.graph.nodes)


def _taken() -> tuple[Any, ...]:
    """Operations that something else can be added to, their third argument."""
    return lane_kernels.operations()[0], norm_kernels.operations().unscaled


def _convolution(graph: fx.GraphModule, node: fx.Node, op: Any, halves: Halves) -> None:
    arguments: Any = node.args
    image, weight, bias, *how = arguments
    kind, lanes = kind_of(weight, *how, groups=True), how[5]
    if kind is None or bias is not None or not _suits(kind, node, image, weight, lanes):
        return
    batch, every = shape_of(node)[:2]
    with graph.graph.inserting_before(node):
        images = unfolded(graph, image, (batch, lanes, *shape_of(weight)[1:2], *shape_of(image)[2:]))
        weights = reshaped(graph, weight, (lanes, every // lanes, *shape_of(weight)[1:]))
    half = halves.of(images)
    with graph.graph.inserting_before(node):
        made = _made(graph, op, (half, weights, None, kind, False))
        _put(graph, node, halves.back(made))


def _backward(graph: fx.GraphModule, node: fx.Node, convolve: Any, weigh: Any, halves: Halves) -> None:
    arguments: Any = node.args
    (grad, image, weight), how, mask = arguments[:3], arguments[4:10], arguments[10]
    kind, lanes = kind_of(weight, *how, groups=True), how[5]
    readers = {user.args[1]: user for user in node.users if user.target is getitem}
    if kind is None or mask[2] or not _suits(kind, grad, image, weight, lanes):
        return
    (batch, every), channels = shape_of(grad)[:2], shape_of(weight)[1]
    if 0 in readers and channels < 16:
        return
    with graph.graph.inserting_before(node):
        grads = unfolded(graph, grad, (batch, lanes, every // lanes, *shape_of(grad)[2:]))
        images = unfolded(graph, image, (batch, lanes, channels, *shape_of(image)[2:]))
        weights = reshaped(graph, weight, (lanes, every // lanes, *shape_of(weight)[1:]))
    half_grads, half_images = halves.of(grads), halves.of(images)
    with graph.graph.inserting_before(node):
        if 0 in readers:
            made = _made(graph, convolve, (half_grads, weights, None, kind, True))
            _put(graph, readers[0], halves.back(made))
        if 1 in readers:
            made = _made(graph, weigh, (half_images, half_grads, kind, channels))
            readers[1].replace_all_uses_with(reshaped(graph, made, shape_of(weight)))


def _add_within(graph: fx.GraphModule, node: fx.Node, halves: Halves) -> None:
    """The result of a convolution, or a gradient, that only a sum reads: it and something else are made in one go."""
    if node.kwargs.get("alpha", 1) != 1 or not all(isinstance(x, fx.Node) for x in node.args[:2]):
        return
    arguments: Any = node.args
    first, second = arguments[:2]
    for mine, other in ((second, first), (first, second)):
        half = _source(mine)
        if half is None or half.args[2] is not None or mine is other:
            continue
        if not shape_of(mine) == shape_of(other) == shape_of(node) or value_of(other).dtype != torch.float32:
            continue
        added = halves.of(other)
        one, two, _, *how = half.args
        with graph.graph.inserting_before(node):
            made = called(graph, half.target, (one, two, added, *how), value_of(half))
            node.replace_all_uses_with(halves.back(made))
        return


def _source(node: Any) -> fx.Node | None:
    """The operation whose result a node shows in its own form, if nobody else reads either."""
    half = source_of(node)
    if half is None or half.target not in _taken():
        return None
    return half if len(node.users) == len(node.args[0].users) == len(half.users) == 1 else None


def _made(graph: fx.GraphModule, op: Any, arguments: tuple[Any, ...]) -> fx.Node:
    given: Any = [value_of(x) if isinstance(x, fx.Node) else x for x in arguments]
    return called(graph, op, arguments, lane_kernels.like(op, *given))


def _put(graph: fx.GraphModule, node: fx.Node, made: fx.Node) -> None:
    """In the place of a node with lanes in its channels; directly where these are taken out again."""
    lanes, batch, *rest = shape_of(made)
    for reader in list(node.users):
        if reader.target is aten.reshape.default and shape_of(reader) == (batch, lanes, *rest):
            for user in list(reader.users):
                if user.target is aten.permute.default and list(user.args[1]) == TURN:  # type: ignore[arg-type]
                    user.replace_all_uses_with(made)
    apart = called(graph, aten.permute.default, (made, TURN), value_of(made).permute(TURN))
    node.replace_all_uses_with(reshaped(graph, apart, shape_of(node)))


def _suits(kind: int, small: Any, large: Any, weight: Any, lanes: int) -> bool:
    """Whether the kernels take a convolution with a result like `small` of an image like `large`."""
    batch, every, *sides = shape_of(small)
    channels, outputs, stride = shape_of(weight)[1], every // lanes, KINDS[kind][2]
    return (
        value_of(small).dtype == torch.float32
        and len(sides) == 2
        and sides[0] == sides[1]
        and sides[0] in convolution.SIDES
        and sides[0] * stride in convolution.SIDES
        and [side * stride for side in sides] == list(shape_of(large)[2:])
        and channels in convolution.CHANNELS
        and outputs in convolution.OUTPUTS
        and (value_of(small).device.type != "cuda" or convolution.available())
        and lane_kernels.fits(
            lane_kernels.Size(lanes, batch, channels, outputs, sides[0], kind), value_of(small).device
        )
    )

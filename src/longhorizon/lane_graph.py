"""Putting the bfloat16 convolutions of lane_kernels.py into the graph of training runs side by side.

`vmap` makes one grouped convolution of the runs' own ones. Each becomes an operation on images in bfloat16 with their
channels last. What such an operation reads is kept in that form only: everybody else who reads it reads it from there.
A sum that ends in a convolution's result (a residual connection) becomes a part of the convolution.
"""

from operator import getitem
from typing import Any

import torch
from torch import fx

from longhorizon import convolution, lane_kernels
from longhorizon.kernels import KINDS
from longhorizon.nodes import TURN, called, kind_of, reshaped, shape_of, unfolded, value_of

aten = torch.ops.aten

_LAST, _BACK = [0, 1, 3, 4, 2], [0, 1, 4, 2, 3]  # channels, to the end and back


def use_lane_kernels(graph: fx.GraphModule) -> None:
    """Put them where they apply, in the graph of a plain training step of lanes."""
    convolve, weigh = lane_kernels.operations()
    halves = _Halves(graph)
    for node in list(graph.graph.nodes):
        if node.target is aten.convolution.default and node.args[8] > 1:
            _convolution(graph, node, convolve, halves)
        elif node.target is aten.convolution_backward.default and node.args[9] > 1:
            _backward(graph, node, convolve, weigh, halves)
    graph.graph.eliminate_dead_code()  # of what a node may have been read by
    for node in list(graph.graph.nodes):
        if node.target is aten.add.Tensor:
            _add_within(graph, node, convolve, halves)
    graph.graph.eliminate_dead_code()
    if any(value_of(n).is_cuda for n in graph.graph.nodes if n.target is convolve):
        lane_kernels.prepare(graph.graph.nodes)


class _Halves:
    """Which nodes there are in bfloat16, channels last."""

    def __init__(self, graph: fx.GraphModule):
        self.graph = graph
        self._of: dict[fx.Node, fx.Node] = {}

    def of(self, node: fx.Node) -> fx.Node:
        """(lanes, images, channels, side, side) in bfloat16 with channels last; others read what is kept of it."""
        if node in self._of:
            return self._of[node]
        x, readers = value_of(node), list(node.users)
        with self.graph.graph.inserting_before(_next(node)):
            last = called(self.graph, aten.permute.default, (node, _LAST), x.permute(_LAST))
            more = -x.shape[2] % 8
            if more:
                filled = value_of(last).new_empty(*value_of(last).shape[:-1], x.shape[2] + more)
                last = called(self.graph, aten.constant_pad_nd.default, (last, [0, more]), filled)
            half = value_of(last).to(torch.bfloat16)
            cast = called(self.graph, aten._to_copy.default, (last,), half, dtype=torch.bfloat16)
            how = {"memory_format": torch.contiguous_format}
            kept = called(self.graph, aten.clone.default, (cast,), half.contiguous(), **how)
            again = node if more or node.op == "placeholder" else self.back(kept)
        for reader in readers if again is not node else []:
            reader.replace_input_with(node, again)
        self._of[node] = kept
        return kept

    def back(self, half: fx.Node) -> fx.Node:
        """The same numbers for everybody else, where the graph is being written."""
        whole = called(self.graph, aten._to_copy.default, (half,), value_of(half).float(), dtype=torch.float32)
        turned = called(self.graph, aten.permute.default, (whole, _BACK), value_of(whole).permute(_BACK))
        self._of[turned] = half
        return turned


def _next(node: fx.Node) -> fx.Node:
    """The place behind a node; behind all arguments, if it is one."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


def _convolution(graph: fx.GraphModule, node: fx.Node, op: Any, halves: _Halves) -> None:
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


def _backward(graph: fx.GraphModule, node: fx.Node, convolve: Any, weigh: Any, halves: _Halves) -> None:
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


def _add_within(graph: fx.GraphModule, node: fx.Node, op: Any, halves: _Halves) -> None:
    """A convolution's result that only a sum reads: the sum of it and something else is made in one go."""
    if node.kwargs.get("alpha", 1) != 1 or not all(isinstance(x, fx.Node) for x in node.args[:2]):
        return
    arguments: Any = node.args
    first, second = arguments[:2]
    for mine, other in ((second, first), (first, second)):
        half = _source(mine, op)
        if half is None or half.args[2] is not None or mine is other:
            continue
        if not shape_of(mine) == shape_of(other) == shape_of(node) or value_of(other).dtype != torch.float32:
            continue
        added = halves.of(other)
        images, weights, _, *how = half.args
        with graph.graph.inserting_before(node):
            made = _made(graph, op, (images, weights, added, *how))
            node.replace_all_uses_with(halves.back(made))
        return


def _source(node: Any, op: Any) -> fx.Node | None:
    """The convolution that a node shows in its own form, if nobody else reads either."""
    whole = node.args[0] if node.target is aten.permute.default and list(node.args[1]) == _BACK else None
    if whole is None or whole.target is not aten._to_copy.default or len(node.users) > 1 or len(whole.users) > 1:
        return None
    half = whole.args[0]
    return half if half.target is op and len(half.users) == 1 else None


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

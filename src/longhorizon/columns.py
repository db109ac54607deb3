"""Recognising in a traced graph the convolutions that belong to columns, and giving them to kernels made for them.

`vmap` folds the columns of a tangent into the batch or into the channels of a convolution, whichever is possible, with
a copy where the memory lies the other way. Every such convolution is put back here to what it means: images of columns
with a shared weight, or a shared image with weights of columns. Sums of two of them, which is what a tangent is, become
one operation. A convolution without columns, as in an adjoint, is one with a single column.
"""

from operator import getitem
from typing import Any

import torch
from torch import fx

from longhorizon import convolution, kernels
from longhorizon.nodes import TURN, Shape, called, kind_of, reshaped, shape_of, unfolded, value_of

aten = torch.ops.aten


def use_column_kernels(graph: fx.GraphModule, tf32: bool, of_model: set[fx.Node]) -> None:
    """Put the operations of convolution.py where they apply.

    Args:
        of_model: the convolutions that the model wrote, in an adjoint also of a lone tangent. Which ReLUs are open
            depends on their last bits, so in float32 they are summed in float64.
    """
    convolve, spread, weigh, precise = convolution.operations()
    for node in list(graph.graph.nodes):
        if node.target is aten.convolution.default:
            if node.args[8] == 1:
                _convolution(graph, node, convolve, tf32)
            else:
                _grouped(graph, node, convolve, tf32)
        elif node.target is aten.convolution_backward.default:
            if node.args[9] == 1:
                _backward(graph, node, spread, weigh, tf32)
            else:
                _grouped_backward(graph, node, convolve, spread, weigh, tf32)
    for op in (convolve, spread, weigh):
        for node in list(graph.graph.nodes):
            if node.target is aten.add.Tensor:
                _join(graph, node, op)
    for node in list(graph.graph.nodes):
        if node.target is convolve and node.meta.get("was") in of_model:
            _make_precise(graph, node, None if tf32 else precise)
    graph.graph.eliminate_dead_code()
    if convolution.available():
        convolution.prepare(graph.graph.nodes)


def _convolution(graph: fx.GraphModule, node: fx.Node, op: Any, tf32: bool) -> None:
    """Image * weight."""
    image, weight, bias, *how = node.args
    kind = kind_of(weight, *how)
    if kind is None or bias is not None:
        return
    batch, outputs, *sides = shape_of(node)
    channels, *large = shape_of(image)[1:]
    with graph.graph.inserting_before(node):
        match _columns(node, batch, outputs):
            case "batch", folded, (columns, count):
                if _suits(kind, count, channels, outputs, sides, large, image):
                    images = reshaped(graph, image, (columns, count, *shape_of(image)[1:]))
                    _put(graph, folded, op, (images, weight, None, None, kind, tf32))
            case "channels", folded, (columns, each):
                if _suits(kind, batch, channels, each, sides, large, image):
                    weights = reshaped(graph, weight, (columns, each, *shape_of(weight)[1:]))
                    _put(graph, folded, op, (None, None, image, weights, kind, tf32))
            case _:
                if _suits(kind, batch, channels, outputs, sides, large, image):
                    images = reshaped(graph, image, (1, *shape_of(image)))
                    made = _single(graph, node, op, (images, weight, None, None, kind, tf32))
                    made.meta |= {"was": node, "args": node.args}


def _backward(graph: fx.GraphModule, node: fx.Node, spread: Any, weigh: Any, tf32: bool) -> None:
    """The gradients of a convolution's image and weight."""
    arguments: Any = node.args
    weight, how, mask = arguments[2], arguments[4:10], arguments[10]
    kind = kind_of(weight, *how)
    if kind is None or mask[2]:
        return
    made = [
        got
        for got in list(node.users)
        if got.target is getitem
        and (
            (got.args[1] == 0 and how[0][0] == 2 and _input_gradient(graph, node, got, spread, kind, tf32))
            or (got.args[1] == 1 and _weight_gradient(graph, node, got, weigh, kind, tf32))
        )
    ]
    left = {user.args[1] for user in node.users if user not in made}
    if left:
        node.update_arg(10, [place in left for place in range(3)])


def _input_gradient(graph: fx.GraphModule, node: fx.Node, got: fx.Node, op: Any, kind: int, tf32: bool) -> bool:
    """At stride two. Columns in the batch of the gradient, in the channels of the image, or nowhere."""
    arguments: Any = node.args
    grad, _, weight = arguments[:3]
    batch, channels, *large = shape_of(got)
    outputs, *sides = shape_of(grad)[1:]
    if outputs % 8:
        return False
    with graph.graph.inserting_before(node):
        match _columns(got, batch, channels):
            case "batch", folded, (columns, count):
                if not _suits(kind, count, outputs, channels, sides, large, grad):
                    return False
                grads = reshaped(graph, grad, (columns, count, *shape_of(grad)[1:]))
                _put(graph, folded, op, (grads, weight, None, None, kind, tf32))
            case "channels", folded, (columns, each):
                if not _suits(kind, batch, outputs, each, sides, large, grad):
                    return False
                weights = unfolded(graph, weight, (outputs, columns, each, *shape_of(weight)[2:]))
                _put(graph, folded, op, (None, None, grad, weights, kind, tf32))
            case _:
                if not _suits(kind, batch, outputs, channels, sides, large, grad):
                    return False
                _single(graph, got, op, (reshaped(graph, grad, (1, *shape_of(grad))), weight, None, None, kind, tf32))
    return True


def _weight_gradient(graph: fx.GraphModule, node: fx.Node, got: fx.Node, op: Any, kind: int, tf32: bool) -> bool:
    """Columns in the channels of the gradient, in those of the image, or nowhere."""
    arguments: Any = node.args
    grad, image = arguments[:2]
    batch, outputs, *sides = shape_of(grad)
    channels, *large = shape_of(image)[1:]
    with graph.graph.inserting_before(node):
        match _columns(got, outputs, channels):
            case "batch", folded, (columns, each):  # the first axis of a weight: outputs
                if not _suits(kind, batch, channels, each, sides, large, image):
                    return False
                grads = unfolded(graph, grad, (batch, columns, each, *sides))
                _put(graph, folded, op, (None, None, image, grads, kind, tf32))
            case "channels", folded, (columns, each):
                if not _suits(kind, batch, each, outputs, sides, large, image):
                    return False
                images = unfolded(graph, image, (batch, columns, each, *large))
                _put(graph, folded, op, (images, grad, None, None, kind, tf32))
            case _:
                if not _suits(kind, batch, channels, outputs, sides, large, image):
                    return False
                _single(graph, got, op, (reshaped(graph, image, (1, *shape_of(image))), grad, None, None, kind, tf32))
    return True


def _grouped(graph: fx.GraphModule, node: fx.Node, op: Any, tf32: bool) -> None:
    """Training runs side by side: every column has an image and a weight of its own, which vmap makes groups of."""
    arguments: Any = node.args
    image, weight, bias, *how = arguments
    kind, columns = kind_of(weight, *how, groups=True), how[5]
    if kind is None or bias is not None:
        return
    batch, every, *sides = shape_of(node)
    channels, outputs = shape_of(weight)[1], every // columns
    if not _suits(kind, batch, channels, outputs, sides, shape_of(image)[2:], image):
        return
    with graph.graph.inserting_before(node):
        images = unfolded(graph, image, (batch, columns, channels, *shape_of(image)[2:]))
        weights = reshaped(graph, weight, (columns, outputs, *shape_of(weight)[1:]))
        shape = (columns, batch, outputs, *sides)
        made = _made(graph, op, (images, weights, None, None, kind, tf32), shape, node)
        _put_grouped(graph, node, made)


def _grouped_backward(graph: fx.GraphModule, node: fx.Node, convolve: Any, spread: Any, weigh: Any, tf32: bool) -> None:
    arguments: Any = node.args
    (grad, image, weight), how, mask = arguments[:3], arguments[4:10], arguments[10]
    kind, columns = kind_of(weight, *how, groups=True), how[5]
    batch, every, *sides = shape_of(grad)
    channels, outputs, large = shape_of(weight)[1], every // columns, shape_of(image)[2:]
    readers = {user.args[1]: user for user in node.users if user.target is getitem}
    if kind is None or mask[2] or not _suits(kind, batch, channels, outputs, sides, large, image):
        return
    if 0 in readers and not _suits(kind, batch, outputs, channels, sides, large, image):
        return
    with graph.graph.inserting_before(node):
        grads = unfolded(graph, grad, (batch, columns, outputs, *sides))
        weights = reshaped(graph, weight, (columns, outputs, *shape_of(weight)[1:]))
        if 0 in readers:
            op = spread if how[0][0] == 2 else convolve
            if op is convolve:  # at stride one the gradient of the image is a convolution with the kernel turned round
                swapped = called(graph, aten.transpose.int, (weights, 1, 2), value_of(weights).transpose(1, 2))
                weights = called(graph, aten.flip.default, (swapped, [3, 4]), value_of(swapped))
            shape = (columns, batch, channels, *large)
            _put_grouped(graph, readers[0], _made(graph, op, (grads, weights, None, None, kind, tf32), shape, grad))
        if 1 in readers:
            images = unfolded(graph, image, (batch, columns, channels, *large))
            shape = (columns, outputs, *shape_of(weight)[1:])
            made = _made(graph, weigh, (images, grads, None, None, kind, tf32), shape, weight)
            readers[1].replace_all_uses_with(reshaped(graph, made, shape_of(weight)))


def _put_grouped(graph: fx.GraphModule, node: fx.Node, made: fx.Node) -> None:
    """In the place of a node with columns in its channels; directly where that is taken apart at once."""
    columns, batch, *rest = shape_of(made)
    apart = called(graph, aten.permute.default, (made, TURN), value_of(made).permute(TURN))
    for reader in list(node.users):
        if reader.target is aten.reshape.default and shape_of(reader) == (batch, columns, *rest):
            reader.replace_all_uses_with(apart)
    node.replace_all_uses_with(reshaped(graph, apart, shape_of(node)))


def _columns(node: fx.Node, first: int, second: int) -> Any:
    """Where a result has columns: ("batch" or "channels", the node that has put them first, (columns, rest))."""
    folded = _only_reader(node, aten.reshape.default)
    if folded is None or len(shape_of(folded)) != 5:
        return None
    a, b, c, *rest = shape_of(folded)
    if rest != list(shape_of(node)[2:]):
        return None
    if a * b == first and c == second:
        return "batch", folded, (a, b)
    turned = _only_reader(folded, aten.permute.default)
    if a == first and b * c == second and turned is not None and list(turned.args[1]) == TURN:  # type: ignore[arg-type]
        return "channels", turned, (b, c)
    return None


def _join(graph: fx.GraphModule, node: fx.Node, op: Any) -> None:
    """The sum of two products, read by nobody else, becomes one operation."""
    if node.kwargs.get("alpha", 1) != 1 or not all(isinstance(x, fx.Node) for x in node.args[:2]):
        return
    left, right = (_source(x, op) for x in node.args[:2])  # type: ignore[arg-type]
    if (
        left is None
        or right is None
        or left is right
        or shape_of(left) != shape_of(right)
        or left.args[4:] != right.args[4:]
    ):
        return
    first, second = list(left.args[:4]), list(right.args[:4])
    with graph.graph.inserting_before(node):
        if first[2] is None and second[2] is None and shape_of(left)[0] == 1:
            images, shared = second[:2]  # of a single column: its own image may as well be the shared one
            image = reshaped(graph, images, shape_of(images)[1:])
            second = [None, None, image, reshaped(graph, shared, (1, *shape_of(shared)))]
        if first[0] is None:
            first, second = second, first
        if first[2] is not None or second[0] is not None:
            return
        made = _made(graph, op, (*first[:2], *second[2:], *left.args[4:]), shape_of(left), left)
        node.replace_all_uses_with(reshaped(graph, made, shape_of(node)))


def _source(node: fx.Node, op: Any) -> fx.Node | None:
    """The operation that a node is, or is a view of, if nobody else reads it."""
    if node.target is aten.reshape.default and len(node.users) == 1:
        node = node.args[0]  # type: ignore[assignment]
    return node if node.target is op and len(node.users) == 1 else None


def _make_precise(graph: fx.GraphModule, node: fx.Node, op: Any) -> None:
    """A convolution of the model itself that stands alone; without an operation for it, what it was."""
    with graph.graph.inserting_before(node):
        if op is None:
            made = graph.graph.call_function(aten.convolution.default, node.meta["args"])
        else:
            made = graph.graph.call_function(op, (*node.meta["args"][:2], node.args[4]))
        made.meta["val"] = node.meta["was"].meta["val"]
        node.replace_all_uses_with(reshaped(graph, made, shape_of(node)))  # a single column


def _suits(kind: int, count: int, channels: int, outputs: int, small: Any, large: Any, like: Any) -> bool:
    """Whether the kernels take it. They know images whose sides are the smaller one's times the stride."""
    stride = kernels.KINDS[kind][2]
    return all(a == b * stride for a, b in zip(large, small, strict=True)) and convolution.suits(
        kind, count, channels, outputs, tuple(small), value_of(like)
    )


def _only_reader(node: fx.Node, target: Any) -> fx.Node | None:
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if user.target is target else None


def _put(graph: fx.GraphModule, node: fx.Node, op: Any, arguments: tuple[Any, ...]) -> None:
    """In the place of a node with columns. What it leaves over is dead code."""
    node.replace_all_uses_with(_made(graph, op, arguments, shape_of(node), node))


def _single(graph: fx.GraphModule, node: fx.Node, op: Any, arguments: tuple[Any, ...]) -> fx.Node:
    """In the place of a node without columns."""
    made = _made(graph, op, arguments, (1, *shape_of(node)), node)
    node.replace_all_uses_with(reshaped(graph, made, shape_of(node)))
    return made


def _made(graph: fx.GraphModule, op: Any, arguments: tuple[Any, ...], shape: Shape, like: fx.Node) -> fx.Node:
    made = graph.graph.call_function(op, arguments)
    made.meta["val"] = value_of(like).new_empty(shape)
    return made

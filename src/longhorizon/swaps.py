"""Faster kernels for some of a traced graph's convolutions.

Chosen by shape and not by a timing at run time, so that the same run gives the same bits.
"""

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from longhorizon import convolution, cuda
from longhorizon.columns import use_column_kernels
from longhorizon.lane_graph import use_lane_kernels

aten = torch.ops.aten

TURNS = {("cuda", torch.float32)}  # where a convolution is faster than the gradient of an input


def shape_of(node: Any) -> Any:
    """Shape, type and device of a node's result; None if it is not one tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else None


def swap_kernels(graph: fx.GraphModule) -> None:
    """Put faster ways in the place of slower ones. Results are the same to rounding."""
    if cuda.is_half():
        use_lane_kernels(graph)
    for node in list(graph.graph.nodes):
        if node.target is aten.convolution_backward.default:
            _swap_weight_gradient(node)
    of_model = {node for node in graph.graph.nodes if node.target is aten.convolution.default}
    for node in list(graph.graph.nodes):
        if node.target is aten.convolution_backward.default:
            _turn_input_gradient(graph, node)
    use_column_kernels(graph, torch.backends.cudnn.allow_tf32, of_model)


def _swap_weight_gradient(node: fx.Node) -> None:
    """Weight gradients of a convolution with one input channel, where oneDNN is 2 to 5 times slower than im2col.

    Measured for 16 to 180 output channels (columns × channels), 28 px, two cores.
    """
    _, image, weight, _, *_, transposed, _, groups, mask = node.args
    shape, dtype, device = shape_of(weight)
    if (
        (device.type, dtype, transposed, groups) == ("cpu", torch.float32, False, 1)
        and len(shape_of(image)[0]) == 4
        and list(mask) == [False, True, False]  # type: ignore[arg-type]
        and shape[0] >= 16
        and shape[1] == 1
    ):
        node.target = _weight_gradient


def _turn_input_gradient(graph: fx.GraphModule, node: fx.Node) -> None:
    """At stride one the gradient of the input is a convolution with the kernel turned round.

    On a GPU in float32 that is a quarter faster, and `column_convolution` can take it; in TF32 only for that.
    """
    arguments: Any = node.args
    grad, image, weight, _, *how, mask = arguments
    shape, dtype, device = shape_of(weight)
    users = [user for user in node.users if user.target is getitem and user.args[1] == 0]
    if not (mask[0] and users and (device.type, dtype) in TURNS and _keeps_size(weight, *how)):
        return
    if _tf32(device) and not (
        tuple(shape[2:]) == (3, 3) and shape[0] in convolution.CHANNELS and shape_of(grad)[0][-1] in convolution.SIDES
    ):
        return
    with graph.graph.inserting_before(node):
        swapped = graph.graph.call_function(aten.transpose.int, (weight, 0, 1))
        turned = graph.graph.call_function(aten.flip.default, (swapped, [2, 3]))
        turned.meta["val"] = weight.meta["val"].transpose(0, 1)
        found = graph.graph.call_function(aten.convolution.default, (grad, turned, None, *how))
        found.meta["val"] = image.meta["val"]
    for user in users:
        user.replace_all_uses_with(found)
        graph.graph.erase_node(user)
    if any(mask[1:]):
        node.update_arg(10, [False, *mask[1:]])
    else:
        graph.graph.erase_node(node)


def _keeps_size(
    weight: Any, stride: Any, padding: Any, dilation: Any, transposed: Any, output_padding: Any, groups: Any
) -> bool:
    """A plain convolution of images with stride one and an odd kernel in the middle of its margin."""
    shape = shape_of(weight)[0]
    return (
        len(shape) == 4
        and (transposed, groups) == (False, 1)
        and all(x == 1 for x in (*stride, *dilation))
        and all(side % 2 == 1 for side in shape[2:])
        and [side // 2 for side in shape[2:]] == list(padding) * (2 if len(padding) == 1 else 1)
    )


def _tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.backends.cudnn.allow_tf32


def _weight_gradient(grad: Tensor, image: Tensor, weight: Tensor, _: Any, *how: Any) -> tuple[None, Tensor, None]:
    """`convolution_backward` for the weight alone, with its arguments."""
    stride, padding, dilation = how[:3]
    patches = aten.im2col(image, weight.shape[2:], dilation, padding, stride)
    return None, (grad.flatten(2) @ patches.mT).sum(0).view(weight.shape), None

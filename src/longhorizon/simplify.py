"""Taking out of a traced graph what need not be computed.

- Tangents that are zero by construction (of the input data, say) are carried by torch as arrays of zeros, which are
  filled, convolved and added; they are taken out.
- So are operations that change nothing (copies to the same type, views of the same shape, factors of one), which are
  half of the list and most of the time of a small network's step.
- What is computed twice is computed once.
"""

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from longhorizon.swaps import shape_of, swap_kernels

aten = torch.ops.aten

_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten._efficientzerotensor.default}
_ZEROS |= {aten._new_zeros_with_same_feature_meta.default}
# Zero in the first argument makes zero out, of the same number of elements or not.
_CARRY = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.permute.default}
_CARRY |= {aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor}
_CARRY |= {aten.select.int, aten.alias.default, aten.clone.default, aten.neg.default, aten.sum.dim_IntList}
_CARRY |= {aten.threshold_backward.default, aten.max_pool2d_with_indices_backward.default, aten.gather.default}
_CARRY |= {aten._to_copy.default, aten.detach.default, aten.mean.dim, aten.div.Tensor}
# Zero in either of the first two makes zero out.
_PRODUCT = {aten.mul.Tensor, aten.mm.default, aten.bmm.default}
# Return their first argument if its shape, type and device are those of the result.
_COPIES = {aten.alias.default, aten.detach.default, aten._to_copy.default, aten.expand.default, aten.reshape.default}
_COPIES |= {aten.slice.Tensor, aten.lift_fresh_copy.default}


def simplify(graph: fx.GraphModule) -> None:
    """Take out of a traced graph what computes with zeros, changes nothing, is computed twice, or is never read.

    Results are the same to rounding. A graph that writes into its arguments is left as it is.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    if any(getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable for node in nodes):
        return
    for node in nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # what it looks at may have other strides afterwards
    _remove_zeros(graph)
    _remove_idle(graph)
    _merge_equal(graph)
    swap_kernels(graph)
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        node.meta.clear()
    graph.recompile()


def _remove_zeros(graph: fx.GraphModule) -> None:
    zero: set[fx.Node] = set()
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        target, inputs = node.target, list(node.args)
        is_zero = [isinstance(x, fx.Node) and x in zero for x in inputs]
        first = bool(is_zero) and is_zero[0]
        if (
            target in _ZEROS
            or (target in _CARRY and first)
            or (target in _PRODUCT and any(is_zero[:2]))
            or (target is aten.convolution.default and any(is_zero[:2]) and inputs[2] is None)
        ):
            zero.add(node)
        elif target is aten.convolution_backward.default:
            _narrow_convolution(node, is_zero)
        elif target is getitem and inputs[0].meta.get("zero_outputs", {}).get(inputs[1]):
            zero.add(node)
        elif target in (aten.add.Tensor, aten.sub.Tensor, aten.copy.default) and any(is_zero[:2]):
            if all(is_zero[:2]):
                zero.add(node)
                continue
            _keep_other(graph, node, is_zero)
    graph.graph.eliminate_dead_code()


def _narrow_convolution(node: fx.Node, is_zero: list[bool]) -> None:
    """Mark which of (input's, weight's, bias's) gradients vanish, and do not compute them."""
    grad_zero, input_zero, weight_zero = is_zero[:3]
    vanish = {0: grad_zero or weight_zero, 1: grad_zero or input_zero, 2: grad_zero}
    node.meta["zero_outputs"] = vanish
    mask = list(node.args[10])  # type: ignore[arg-type]
    read = {user.args[1] for user in node.users if user.target is getitem and user.users}
    kept = [bool(m) and i in read and not vanish[i] for i, m in enumerate(mask)]
    if any(kept):  # an all-False mask is refused by the kernel; dead-code removal takes that node anyway
        node.update_arg(10, kept)


def _keep_other(graph: fx.GraphModule, node: fx.Node, is_zero: list[bool]) -> None:
    """X + 0, x − 0, 0 + x and copy(0, x) are x, if that has the right shape already."""
    other = node.args[1] if is_zero[0] else node.args[0]
    if not isinstance(other, fx.Node) or shape_of(other) is None or shape_of(other) != shape_of(node):
        return
    if node.kwargs.get("alpha", 1) != 1 or (node.target is aten.copy.default and not is_zero[0]):
        return
    if node.target is aten.sub.Tensor and is_zero[0]:
        with graph.graph.inserting_before(node):
            other = graph.graph.call_function(aten.neg.default, (other,))
            other.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(other)


def _remove_idle(graph: fx.GraphModule) -> None:
    for node in list(graph.graph.nodes):
        same = _same_as(node) if node.op == "call_function" else None
        if isinstance(same, fx.Node) and shape_of(same) is not None and shape_of(same) == shape_of(node):
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)


def _same_as(node: fx.Node) -> Any:
    """The argument that a node returns unchanged, provided that shape and type agree; or None."""
    target, args = node.target, node.args
    if target in _COPIES:
        return args[0]
    if target is aten.permute.default:
        return args[0] if list(args[1]) == list(range(len(args[1]))) else None  # type: ignore[arg-type]
    if target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        return args[0] if isinstance(args[1], float | int) and args[1] == 1 else None
    if target is aten.where.self:
        return args[1] if args[1] is args[2] else None
    if target is aten.clone.default:
        value = args[0].meta.get("val")  # type: ignore[union-attr]
        return args[0] if isinstance(value, Tensor) and value.is_contiguous() else None
    return None


def _merge_equal(graph: fx.GraphModule) -> None:
    """Compute once what is computed twice; random operations excepted."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        twin = seen.setdefault(key, node)
        if twin is not node:
            node.replace_all_uses_with(twin)
            graph.graph.erase_node(node)


def _frozen(x: Any) -> Any:
    """Arguments of a node as something hashable; 1, 1.0 and True stay apart."""
    if isinstance(x, list | tuple):
        return tuple(_frozen(y) for y in x)
    if isinstance(x, dict):
        return tuple((k, _frozen(v)) for k, v in x.items())
    return x if isinstance(x, fx.Node) else (type(x), x)

"""Tracing a step to plain tensor operations.

`torch.func` transforms go through several layers of dispatch at every operation. `make_fx` sees through all of them
once and leaves a flat list of aten operations. That list is then cleaned: tangents that are zero by construction
(of the input data, say) are carried by torch as arrays of zeros, which are filled, convolved and added; here they
are taken out.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten

WORTH_TRACING = 25  # steps of one shape in a run that pay for tracing it, given several outer steps

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


class TraceMismatch(UserWarning):
    """A traced step could not be used; the plain one is used instead."""


def traced(fn: Callable[..., Any], cache: dict[Any, Any], key: Any, reseed: Callable[[], None]) -> Callable[..., Any]:
    """`fn` run as a flat list of tensor operations, traced once per shape and kept in `cache`.

    The first call of each shape compares the traced result with the plain one and goes back to the plain one for good,
    with a warning, if they differ or tracing fails.

    Args:
        reseed: puts the random generator where the step begins, so that tracing and comparing leave no mark.
    """

    def call(*args: Any) -> Any:
        flat, spec = pytree.tree_flatten(args)
        shapes = tuple((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in flat)
        try:
            full = (key, shapes, str(spec))
            known = full in cache
        except TypeError:  # a batch with something unhashable in it
            return fn(*args)
        if not known:
            cache[full] = _trace(fn, args, reseed)
            reseed()
        graph = cache[full]
        return fn(*args) if graph is None else graph(*args)

    return call


def _trace(fn: Callable[..., Any], args: tuple[Any, ...], reseed: Callable[[], None]) -> Callable[..., Any] | None:
    """The traced function, or None with a warning."""
    expected = fn(*args)
    try:
        reseed()
        graph = make_fx(torch.func.functionalize(fn))(*args)
        remove_zeros(graph, args, reseed)
        reseed()
        got = graph(*args)
        difference = _difference(expected, got)
    except Exception as error:  # tracing may fail in any way a user's model can invent
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        warnings.warn(f"the step could not be traced and runs as it is ({reason})", TraceMismatch, stacklevel=4)
        return None
    if difference is not None:
        warnings.warn(
            f"the traced step differs from the plain one ({difference}); the plain one is used",
            TraceMismatch,
            stacklevel=4,
        )
        return None
    return graph


def _difference(expected: Any, got: Any) -> str | None:
    """What differs by more than rounding, in words."""
    for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True):
        if not isinstance(a, Tensor):
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{tuple(a.shape)} {a.dtype} became {tuple(b.shape)} {b.dtype}"
        if a.is_floating_point():
            tolerance = 1e-4 if a.dtype == torch.float32 else 1e-10
            scale = a.abs().max() if a.numel() else a.new_zeros(())
            if not torch.allclose(a, b, rtol=0, atol=float(tolerance * scale + 1e-30), equal_nan=True):
                return f"by {float((a - b).abs().max()):.1e} of {float(scale):.1e}"
        elif not torch.equal(a, b):
            return "in a whole number"
    return None


def remove_zeros(graph: fx.GraphModule, args: tuple[Any, ...], reseed: Callable[[], None]) -> None:
    """Take out of a traced graph what only computes with arrays of zeros, and what nothing reads."""
    reseed()
    shapes = _Shapes(graph)
    shapes.run(*pytree.tree_leaves(args))
    zero: set[fx.Node] = set()
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # what it looks at may have other strides once a sum with zeros is gone
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
        elif getattr(target, "__name__", "") == "getitem" and inputs[0].meta.get("zero_outputs", {}).get(inputs[1]):
            zero.add(node)
        elif target in (aten.add.Tensor, aten.sub.Tensor, aten.copy.default) and any(is_zero[:2]):
            if all(is_zero[:2]):
                zero.add(node)
                continue
            _keep_other(graph, node, is_zero, shapes.of)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _narrow_convolution(node: fx.Node, is_zero: list[bool]) -> None:
    """Mark which of (input's, weight's, bias's) gradients vanish, and do not compute them."""
    grad_zero, input_zero, weight_zero = is_zero[:3]
    vanish = {0: grad_zero or weight_zero, 1: grad_zero or input_zero, 2: grad_zero}
    node.meta["zero_outputs"] = vanish
    mask = list(node.args[10])  # type: ignore[arg-type]
    read = {user.args[1] for user in node.users if getattr(user.target, "__name__", "") == "getitem" and user.users}
    kept = [bool(m) and i in read and not vanish[i] for i, m in enumerate(mask)]
    if any(kept):  # an all-False mask is refused by the kernel; dead-code removal takes that node anyway
        node.update_arg(10, kept)


def _keep_other(graph: fx.GraphModule, node: fx.Node, is_zero: list[bool], shape_of: dict[fx.Node, Any]) -> None:
    """X + 0, x − 0, 0 + x and copy(0, x) are x, if that has the right shape already."""
    other = node.args[1] if is_zero[0] else node.args[0]
    if not isinstance(other, fx.Node) or shape_of.get(other) != shape_of.get(node):
        return
    if node.kwargs.get("alpha", 1) != 1 or (node.target is aten.copy.default and not is_zero[0]):
        return
    if node.target is aten.sub.Tensor and is_zero[0]:
        with graph.graph.inserting_before(node):
            other = graph.graph.call_function(aten.neg.default, (other,))
            shape_of[other] = shape_of[node]
    node.replace_all_uses_with(other)


class _Shapes(fx.Interpreter):
    """One run of the graph that notes every tensor's shape and type."""

    def __init__(self, graph: fx.GraphModule):
        super().__init__(graph)
        self.of: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.of[n] = (result.shape, result.dtype)
        return result

"""Tracing a step to plain tensor operations.

`torch.func` transforms go through several layers of dispatch at every operation. `make_fx` sees through all of them
once and leaves a flat list of aten operations. That list is then simplified:

- tangents that are zero by construction (of the input data, say) are carried by torch as arrays of zeros, which are
  filled, convolved and added; they are taken out;
- so are operations that change nothing (copies to the same type, views of the same shape, factors of one), which are
  half of the list and most of the time of a small network's step;
- what is computed twice is computed once;
- and on the CPU, tangents of a first convolution's weights take the kernel that is fast for one input channel.
"""

import warnings
from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from longhorizon import cuda

aten = torch.ops.aten

WORTH_COMPILING = 500  # steps of a run on a GPU that pay for a minute of compiling, given several outer steps
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
# Return their first argument if its shape, type and device are those of the result.
_COPIES = {aten.alias.default, aten.detach.default, aten._to_copy.default, aten.expand.default, aten.reshape.default}
_COPIES |= {aten.slice.Tensor, aten.lift_fresh_copy.default}


class TraceMismatch(UserWarning):
    """A traced step could not be used; the plain one is used instead."""


def traced(
    fn: Callable[..., Any],
    cache: dict[Any, Any],
    key: Any,
    reseed: Callable[[], None],
    plain: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """`fn` run as a flat list of tensor operations, traced once per shape and kept in `cache`.

    The first call of each shape compares the traced result with the plain one and goes back to the plain one for good,
    with a warning, if they differ or tracing fails.

    Args:
        reseed: puts the random generator where the step begins, so that tracing and comparing leave no mark.
        plain: what to compare with and to go back to, if not `fn` itself.
    """
    plain = plain or fn

    def call(*args: Any) -> Any:
        flat, spec = pytree.tree_flatten(args)
        shapes = tuple((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in flat)
        try:
            full = (key, shapes, str(spec))
            known = full in cache
        except TypeError:  # a batch with something unhashable in it
            return plain(*args)
        if not known:
            cache[full] = _trace(fn, args, reseed, plain)
            reseed()
        graph = cache[full]
        return plain(*args) if graph is None else graph(*args)

    return call


def _trace(
    fn: Callable[..., Any], args: tuple[Any, ...], reseed: Callable[[], None], plain: Callable[..., Any]
) -> Callable[..., Any] | None:
    """The traced function, or None with a warning."""
    expected = plain(*args)
    try:
        reseed()
        flat = _Flat(fn, args)
        tensors = flat.tensors(args)
        # make_fx notes every result's shape as a tensor of a mode without data. It would make one mode, with a stack
        # trace, per operation, which is half of the tracing time; the context offers it one for all.
        with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
            graph = make_fx(torch.func.functionalize(flat))(*tensors)
        simplify(graph)
        made = flat.around(cuda.compiled(graph, tensors, reseed) if any(t.is_cuda for t in tensors) else graph)
        reseed()
        difference = _difference(expected, made(*args))
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
    return made


class _Flat:
    """A function of trees as a function of tensors. What is no tensor, in or out, is fixed."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]):
        leaves, self._spec = pytree.tree_flatten(args)
        self._fn = fn
        self._fixed = [None if isinstance(x, Tensor) else x for x in leaves]
        self._places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def tensors(self, args: tuple[Any, ...]) -> list[Tensor]:
        leaves = pytree.tree_leaves(args)
        return [leaves[i] for i in self._places]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        leaves = list(self._fixed)
        for i, tensor in zip(self._places, tensors, strict=True):
            leaves[i] = tensor
        out, self._out_spec = pytree.tree_flatten(self._fn(*pytree.tree_unflatten(leaves, self._spec)))
        self._out_fixed = [None if isinstance(x, Tensor) else x for x in out]
        self._out_places = [i for i, x in enumerate(out) if isinstance(x, Tensor)]
        return [out[i] for i in self._out_places]

    def around(self, made: Callable[..., Any]) -> Callable[..., Any]:
        """The function of trees again, from what its trace became."""

        def call(*args: Any) -> Any:
            out = list(self._out_fixed)
            for i, tensor in zip(self._out_places, made(*self.tensors(args)), strict=True):
                out[i] = tensor
            return pytree.tree_unflatten(out, self._out_spec)

        return call


def _difference(expected: Any, got: Any) -> str | None:
    """What differs by more than rounding, in words.

    Exact kernels in another order round differently, most where large numbers cancel. So the whole is held to a
    tight tolerance and each part, against its own size, to one that a missing or a wrong tangent cannot meet.
    """
    pairs = list(zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True))
    pairs = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
    for a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{tuple(a.shape)} {a.dtype} became {tuple(b.shape)} {b.dtype}"
        if not a.is_floating_point() and not torch.equal(a, b):
            return "in a whole number"
    real = [(a.double(), b.double()) for a, b in pairs if a.is_floating_point() and a.numel()]
    if any(not torch.equal(a.isfinite(), b.isfinite()) for a, b in real):
        return "in what is finite"
    real = [(torch.where(a.isfinite(), a, 0.0), torch.where(b.isfinite(), b, 0.0)) for a, b in real]
    whole = sum(float(a.square().sum()) for a, _ in real) ** 0.5
    off = sum(float((a - b).square().sum()) for a, b in real) ** 0.5
    tolerance = _tolerance(pairs)
    if off > tolerance * whole:
        return f"by {off:.1e} of {whole:.1e}"
    for a, b in real:
        size, error = float(a.norm()), float((a - b).norm())
        if error > 100 * tolerance * size + tolerance * 1e-3 * whole:
            return f"by {error:.1e} of {size:.1e} in one part"
    return None


def _tolerance(pairs: list[tuple[Tensor, Tensor]]) -> float:
    leaf = next((a for a, _ in pairs if a.is_floating_point()), None)
    if leaf is None or leaf.dtype == torch.float64:
        return 1e-10
    if leaf.is_cuda and torch.backends.cudnn.allow_tf32:
        return 5e-2
    return 2e-3 if leaf.is_cuda else 1e-4


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
    _swap_kernels(graph)
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        node.meta.clear()
    graph.recompile()


def _shape(node: Any) -> Any:
    """Shape, type and device of a node's result; None if it is not one tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else None


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
    if not isinstance(other, fx.Node) or _shape(other) is None or _shape(other) != _shape(node):
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
        if isinstance(same, fx.Node) and _shape(same) is not None and _shape(same) == _shape(node):
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


def _swap_kernels(graph: fx.GraphModule) -> None:
    """Weight gradients of a convolution with one input channel, where oneDNN is 2 to 5 times slower than im2col.

    Measured for 16 to 180 output channels (columns × channels), 28 px, two cores. By shape and not by a timing at run
    time, so that the same run gives the same bits.
    """
    for node in graph.graph.nodes:
        if node.target is not aten.convolution_backward.default:
            continue
        _, image, weight, _, *_, transposed, _, groups, mask = node.args
        shape, dtype, device = _shape(weight)
        if (
            (device.type, dtype, transposed, groups) == ("cpu", torch.float32, False, 1)
            and len(_shape(image)[0]) == 4
            and list(mask) == [False, True, False]
            and shape[0] >= 16
            and shape[1] == 1
        ):
            node.target = _weight_gradient


def _weight_gradient(grad: Tensor, image: Tensor, weight: Tensor, _: Any, *how: Any) -> tuple[None, Tensor, None]:
    """`convolution_backward` for the weight alone, with its arguments."""
    stride, padding, dilation = how[:3]
    patches = aten.im2col(image, weight.shape[2:], dilation, padding, stride)
    return None, (grad.flatten(2) @ patches.mT).sum(0).view(weight.shape), None


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

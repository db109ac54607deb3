"""Tracing a step to plain tensor operations.

`torch.func` transforms go through several layers of dispatch at every operation. `make_fx` sees through all of them
once and leaves a flat list of aten operations, which is simplified (simplify.py), given faster kernels where there are
some (swaps.py), and on a GPU compiled (cuda.py).
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from longhorizon import cuda, tree
from longhorizon.simplify import simplify

WORTH_COMPILING = 500  # steps on a GPU that pay for a minute of compiling: WRN-16-1 gains 0.16 s by each
CONSTANTS = 4  # traces that differ in nothing but a constant, before no more are made
WORTH_TRACING = 25  # steps of one shape in a run that pay for tracing it, given several outer steps
_PART = 0.7  # of a part of a step in bfloat16 that may be off: a gradient of a few images is by 0.4, a missing one by 1


class TraceMismatch(UserWarning):
    """A traced step could not be used; the plain one is used instead."""


def traced(
    fn: Callable[..., Any],
    cache: dict[Any, Any],
    key: Any,
    reseed: Callable[[], None],
    plain: Callable[..., Any] | None = None,
    compared: set[Any] | None = None,
    probe: Callable[..., tuple[Any, ...]] | None = None,
) -> Callable[..., Any]:
    """`fn` run as a flat list of tensor operations, traced once per shape and kept in `cache`.

    The first call of each shape compares the traced result with the plain one and goes back to the plain one for good,
    with a warning, if they differ or tracing fails. So does a step whose batches bring another plain number each time.

    Args:
        reseed: puts the random generator where the step begins, so that tracing and comparing leave no mark.
        plain: what to compare with and to go back to, if not `fn` itself.
        compared: what this run has compared; with it, a trace of an earlier run is compared once more.
        probe: from the arguments those to compare at, where the first ones hide something (zeros, say).
    """
    plain, probe = plain or fn, probe or (lambda *args: args)

    def call(*args: Any) -> Any:
        flat, form = leaves_and_form(args)
        full = (key, form, cuda.current_precision())
        try:
            known = full in cache
        except TypeError:  # a batch with something unhashable in it
            return plain(*args)
        if not known:
            if _never_the_same(cache, full):
                return plain(*args)
            cache[full] = _trace(fn, args, reseed, plain, probe(*args))
            if any(isinstance(x, Tensor) and x.is_cuda for x in flat):
                cuda.tidy()
            reseed()
        elif compared is not None and full not in compared and cache[full] is not None:
            at = probe(*args)
            cache[full] = _checked(cache[full], plain, plain(*at), at, reseed)
            reseed()
        if compared is not None:
            compared.add(full)
        graph = cache[full]
        return plain(*args) if graph is None else graph(flat)

    return call


def leaves_and_form(tree: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """The leaves in pytree's order, and what a trace depends on: the containers, shapes, and leaves without a shape.

    Every step asks for it. pytree builds an object per node, which takes longer than launching a small network's step;
    it is left to containers of other kinds.
    """
    leaves: list[Any] = []
    form: list[Any] = []
    if _walk(tree, leaves, form):
        return leaves, tuple(form)
    leaves, spec = pytree.tree_flatten(tree)
    return leaves, (str(spec), *(part for leaf in leaves for part in _form(leaf)))


def _walk(node: Any, leaves: list[Any], form: list[Any]) -> bool:
    """Add a node; whether it is made of the usual containers only."""
    kind = type(node)
    if kind is dict:
        form.append(tuple(node))
        return all([_walk(child, leaves, form) for child in node.values()])
    if kind is tuple or kind is list or (isinstance(node, tuple) and hasattr(kind, "_fields")):
        form += (kind, len(node))
        return all([_walk(child, leaves, form) for child in node])
    leaves.append(node)
    form += _form(node)
    return kind not in pytree.SUPPORTED_NODES


def _form(leaf: Any) -> tuple[Any, ...]:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (_Constant(type(leaf), leaf),)


class _Constant(NamedTuple):
    """What is no tensor: a trace has its value in it."""

    kind: type
    value: Any


def _never_the_same(cache: dict[Any, Any], full: tuple[Any, ...]) -> bool:
    """Whether steps differ in their constants again and again, and every one would be traced; said once."""

    def loose(key: tuple[Any, ...]) -> tuple[Any, ...]:
        return key[0], tuple(p._replace(value=None) if isinstance(p, _Constant) else p for p in key[1]), key[2]

    marker = loose(full)
    if marker == full:
        return False
    if marker not in cache and sum(loose(key) == marker for key in cache) >= CONSTANTS:
        now = next(p for p in full[1] if isinstance(p, _Constant) and p.value is not None)
        cache[marker] = None
        warnings.warn(
            f"the step is not traced any more: batches bring plain values that change ({now.value!r} now), and each "
            "would have a trace of its own. Make them tensors, or leave them out.",
            TraceMismatch,
            stacklevel=4,
        )
    return marker in cache


def _trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    reseed: Callable[[], None],
    plain: Callable[..., Any],
    at: tuple[Any, ...],
) -> Callable[[list[Any]], Any] | None:
    """The traced function, of the leaves of its arguments; or None with a warning."""
    if any(isinstance(x, Tensor) and x.is_cuda for x in pytree.tree_leaves(args)):
        cuda.get_ready()
    expected = plain(*at)
    try:
        reseed()
        flat = _Flat(fn, args)
        leaves = pytree.tree_leaves(args)
        tensors = flat.tensors(leaves)
        # make_fx notes every result's shape as a tensor of a mode without data. It would make one mode, with a stack
        # trace, per operation, which is half of the tracing time; the context offers it one for all.
        with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
            graph = make_fx(torch.func.functionalize(flat))(*_apart(tensors))
        if (operation := _sized_by_data(graph, tensors)) is not None:
            raise ValueError(f"the size of a result of {operation} depends on the data")
        simplify(graph)
        made = flat.around(cuda.compiled(graph, tensors, reseed) if any(t.is_cuda for t in tensors) else graph)
    except Exception as error:  # tracing may fail in any way a user's model can invent
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        warnings.warn(f"the step could not be traced and runs as it is ({reason})", TraceMismatch, stacklevel=4)
        return None
    return _checked(made, plain, expected, at, reseed)


def _checked(
    made: Callable[[list[Any]], Any],
    plain: Callable[..., Any],
    expected: Any,
    at: tuple[Any, ...],
    reseed: Callable[[], None],
) -> Callable[[list[Any]], Any] | None:
    """What was made of a step, if it gives what is expected; else None with a warning."""
    reseed()
    try:
        got = made(pytree.tree_leaves(at))
        differs = difference(expected, got)
        if differs is not None:  # in a deep network rounding may do that, too: it shows in the plain step as well
            reseed()
            differs = difference(expected, got, plain(*_rounded(at)))
    except Exception as error:
        differs = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if differs is not None:
        warnings.warn(
            f"the traced step differs from the plain one ({differs}); the plain one is used",
            TraceMismatch,
            stacklevel=4,
        )
        return None
    return made


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """Inputs that are different objects: a trace takes those that are one, on its first call, for one ever after."""
    seen: set[int] = set()
    return [t.clone() if id(t) in seen or seen.add(id(t)) else t for t in tensors]  # type: ignore[func-returns-value]


def _sized_by_data(graph: fx.GraphModule, tensors: list[Tensor]) -> str | None:
    """An operation whose result has as many entries as the data say: a trace would fix those of the first batch."""
    given = dict(zip((n for n in graph.graph.nodes if n.op == "placeholder"), tensors, strict=True))
    for node in graph.graph.nodes:
        if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
            continue
        parts = pytree.tree_leaves(node.args[1:])
        kinds = [given[p].dtype if p in given else p.meta["val"].dtype for p in parts if isinstance(p, fx.Node)]
        masks = torch.bool in kinds or torch.uint8 in kinds
        if node.target is not torch.ops.aten.index.Tensor or masks:  # by numbers, an index has the size of those
            return str(node.target)
    return None


class _Flat:
    """A function of trees as a function of tensors. What is no tensor, in or out, is fixed."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]):
        leaves, self._spec = pytree.tree_flatten(args)
        self._fn = fn
        self._fixed = [None if isinstance(x, Tensor) else x for x in leaves]
        self._places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def tensors(self, leaves: list[Any]) -> list[Tensor]:
        return [leaves[i] for i in self._places]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        leaves = list(self._fixed)
        for i, tensor in zip(self._places, tensors, strict=True):
            leaves[i] = tensor
        out, self._out_spec = pytree.tree_flatten(self._fn(*pytree.tree_unflatten(leaves, self._spec)))
        self._out_fixed = [None if isinstance(x, Tensor) else x for x in out]
        self._out_places = [i for i, x in enumerate(out) if isinstance(x, Tensor)]
        return [out[i] for i in self._out_places]

    def around(self, made: Callable[..., Any]) -> Callable[[list[Any]], Any]:
        """From what its trace became, a function of the leaves of trees to a tree."""

        def call(leaves: list[Any]) -> Any:
            out = list(self._out_fixed)
            for i, tensor in zip(self._out_places, made(*self.tensors(leaves)), strict=True):
                out[i] = tensor
            return pytree.tree_unflatten(out, self._out_spec)

        return call


def difference(expected: Any, got: Any, nudged: Any = None) -> str | None:
    """What differs by more than rounding, in words.

    Exact kernels in another order round differently, most where large numbers cancel. So the whole is held to a
    tight tolerance and each part, against its own size, to one that a missing or a wrong tangent cannot meet.

    Args:
        nudged: what is expected of arguments that differ by rounding; ten times that much is allowed besides, but no
            more than a fifth of what it is.
    """
    pairs = list(zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True))
    pairs = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
    for a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{tuple(a.shape)} {a.dtype} became {tuple(b.shape)} {b.dtype}"
        if not a.is_floating_point() and not torch.equal(a, b):
            return "in a whole number"
    real = [(a.double(), b.double()) for a, b in pairs if a.is_floating_point() and a.numel()]
    noise = [0.0] * len(real)
    if nudged is not None:
        others = [c for c in pytree.tree_leaves(nudged) if isinstance(c, Tensor)]
        others = [c for c in others if c.is_floating_point() and c.numel()]
        noise = [_slack(a, c) for (a, _), c in zip(real, others, strict=True)]
    if any(not torch.equal(a.isfinite(), b.isfinite()) for a, b in real):
        return "in what is finite"
    real = [(torch.where(a.isfinite(), a, 0.0), torch.where(b.isfinite(), b, 0.0)) for a, b in real]
    whole = sum(float(a.square().sum()) for a, _ in real) ** 0.5
    off = sum(float((a - b).square().sum()) for a, b in real) ** 0.5
    tolerance = _tolerance(pairs)
    share = _PART if cuda.is_half() else 100 * tolerance
    if off > tolerance * whole + math.hypot(*noise):
        return f"by {off:.1e} of {whole:.1e}"
    for (a, b), extra in zip(real, noise, strict=True):
        size, error = float(a.norm()), float((a - b).norm())
        if error > share * size + tolerance * 1e-3 * whole + extra:
            return f"by {error:.1e} of {size:.1e} in one part"
    return None


def _slack(a: Tensor, nudged: Tensor) -> float:
    finite = a.isfinite() & nudged.isfinite()
    return min(10 * float((a - nudged)[finite].norm()), 0.2 * float(a[finite].norm()))


def _rounded(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments, each number off by a few units in its last place."""
    coarse = cuda.is_half() or (torch.backends.cudnn.allow_tf32 and torch.cuda.is_available())

    def nudge(x: Tensor, by: Tensor) -> Tensor:
        return x * (1 + (2**-11 if coarse else 4 * torch.finfo(x.dtype).eps) * by.clamp(-2, 2))

    (real, rebuild), moves = tree.split(args), tree.split(tree.random(args))[0]
    moved: tuple[Any, ...] = rebuild([nudge(x, by) for x, by in zip(real, moves, strict=True)])
    return moved


def _tolerance(pairs: list[tuple[Tensor, Tensor]]) -> float:
    leaf = next((a for a, _ in pairs if a.is_floating_point()), None)
    if leaf is None or leaf.dtype == torch.float64:
        return 1e-10
    if cuda.is_half() or (leaf.is_cuda and torch.backends.cudnn.allow_tf32):
        return 5e-2
    return 2e-3 if leaf.is_cuda else 1e-4

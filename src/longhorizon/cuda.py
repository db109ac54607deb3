"""The fastest form of a traced step on a GPU: compiled by inductor, then recorded as one CUDA graph.

Compiling takes about a minute per shape and is cached on disk by torch, so a second run of the same model starts in
seconds. The graph removes what launching thousands of kernels costs, which for a plain training step is half of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

Precision = Literal["float32", "tf32"]


@contextmanager
def precision(kind: Precision = "float32") -> Iterator[None]:
    """How float32 products are computed on a GPU while the context lasts.

    torch lets convolutions use TF32, with 10 bits of mantissa, by default. Derivatives through many steps amplify that:
    measured on WRN-16-1, a Hessian product is off by 2e-3 to 5e-2 in TF32 and by 5e-5 to 4e-4 in float32.
    """
    if kind not in ("float32", "tf32"):
        raise ValueError(f"precision={kind!r}: expected 'float32' or 'tf32' (or a model in float64).")
    if not torch.cuda.is_available():
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = kind == "tf32"
    torch.backends.cudnn.benchmark = True  # its own guess is up to 15 times slower for few channels
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before[:2]
        torch.backends.cudnn.benchmark = before[2]


def compiled(graph: fx.GraphModule, args: tuple[Any, ...], reseed: Callable[[], None]) -> Callable[..., Any]:
    """A traced function compiled for the GPU that its arguments are on, for arguments of these shapes."""
    # A user's process may have compiled much else; each of our graphs is one function with one shape.
    fast: Callable[..., Any] = torch.compile(graph, fullgraph=True, dynamic=False)
    with torch.no_grad():
        reseed()
        fast(*args)
        if _is_random(graph):
            return fast  # a recorded graph would draw the same numbers again
        return Recorded(fast, args)


class Recorded:
    """A function as a CUDA graph: arguments are copied into fixed places, results out of them."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]):
        flat, self._spec = pytree.tree_flatten(args)
        self._static = [x.clone() if isinstance(x, Tensor) else x for x in flat]
        self._places = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
        fixed = pytree.tree_unflatten(self._static, self._spec)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                fn(*fixed)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            out = fn(*fixed)
        self._out, self._out_spec = pytree.tree_flatten(out)

    def __call__(self, *args: Any) -> Any:
        flat = pytree.tree_leaves(args)
        _copy([self._static[i] for i in self._places], [flat[i] for i in self._places])
        self._graph.replay()
        fresh = [torch.empty_like(x) if isinstance(x, Tensor) else x for x in self._out]
        places = [i for i, x in enumerate(self._out) if isinstance(x, Tensor)]
        _copy([fresh[i] for i in places], [self._out[i] for i in places])
        return pytree.tree_unflatten(fresh, self._out_spec)


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    """Copy many tensors in few kernels: one call per type."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in zip(to, source, strict=True):
        left, right = by_type.setdefault(a.dtype, ([], []))
        left.append(a)
        right.append(b)
    for left, right in by_type.values():
        torch._foreach_copy_(left, right)


def _is_random(graph: fx.GraphModule) -> bool:
    return any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in graph.graph.nodes)

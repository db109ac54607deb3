"""The fastest form of a traced step on a GPU: compiled by inductor, then recorded as one CUDA graph.

Compiling takes about a minute per shape and is cached on disk by torch, so a second run of the same model starts in
seconds. The graph removes what launching thousands of kernels costs, which for a plain training step is half of it.
"""

import gc
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

Precision = Literal["float32", "tf32", "bf16", "float64"]

_asked: Precision | None = None  # by the innermost `precision`
_half = False  # within `half`

# The compiler would lay the model's own images out channels last, for cuDNN. Tangents are channels first; what reads
# both then reads one of them with a stride. The others are searches that take a seventh of the compiling and found
# nothing: steps are as fast without them.
_OPTIONS: Any = {
    "layout_optimization": False,
    "loop_ordering_after_fusion": False,
    "max_fusion_buffer_group_pairwise_attempts": 4,
    "reorder_for_peak_memory": False,
    "triton.coalesce_tiling_analysis": False,
}


@contextmanager
def precision(kind: Precision = "float32") -> Iterator[None]:
    """How float32 products are computed on a GPU while the context lasts.

    torch lets convolutions use TF32, with 10 bits of mantissa, by default. Derivatives through many steps amplify that:
    a Hessian product of WRN-16-1 is off by 5 % in TF32 and by 0.1 % in float32 (benchmarks/results/step_cost_wrn16_*).
    With "bf16" derivatives are float32, and plain training runs side by side are in mixed precision where there are
    kernels for it.
    """
    global _asked
    if kind not in get_args(Precision):
        raise ValueError(
            f"precision={kind!r}: expected 'float32', 'tf32', 'bf16', or 'float64' for a model in float64."
        )
    before, _asked = _asked, kind
    try:
        with _products(kind):
            yield
    finally:
        _asked = before


def check_precision(dtype: torch.dtype) -> None:
    """Refuse a model that is not in the precision asked for."""
    if _asked in ("tf32", "bf16") and dtype == torch.float64:
        rough = "TF32 is a rougher float32" if _asked == "tf32" else "bfloat16 stands in for float32"
        raise ValueError(f"precision={_asked!r} with a model in float64: {rough}; choose one of the two.")
    if _asked == "float64" and dtype != torch.float64:
        raise ValueError(
            f"precision='float64' with a model in {str(dtype).removeprefix('torch.')}: make it and its batches float64 "
            "(image_task takes dtype=torch.float64)."
        )


@contextmanager
def _products(kind: Precision) -> Iterator[None]:
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


def current_precision() -> Precision:
    """What products are computed in now; a compiled step keeps what was so when it was compiled."""
    if _asked == "bf16":
        return _asked
    return "tf32" if torch.backends.cudnn.allow_tf32 and torch.cuda.is_available() else "float32"


def can_build() -> bool:
    """Whether this torch can build kernels, on a device of NVIDIA's that has TF32."""
    if not torch.cuda.is_available() or torch.version.hip is not None or not hasattr(torch.cuda, "_compile_kernel"):
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


@contextmanager
def half() -> Iterator[None]:
    """While a step of plain training runs is made or compared whose convolutions are to be in bfloat16."""
    global _half
    before, _half = _half, True
    try:
        yield
    finally:
        _half = before


def is_half() -> bool:
    """Whether such a step is being made."""
    return _half


def compiled(graph: fx.GraphModule, args: list[Tensor], reseed: Callable[[], None]) -> Callable[..., list[Tensor]]:
    """A traced function compiled for the GPU that its arguments are on, for arguments of these shapes."""
    args = [x.clone() for x in args]  # a copy of a view has no gaps, and compiled code insists on its strides
    with torch.no_grad(), torch.cuda.device(args[0].device):
        random = _is_random(graph)
        fast = None if random else _inductor(graph, args)
        if fast is None:
            fast = _by_dynamo(graph, random)
        reseed()
        fast(*args)
        if random:  # a recorded graph would draw the same numbers again
            return lambda *given: fast(*(x.clone() for x in given))
        return Recorded(fast, args)


def get_ready() -> None:
    """Start the compiler's processes, which takes seconds, while a step is traced for them."""
    try:
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()
    except Exception:  # another release of torch: it starts them later by itself
        return


def _inductor(graph: fx.GraphModule, args: list[Tensor]) -> Callable[..., list[Tensor]] | None:
    """Torch's compiler without Dynamo and autograd in front of it: a flat graph need not be taken apart.

    Random numbers would need what is left out. None in another release of torch, where the short way is another one.
    """
    try:
        return _compiled_directly(graph, args)
    except Exception as error:
        logging.getLogger(__name__).info("compiled the long way: %s", error)
        return None


def _by_dynamo(graph: fx.GraphModule, random: bool) -> Callable[..., list[Tensor]]:
    """Torch's compiler as everybody calls it, with torch's own random numbers."""
    options: Any = {"layout_optimization": False, "fallback_random": random}
    compiled: Any = torch.compile(graph, fullgraph=True, dynamic=False, options=options)

    def fast(*given: Tensor) -> list[Tensor]:
        with torch.no_grad():  # with gradients it would be another compilation
            found: list[Tensor] = compiled(*given)
            return found

    return fast


def _compiled_directly(graph: fx.GraphModule, args: list[Tensor]) -> Callable[..., list[Tensor]]:
    """Shapes are static; the mode with a (then empty) ShapeEnv is what the cache on disk asks for."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(  # not fake: constants of the model or the loss
        allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
    )
    shapes = [mode.from_tensor(x, static_shapes=True) for x in args]
    with tracing(TracingContext(mode)), config.patch(_OPTIONS), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the compiler's about its own choices, and that TF32 is off
        with mode:
            flat = make_fx(graph, decomposition_table=select_decomp_table())(*shapes)
        made: Any = compile_fx_inner(flat, shapes, is_inference=True)
    return lambda *given: list(made(list(given)))  # it empties the list that it is given


def tidy() -> None:
    """Free what compiling has left over: graphs, and results of the first comparison, that hold each other."""
    gc.collect()
    torch.cuda.empty_cache()


class Recorded:
    """A function as a CUDA graph: arguments are copied into fixed places, results out of them."""

    def __init__(self, fn: Callable[..., Any], args: list[Tensor]):
        self._args = [x.clone() for x in args]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                fn(*self._args)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = list(fn(*self._args))
        self._inputs, self._outputs = _by_type(self._args), _by_type(self._out)

    def __call__(self, *args: Tensor) -> list[Tensor]:
        for places, into in self._inputs:
            torch._foreach_copy_(into, [args[i].contiguous() for i in places])  # a gap in one, and it copies one by one
        with torch.cuda.device(self._args[0].device):
            self._graph.replay()
        fresh: list[Any] = [None] * len(self._out)
        for places, out in self._outputs:
            for i, x in zip(places, _copied(out), strict=True):
                fresh[i] = x
        return fresh


def _copied(tensors: list[Tensor]) -> Iterable[Tensor]:
    """Copies of tensors of one type, in one call."""
    if tensors[0].dtype != torch.bool and not tensors[0].is_complex():
        return torch._foreach_mul(tensors, 1)
    return [x.clone() for x in tensors]


def _by_type(tensors: list[Tensor]) -> list[tuple[list[int], list[Tensor]]]:
    """Tensors and their places, in groups that one call can copy."""
    found: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
    for i, x in enumerate(tensors):
        places, same = found.setdefault(x.dtype, ([], []))
        places.append(i)
        same.append(x)
    return list(found.values())


def _is_random(graph: fx.GraphModule) -> bool:
    return any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in graph.graph.nodes)

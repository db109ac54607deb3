"""Building and starting the kernels of the .cu files: one per size, in threads, once a graph is known to need it."""

import importlib.resources
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

KINDS = ((3, 1, 1), (3, 1, 2), (1, 0, 2))  # taps, padding, stride

_ROWS = 8  # of a strip of an image that one program deals with
_PROGRAMS = 528  # of a weight gradient: four for each multiprocessor of an H200
_THREADS = 8  # that build


@dataclass(frozen=True)
class Size:
    """Of a convolution, its image gradient or its weight gradient.

    Attributes:
        columns: how many there are.
        count: images of a column.
        channels: of the image of the convolution.
        outputs: of the convolution.
        side: of the smaller image.
        kind: place in `KINDS`.
        tf32: round to TF32, instead of making up for it.
        own: whether there is a product with every column's own image.
        shared: whether there is one with the image that all share.
        each: whether the other factor of a column's own image is its own, too.
    """

    columns: int
    count: int
    channels: int
    outputs: int
    side: int
    kind: int
    tf32: bool
    own: bool
    shared: bool
    each: bool = False


@dataclass(frozen=True)
class Plan:
    """A kernel and how to start it.

    Attributes:
        name: in the source.
        macros: what it is built with.
        grid: programs.
        threads: of a program.
        floats: of shared memory of a program.
        parts: of a sum that is left to do.
        source: the file that it is in.
    """

    name: str
    macros: tuple[tuple[str, int], ...]
    grid: tuple[int, int, int]
    threads: int
    floats: int
    parts: int = 1
    per_part: int = 0
    source: str = "kernels.cu"


def convolve(s: Size) -> Plan:
    """The convolution of columns."""
    _, _, stride = KINDS[s.kind]
    tiles, pixels = min(2, s.outputs // 16), 4
    lines, plane = _lines(s, stride)
    return Plan(
        "convolve",
        _macros(s, s.channels, s.outputs, lines, plane, tiles, pixels),
        (s.columns * _strips(s), 1, 1),
        32 * (s.outputs // 16 // tiles) * (_ROWS * s.side // 8 // pixels),
        _padded(s.channels, 8) * plane,
    )


def precise(s: Size) -> Plan:
    """One convolution, summed in float64."""
    _, _, stride = KINDS[s.kind]
    tiles, pixels = 2, 4
    lines, plane = _lines(s, stride)
    return Plan(
        "precise",
        _macros(s, s.channels, s.outputs, lines, plane, tiles, pixels),
        (_strips(s), 1, 1),
        32 * (s.outputs // 8 // tiles) * (_ROWS * s.side // 8 // pixels),
        _padded(s.channels, 4) * plane,
    )


def spread(s: Size) -> Plan:
    """The gradient of the image at stride two: outputs are summed over."""
    tiles = min(2, s.channels // 16)
    pixels = 4 // tiles
    lines, plane = _lines(s, 1)
    return Plan(
        "spread",
        _macros(s, s.outputs, s.channels, lines, plane, tiles, pixels),
        (s.columns * _strips(s), 1, 1),
        32 * (s.channels // 16 // tiles) * (_ROWS * s.side // 8 // pixels),
        _padded(s.outputs, 8) * plane,
    )


def weigh(s: Size) -> Plan:
    """The gradient of the weight: strips are dealt out to programs, whose sums are left to be added."""
    taps, _, stride = KINDS[s.kind]
    group = min(_padded(s.channels, 8), 32 if s.outputs <= 32 else 16)
    tiles, across = min(2, s.outputs // 16), 2 if s.outputs == 16 and group == 16 and not s.tf32 else 1
    warps = (s.outputs // 16 // tiles) * (group // 8 // across)
    shares = 1 if s.channels > group else 4 if s.outputs == 16 else max(1, 4 // warps)
    lines = (_ROWS - 1) * stride + 3
    plane = _plane(lines, s.side * stride, (4,), 8)
    groups = -(-s.channels // group)
    per_part = -(-_strips(s) // max(1, min(_strips(s), _PROGRAMS // (s.columns * groups))))
    parts = -(-_strips(s) // per_part)
    floats = group * plane + s.outputs * (_ROWS * s.side + 4)
    return Plan(
        "weigh",
        (*_macros(s, s.channels, s.outputs, lines, plane, tiles, across), ("GROUP", group), ("SHARES", shares)),
        (parts, s.columns, groups),
        32 * warps * shares,
        max(floats, s.outputs * s.channels * taps**2 if shares > 1 else 0),
        parts,
        per_part,
    )


def take(x: Tensor) -> bool:
    """Whether a tensor is where kernels run."""
    return x.is_cuda


def prepare(plan: Plan, device: torch.device) -> None:
    """Begin to build."""
    _begin(plan.source, plan.name, plan.macros, device)


def run(plan: Plan, tensors: Iterable[Tensor | None], others: list[Any]) -> None:
    """Start a kernel, when it is built."""
    given = list(tensors)
    there = next(x for x in given if x is not None)
    given = [there if x is None else x.contiguous() for x in given]  # one that is missing is not read
    kernel = _ready(plan.source, plan.name, plan.macros, plan.floats * 4, there.device)
    kernel(plan.grid, (plan.threads, 1, 1), [*given, *others], shared_mem=plan.floats * 4)


@cache
def _begin(source: str, name: str, macros: tuple[tuple[str, int], ...], device: torch.device) -> "Future[Any]":
    return _builders().submit(_built, source, name, macros, device)


def _built(source: str, name: str, macros: tuple[tuple[str, int], ...], device: torch.device) -> Any:
    text = importlib.resources.files("longhorizon").joinpath(source).read_text("utf-8")
    defined = "".join(f"#define {macro} {value}\n" for macro, value in (*macros, (name.upper(), 1)))
    with torch.cuda.device(device):
        torch.zeros(1, device=device)  # a thread has no device until it has used one
        return torch.cuda._compile_kernel(defined + text, name)


@cache
def _ready(
    source: str, name: str, macros: tuple[tuple[str, int], ...], shared_memory: int, device: torch.device
) -> Callable[..., None]:
    kernel: Any = _begin(source, name, macros, device).result()
    if shared_memory >= 48 * 1024:
        kernel.set_shared_memory_config(shared_memory)
    return kernel  # type: ignore[no-any-return]


@cache
def _builders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS)


def _macros(
    s: Size, summed: int, made: int, lines: int, plane: int, tiles: int, across: int
) -> tuple[tuple[str, int], ...]:
    taps, _, stride = KINDS[s.kind]
    sizes = (("C", summed), ("O", made), ("SIDE", s.side), ("TAPS", taps), ("STRIDE", stride), ("ROWS", _ROWS))
    form = (("LINES", lines), ("PLANE", plane), ("TERMS", 1 if s.tf32 else 3), ("M", tiles), ("T", across))
    return (*sizes, *form, ("OWN", int(s.own)), ("SHARED", int(s.shared)), ("EACH", int(s.each)))


def _strips(s: Size) -> int:
    return s.side // _ROWS * s.count


def _padded(channels: int, to: int) -> int:
    return -(-channels // to) * to


def _lines(s: Size, stride: int) -> tuple[int, int]:
    """Lines that a strip reads, and the floats of a channel of it. Lanes read channel t, pixel g times the stride."""
    lines = (_ROWS - 1) * stride + 3
    return lines, _plane(lines, s.side * stride, (8, 24) if stride == 1 else (16,), 32)


def _plane(lines: int, side: int, wanted: tuple[int, ...], modulo: int) -> int:
    """Floats of one channel of a strip in shared memory, so that the lanes of a warp read from different banks."""
    enough = lines * (side + 4) + 4
    while enough % modulo not in wanted:
        enough += 4
    return enough

"""Convolutions of training runs side by side, in bfloat16: operations that can stand in a graph, and their kernels.

A plain training run needs no more digits than everybody's mixed precision has: products of bfloat16, sums in float32,
weights and optimizer in float32. Half as many bytes then go through memory, which is what a small network's step waits
for. Images lie with their channels last, (lanes, images, side, side, channels). benchmarks/lanes_gpu.py times them.

    lane_convolution         result[n, i] = images[n, i] * weights[n] (+ other[n, i]); turned: gradient of the images
    lane_weight_gradient     result[n] = images[n] by grads[n], in float32
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from longhorizon import kernels
from longhorizon.kernels import KINDS, Plan

SOURCE = "kernels_bf16.cu"
_TURNS = 32  # in which a program loads a strip, at most: it has a bit for each
_PROCESSORS = 132  # of an H200; on another device programs wait for each other, or some have nothing to do
ROOM = 220 * 1024  # bytes of shared memory of a multiprocessor
MOST = 160 * 1024  # bytes of shared memory of a program; an A100 has 163 KiB

# The fastest strips and programs on an H200 for the sizes of WRN-16-1, by what is made, channels, outputs, side
# of the smaller image and kind: rows and images of a strip, tiles of 16 pixels (of `weigh`: outputs) that a warp makes
# at once, for `weigh` warps that share a strip's pixels, and programs for each multiprocessor. Others are good guesses.
_CHOSEN: dict[tuple[str, int, int, int, int], tuple[int, ...]] = {
    ("conv", 3, 16, 32, 0): (8, 1, 2, 8),
    ("conv", 16, 16, 32, 0): (16, 1, 4, 2),
    ("turned", 16, 16, 32, 0): (16, 1, 4, 2),
    ("conv", 16, 32, 16, 1): (8, 1, 2, 4),
    ("turned", 16, 32, 16, 1): (8, 1, 2, 4),
    ("conv", 16, 32, 16, 2): (4, 1, 1, 3),
    ("turned", 16, 32, 16, 2): (8, 1, 4, 3),
    ("conv", 32, 32, 16, 0): (16, 1, 4, 4),
    ("turned", 32, 32, 16, 0): (16, 1, 4, 4),
    ("conv", 32, 64, 8, 1): (8, 1, 4, 4),
    ("turned", 32, 64, 8, 1): (8, 2, 2, 2),
    ("conv", 32, 64, 8, 2): (4, 1, 1, 4),
    ("turned", 32, 64, 8, 2): (8, 2, 2, 4),
    ("conv", 64, 64, 8, 0): (8, 4, 4, 2),
    ("turned", 64, 64, 8, 0): (8, 1, 4, 4),
    ("weigh", 3, 16, 32, 0): (8, 1, 1, 4, 3),
    ("weigh", 16, 16, 32, 0): (16, 1, 1, 4, 2),
    ("weigh", 16, 32, 16, 1): (4, 1, 1, 1, 3),
    ("weigh", 16, 32, 16, 2): (4, 1, 1, 1, 3),
    ("weigh", 32, 32, 16, 0): (4, 1, 2, 1, 4),
    ("weigh", 32, 64, 8, 1): (8, 1, 2, 1, 1),
    ("weigh", 32, 64, 8, 2): (4, 1, 2, 1, 2),
    ("weigh", 64, 64, 8, 0): (8, 2, 2, 1, 1),
}


@dataclass(frozen=True)
class Size:
    """Of a convolution of lanes.

    Attributes:
        lanes: training runs.
        count: images of each.
        channels: of the image of the convolution.
        outputs: of the convolution.
        side: of the smaller image.
        kind: place in `KINDS`.
    """

    lanes: int
    count: int
    channels: int
    outputs: int
    side: int
    kind: int

    @property
    def padded(self) -> int:
        """Channels, filled up to what the kernels take."""
        return max(8, self.channels)


def convolve(s: Size, turned: bool, added: bool, most: int = MOST) -> Plan:
    """The convolution, or (turned) the gradient of its image.

    Args:
        most: bytes of shared memory that a program may have.
    """
    taps, _, stride = KINDS[s.kind]
    summed, made = (s.outputs, s.channels) if turned else (s.padded, s.outputs)
    spread = turned and stride == 2
    side, step = (s.side, 1) if turned else (s.side, stride)
    known = _CHOSEN.get(("turned" if turned else "conv", s.channels, s.outputs, s.side, s.kind))
    across = made // 8 // _group(made)

    def strip_of(rows: int, images: int) -> int:
        return images * _pixels(taps, step, rows, side, spread) * _pitch(summed)

    if known is not None and (s.count % known[1] or 2 * strip_of(*known[:2]) > most):
        known = None
    if known is None:
        whole = side if side == 16 and step == 1 and summed <= 32 else 8
        pair = 2 if side == 8 and s.count % 2 == 0 else 1
        forms = [(whole, pair), (8, 1), (4, 1)]
        rows, images = next((form for form in forms if 2 * strip_of(*form) <= most), forms[-1])
        tiles, chunks = images * rows * side // 16, strip_of(rows, images) // _pitch(summed) * summed // 8
        # As many tiles for a warp as leave work for four warps, and threads enough to remember what each loads.
        each = next(
            e
            for e in ((2, 1) if spread else (4, 2, 1))
            if e == 1
            or (
                rows // _deep(side, images) % e == 0
                and tiles // e * across >= 4
                and chunks <= _TURNS * 32 * across * (tiles // e)
            )
        )
        many = max(1, min(ROOM // (2 * strip_of(rows, images)), 640 // (32 * across * (tiles // each))))
    else:
        rows, images, each, many = known
    strip, threads = strip_of(rows, images), 32 * across * (images * rows * side // 16 // each)
    units = s.count // images * (side // rows)
    per_part = _shared_out(units, s.lanes, many)
    macros = {**_form(taps, stride if spread else step, rows, images), "C": summed, "O": made, "SIDE": side}
    macros |= {"T": each, "G": _group(made), "ADDED": int(added)}
    parts = -(-units // per_part)
    name = "spread" if spread else "convolve"
    return Plan(name, tuple(macros.items()), (parts, s.lanes, 1), threads, strip // 2, parts, per_part, source=SOURCE)


def pack(s: Size, turned: bool) -> tuple[Plan, int]:
    """The weights in the order in which `convolve` wants them, and how many words that is."""
    taps = KINDS[s.kind][0]
    summed, made = (s.outputs, s.channels) if turned else (s.padded, s.outputs)
    words = s.lanes * taps**2 * summed * made // 2
    macros = {**_form(taps, 1, 8, 1), "C": summed, "O": made, "REAL": s.channels, "SIDE": 8, "T": 1}
    macros |= {"G": _group(made), "TURNED": int(turned)}
    return Plan("pack", tuple(macros.items()), (-(-words // 256), 1, 1), 256, 0, source=SOURCE), words


def weigh(s: Size, most: int = MOST) -> Plan:
    """The gradient of the weights: strips are dealt out to programs, whose sums are left to be added.

    Args:
        most: as for `convolve`.
    """
    taps, _, stride = KINDS[s.kind]
    across = min(2, s.padded // 8)
    known = _CHOSEN.get(("weigh", s.channels, s.outputs, s.side, s.kind))

    def size_of(rows: int, images: int, shares: int) -> int:
        strip = images * _pixels(taps, stride, rows, s.side) * _pitch(s.padded)
        strip += images * rows * s.side * _pitch(s.outputs)
        return max(2 * strip, s.outputs * s.padded * taps**2 * 4 if shares > 1 else 0)

    if known and (s.count % known[1] or size_of(known[0], known[1], known[3]) > most):
        known = None
    if known is None:
        tiles = min(2, s.outputs // 16)
        warps = (s.outputs // 16 // tiles) * (s.padded // 8 // across)
        shares = max(1, 4 // warps)
        forms = [(8, 2 if s.side == 8 and stride == 1 and s.count % 2 == 0 else 1), (8, 1), (4, 1)]
        rows, images = next((form for form in forms if size_of(*form, shares) <= most), forms[-1])
        many = max(1, min(ROOM // size_of(rows, images, shares), 16 // (warps * shares)))
    else:
        rows, images, tiles, shares, many = known
    warps = (s.outputs // 16 // tiles) * (s.padded // 8 // across)
    units = s.count // images * (s.side // rows)
    per_part = _shared_out(units, s.lanes, many)
    macros = {**_form(taps, stride, rows, images), "C": s.padded, "O": s.outputs, "REAL": s.channels, "SIDE": s.side}
    macros |= {"T": tiles, "G": across, "SHARES": shares}
    parts = -(-units // per_part)
    return Plan(
        "weigh",
        tuple(macros.items()),
        (parts, s.lanes, 1),
        32 * warps * shares,
        size_of(rows, images, shares) // 4,
        parts,
        per_part,
        source=SOURCE,
    )


def add_up(s: Size, plan: Plan) -> Plan:
    """What `weigh` has left to be added."""
    words = s.lanes * s.outputs * s.padded * KINDS[s.kind][0] ** 2
    return Plan("add_up", plan.macros, (-(-words // 256), 1, 1), 256, 0, source=SOURCE)


def _shared_out(units: int, lanes: int, many: int) -> int:
    """Strips of a program, where so many programs run on each multiprocessor at a time."""
    return -(-units // max(1, min(units, _PROCESSORS * many // lanes)))


def fits(s: Size, device: torch.device) -> bool:
    """Whether the strips of all kernels of a size fit into a device's shared memory."""
    most = _most(device)
    plans = [convolve(s, False, False, most), weigh(s, most)]
    plans += [convolve(s, True, False, most)] if s.channels >= 16 else []
    return all(4 * plan.floats <= most for plan in plans)


@cache
def _most(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; an A100's, where there is no such device."""
    if device.type != "cuda":
        return MOST
    most: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024)
    return min(most, MOST)


def _form(taps: int, stride: int, rows: int, images: int) -> dict[str, int]:
    return {"TAPS": taps, "STRIDE": stride, "ROWS": rows, "IMAGES": images}


def _pixels(taps: int, stride: int, rows: int, side: int, spread: bool = False) -> int:
    """Of a strip in shared memory; as in the kernels."""
    if spread:
        return (rows + (taps == 3)) * (side + (taps == 3))
    step = stride if taps == 3 else 1
    return ((rows - 1) * step + taps) * (side * step + (taps == 3) * 2)


def _deep(side: int, images: int) -> int:
    """Rows of a tile; as in the kernels."""
    return 2 if side == 8 and images % 2 else 1


def _group(made: int) -> int:
    """Tiles of 8 outputs that a warp makes."""
    return 2 if made == 16 else 4


def _pitch(channels: int) -> int:
    """Bytes of a pixel in shared memory; as in the kernels."""
    return 16 if channels == 8 else 2 * channels + 16


@cache
def operations() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Both of them, such as can stand in a graph."""
    convolution = "(Tensor images, Tensor weights, Tensor? other, int kind, bool turned) -> Tensor"
    torch.library.custom_op("longhorizon::lane_convolution", _convolved, mutates_args=(), schema=convolution)
    torch.library.register_fake("longhorizon::lane_convolution", _shape_of_convolution)
    gradient = "(Tensor images, Tensor grads, int kind, int channels) -> Tensor"
    torch.library.custom_op("longhorizon::lane_weight_gradient", _weighed, mutates_args=(), schema=gradient)
    torch.library.register_fake("longhorizon::lane_weight_gradient", _shape_of_gradient)
    ops = torch.ops.longhorizon
    return ops.lane_convolution.default, ops.lane_weight_gradient.default


def like(operation: Any, *args: Any) -> Tensor:
    """An empty result of an operation."""
    return (_shape_of_convolution if operation is operations()[0] else _shape_of_gradient)(*args)


def prepare(nodes: Iterable[fx.Node]) -> None:
    """Begin to build the kernels of a graph's operations."""
    convolution, gradient = operations()
    for node in nodes:
        if node.target not in (convolution, gradient):
            continue
        given: Any = [x.meta["val"] if isinstance(x, fx.Node) else x for x in node.args]
        if node.target is gradient:
            size = _size_of_gradient(*given)
            plan = weigh(size, _most(given[0].device))
            kernels.prepare(plan, given[0].device)
            kernels.prepare(add_up(size, plan), given[0].device)
        else:
            size = _size_of_convolution(*given[:2], *given[3:])
            kernels.prepare(pack(size, given[4])[0], given[0].device)
            kernels.prepare(convolve(size, given[4], given[2] is not None, _most(given[0].device)), given[0].device)


def _size_of_convolution(images: Tensor, weights: Tensor, kind: int, turned: bool) -> Size:
    lanes, outputs, channels = weights.shape[:3]
    side = images.shape[2] if turned else images.shape[2] // KINDS[kind][2]
    return Size(lanes, images.shape[1], channels, outputs, side, kind)


def _shape_of_convolution(images: Tensor, weights: Tensor, other: Tensor | None, kind: int, turned: bool) -> Tensor:
    s = _size_of_convolution(images, weights, kind, turned)
    side, made = (s.side * KINDS[kind][2], s.channels) if turned else (s.side, s.outputs)
    return images.new_empty(s.lanes, s.count, side, side, made)


def _convolved(images: Tensor, weights: Tensor, other: Tensor | None, kind: int, turned: bool) -> Tensor:
    if not kernels.take(images):
        return _convolved_plainly(images, weights, other, kind, turned)
    size = _size_of_convolution(images, weights, kind, turned)
    plan, words = pack(size, turned)
    packed = torch.empty(words, dtype=torch.int32, device=images.device)
    kernels.run(plan, (weights,), [packed, words])
    result = _shape_of_convolution(images, weights, other, kind, turned)
    plan = convolve(size, turned, other is not None, _most(images.device))
    kernels.run(plan, (images, packed, other), [result, size.count, plan.per_part])
    return result


def _convolved_plainly(images: Tensor, weights: Tensor, other: Tensor | None, kind: int, turned: bool) -> Tensor:
    """The same in torch's own operations: what the kernels are tested by, and what a CPU does."""
    _, padding, stride = KINDS[kind]
    found = []
    for image, weight in zip(images.float().movedim(-1, -3), weights.to(images.dtype).float(), strict=True):
        if turned:
            made = F.conv_transpose2d(image, weight, padding=padding, stride=stride, output_padding=stride - 1)
        else:
            made = F.conv2d(image[:, : weight.shape[1]], weight, padding=padding, stride=stride)
        found.append(made.movedim(-3, -1))
    result = torch.stack(found)
    assert other is None or other.shape == result.shape  # the kernel does not spread it
    return (result if other is None else result + other.float()).to(images.dtype).contiguous()


def _size_of_gradient(images: Tensor, grads: Tensor, kind: int, channels: int) -> Size:
    lanes, count, side, _, outputs = grads.shape
    return Size(lanes, count, channels, outputs, side, kind)


def _shape_of_gradient(images: Tensor, grads: Tensor, kind: int, channels: int) -> Tensor:
    s, taps = _size_of_gradient(images, grads, kind, channels), KINDS[kind][0]
    return images.new_empty(s.lanes, s.outputs, channels, taps, taps, dtype=torch.float32)


def _weighed(images: Tensor, grads: Tensor, kind: int, channels: int) -> Tensor:
    result = _shape_of_gradient(images, grads, kind, channels)
    if not kernels.take(images):
        _, padding, stride = KINDS[kind]
        pairs = zip(images.float().movedim(-1, -3), grads.float().movedim(-1, -3), strict=True)
        form = result.shape[1:]
        found = [
            conv2d_weight(  # type: ignore[no-untyped-call]
                image[:, :channels], form, grad, stride=stride, padding=padding
            )
            for image, grad in pairs
        ]
        return torch.stack(found)
    size = _size_of_gradient(images, grads, kind, channels)
    plan = weigh(size, _most(images.device))
    parts = result.new_empty(plan.parts, size.lanes, *KINDS[kind][:1] * 2, size.outputs, size.padded)
    kernels.run(plan, (images, grads), [parts, size.lanes, size.count, plan.per_part])
    kernels.run(add_up(size, plan), (parts,), [result, size.lanes, plan.parts])
    return result

"""Kernels in Triton. Imported where they are launched, on a machine with a GPU."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def convolve(  # type: ignore[no-untyped-def]
    image,
    weight,
    result,
    pixels,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    outputs: tl.constexpr,
    tile: tl.constexpr,
):
    """A 3 × 3 convolution that keeps the size: one program per tile of pixels, nine products of pixels by channels.

    image (count, channels, height, width), weight (3, 3, channels, outputs), result (count, outputs, height, width).
    """
    p = tl.program_id(0) * tile + tl.arange(0, tile)
    area: tl.constexpr = height * width
    number = (p // area).to(tl.int64)
    place = p % area
    y = place // width
    x = place % width
    live = p < pixels
    c = tl.arange(0, channels)
    o = tl.arange(0, outputs)
    source = image + number * (channels * area) + place
    total = tl.zeros((tile, outputs), tl.float32)
    for row in tl.static_range(3):
        for column in tl.static_range(3):
            inside = live & (y + row >= 1) & (y + row <= height) & (x + column >= 1) & (x + column <= width)
            shifted = source[:, None] + (c * area + ((row - 1) * width + (column - 1)))[None, :]
            a = tl.load(shifted, mask=inside[:, None], other=0.0)
            b = tl.load(weight + ((row * 3 + column) * channels + c)[:, None] * outputs + o[None, :])
            total = tl.dot(a, b, total, input_precision="tf32x3")
    target = result + (number * (outputs * area) + place)[:, None] + (o * area)[None, :]
    tl.store(target, total, mask=live[:, None])

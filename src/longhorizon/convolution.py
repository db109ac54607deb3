"""A convolution for few channels on a GPU, accurate to float32 and on tensor cores.

cuDNN's kernels are made for many channels. The tangents of a small network are convolutions of thousands of images with
16 or 32 channels, where they reach a tenth of what the device can do. Here each tile of pixels is multiplied on tensor
cores with every number split into two TF32 parts ("3×TF32"), so the result is as accurate as in float32.

Measured on an H200, 3 × 3 kernels, 2304 images (milliseconds, in brackets cuDNN in float32 and in TF32):

    16 → 16 channels, 32 px    0.47 (0.85, 0.57)        as a gradient of the input    0.47 (1.14, 0.57)
    32 → 32 channels, 16 px    0.31 (0.40, 0.21)        as a gradient of the input    0.31 (0.50, 0.21)
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# channels in and out -> pixels of a tile, warps
_TILES = {(16, 16): (256, 4), (32, 32): (128, 4)}


def suits(image: tuple[torch.Size, torch.dtype, torch.device], weight: torch.Size, tf32: bool) -> bool:
    """Whether this kernel is the faster one for a convolution of stride one that keeps the size."""
    shape, dtype, device = image
    return (
        device.type == "cuda"
        and dtype == torch.float32
        and tuple(weight[2:]) == (3, 3)
        and (weight[1], weight[0]) in (_TILES if not tf32 else {(16, 16)})
        and shape[0] * shape[2] * shape[3] >= 2**16
        and importlib.util.find_spec("triton") is not None
    )


@cache
def small_convolution() -> Callable[[Tensor, Tensor], Tensor]:
    """`(image, weight) -> convolution`, stride 1, padding 1, as an operation that can stand in a graph."""

    @torch.library.custom_op("longhorizon::small_convolution", mutates_args=())
    def convolve(image: Tensor, weight: Tensor) -> Tensor:
        return _launch(image.contiguous(), weight.permute(2, 3, 1, 0).contiguous())

    @convolve.register_fake
    def _(image: Tensor, weight: Tensor) -> Tensor:
        return image.new_empty(image.shape[0], weight.shape[0], *image.shape[2:])

    op: Any = torch.ops.longhorizon.small_convolution.default
    return op  # type: ignore[no-any-return]


def _launch(image: Tensor, weight: Tensor) -> Tensor:
    """Run the kernel; the weight comes as (row, column, in, out)."""
    from longhorizon.kernels import convolve  # triton is there only where a GPU is

    count, channels, height, width = image.shape
    outputs = weight.shape[-1]
    pixels = count * height * width
    tile, warps = _TILES[channels, outputs]
    result = image.new_empty(count, outputs, height, width)
    convolve[(-(-pixels // tile),)](
        image, weight, result, pixels, height, width, channels, outputs, tile, num_warps=warps, num_stages=2
    )
    return result

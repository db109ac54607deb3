"""BatchNorm in plain operations, for a compiler: every derivative is one pass of sums and one over the pixels.

Written as (x − mean) / √(var + ε), each derivative needs sums that need other sums first, and each sum reads all pixels
of all columns again. Here nothing depends on the mean's own derivative: the pixels are shifted by a number near their
mean that has none, and what the mean is beyond that enters as a second sum of the same pass,

    c = x − s        var = E[c²] − E[c]²        y = c · scale + (bias − E[c] · scale)        s ≈ E[x], ds = 0

which is the same function for every s, and loses no digits if s is near the mean. Sums go over the pixels of an image
first and then over images, so that they are as parallel as the data.
"""

import torch
from torch import Tensor


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rough: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns BatchNorm of a batch (images, channels, …), and the batch's mean and variance (that divides by n).

    Args:
        rough: shift by the mean of the first image alone, which is near enough for sums of rounded numbers and saves a
            pass over all of them.
    """
    shape = [1, -1] + [1] * (x.ndim - 2)
    shift = _constant(_mean(x[:1] if rough else x))
    centred = x - _per_image(shift, x)
    mean = _mean(centred)
    var = _mean(centred * centred) - mean * mean
    scale = (var + eps).rsqrt()
    scale = scale if weight is None else scale * weight.view(shape)
    offset = -mean * scale
    offset = offset if bias is None else offset + bias.view(shape)
    normed = centred * _per_image(scale, x) + _per_image(offset, x)
    return normed, (shift + mean).flatten(), var.flatten()


def _mean(x: Tensor) -> Tensor:
    """Over pixels, then over images."""
    pixels = list(range(2, x.ndim))
    return (x.mean(pixels, keepdim=True) if pixels else x).mean(0, keepdim=True)


def _per_image(value: Tensor, x: Tensor) -> Tensor:
    """A value per channel as one per image and channel: its derivative then sums over pixels first, too."""
    return value.expand(x.shape[0], *value.shape[1:])


def _constant(x: Tensor) -> Tensor:
    """The number itself, to 2⁻⁴⁰, without a derivative of any kind.

    `detach` keeps the tangents of forward mode. `round` has the derivative zero, and where |x| is not tiny there is
    nothing left to round after the factor.
    """
    factor = 2.0**17 / torch.finfo(x.dtype).eps
    return (x * factor).round() / factor

"""BatchNorm in plain operations: the same function as torch's, with its derivatives of first and second order."""

import pytest
import torch
from torch.nn import functional as F

from longhorizon.normalise import normalise

SHAPES = [(6, 3), (5, 3, 4), (4, 3, 3, 2)]


def draw(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(len(shape))
    x = 2 * torch.randn(*shape, generator=generator, dtype=dtype) + 5
    weight, bias = torch.randn(2, shape[1], generator=generator, dtype=dtype)
    return x, weight, bias


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_batchnorm(shape):
    x, weight, bias = draw(shape)
    found, mean, var = normalise(x, weight, bias, 1e-5)
    torch.testing.assert_close(found, F.batch_norm(x, None, None, weight, bias, training=True, eps=1e-5))
    dims = [d for d in range(x.ndim) if d != 1]
    torch.testing.assert_close(mean, x.mean(dims))
    torch.testing.assert_close(var, x.var(dims, correction=0))
    torch.testing.assert_close(normalise(x, None, None, 1e-5)[0], F.batch_norm(x, None, None, training=True, eps=1e-5))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("part", range(3), ids=["result", "mean", "variance"])
def test_its_derivatives_are_those_of_differences(shape, part):
    given = [x.requires_grad_() for x in draw(shape)]
    given = given if part == 0 else given[:1]

    def fn(x, weight=None, bias=None):
        return normalise(x, weight, bias, 1e-5)[part]

    assert torch.autograd.gradcheck(fn, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(fn, given, check_fwd_over_rev=True)


def test_a_mean_far_above_the_deviation_costs_no_digits():
    """E[x²] − E[x]² would: here it would lose all of them."""
    x = (1e-3 * torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0)) + 3).float()
    found = normalise(x, None, None, 1e-12)[0]
    exact = normalise(x.double(), None, None, 1e-12)[0]
    assert (found - exact).abs().max() < 1e-5


@pytest.mark.parametrize("value", [0.0, 1e-30, -3.7e-8, 0.1, -123.456, 6.6e20])
def test_a_constant_is_the_number_itself_without_a_derivative(value):
    from longhorizon.normalise import _constant

    x = torch.tensor(value, dtype=torch.float32)
    found, tangent = torch.func.jvp(_constant, (x,), (torch.ones_like(x),))
    assert float(tangent) == 0
    assert abs(float(found - x)) <= 2.0**-40
    assert float(torch.func.grad(lambda x: _constant(x) ** 2)(x)) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_shifted_by_one_image_it_is_the_same_function(shape):
    x, weight, bias = (t.requires_grad_() for t in draw(shape))
    rough, exact = (normalise(x, weight, bias, 1e-5, rough=r)[0] for r in (True, False))
    torch.testing.assert_close(rough, exact)
    out = torch.randn_like(exact)
    found, expected = (torch.autograd.grad((y * out).sum(), (x, weight, bias)) for y in (rough, exact))
    torch.testing.assert_close(found, expected)


def test_shifted_by_one_image_a_constant_channel_is_finite():
    x = torch.full((8, 2, 4, 4), 20.3)
    x[:, 1] = x[:, 1] * (1 + 1e-3 * torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(0)))
    found, _, var = normalise(x, None, None, 1e-5, rough=True)
    assert found.isfinite().all()
    assert (var >= 0).all()
    torch.testing.assert_close(found, normalise(x, None, None, 1e-5)[0], rtol=1e-3, atol=1e-3)

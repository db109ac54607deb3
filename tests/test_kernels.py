"""What the kernels compute, one by one: on a GPU, and their very text on this machine's processor (cuda_on_cpu.py)."""

from functools import partial

import pytest
import torch

import column_products
import cuda_on_cpu
from longhorizon import convolution, kernels, lane_kernels, norm_kernels

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ON_CPU = pytest.mark.skipif(not cuda_on_cpu.there, reason="needs g++")


def everywhere(*quick, slow=(), gpu=()):
    """Cases for this machine's processor, those that it is slow at, and for a GPU all of them and more."""
    cases = [pytest.param("cpu", case, id=f"cpu-{case}", marks=ON_CPU) for case in quick]
    cases += [pytest.param("cpu", case, id=f"cpu-{case}", marks=[ON_CPU, pytest.mark.slow]) for case in slow]
    cases += [pytest.param("cuda", case, id=f"cuda-{case}", marks=ON_GPU) for case in (*quick, *slow, *gpu)]
    return pytest.mark.parametrize(("device", "case"), cases)


# So that each program has several strips to do, one after the other.
FEW = ((lane_kernels, "_PROCESSORS", 1), (norm_kernels, "_PROCESSORS", 4), (kernels, "_PROGRAMS", 4))


@pytest.fixture
def run(monkeypatch, device):
    """An operation on a device; on the CPU in both orders of a program's threads, with memory that is NaN at first."""

    def by_kernels(op, *args):
        if device == "cuda":
            return op(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in args)).cpu()
        found = []
        for backwards in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "take", lambda x: True)
                patch.setattr(kernels, "run", cuda_on_cpu.OnCPU(backwards))
                for where, name, few in FEW:
                    patch.setattr(where, name, few)
                torch.use_deterministic_algorithms(True)  # fills new memory
                try:
                    found.append(op(*args))
                finally:
                    torch.use_deterministic_algorithms(False)
        assert torch.equal(*found)
        return found[0]

    return by_kernels


def draws(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def assert_near(found, exact, within):
    assert found.isfinite().all()
    assert (found.double() - exact).norm() <= within * exact.norm()


# channels, outputs, side, products, TF32, kind
COLUMNS = [
    (16, 16, 32, "both", False, 0),
    (32, 32, 16, "own", False, 0),
    (64, 64, 8, "both", False, 0),
    (16, 32, 16, "both", False, 1),
    (16, 32, 16, "shared", True, 1),
    (16, 32, 8, "both", False, 2),
    (3, 16, 8, "both", False, 0),
]
SIZES = ((16, 16, 32), (32, 32, 16), (64, 64, 8), (16, 32, 16), (16, 32, 8), (3, 16, 8))
MORE = [(*size, "both", False, kind) for size in SIZES for kind in range(3)]
MORE += [(16, 32, 8, pairs, tf32, kind) for pairs in ("own", "shared") for tf32 in (False, True) for kind in range(3)]


@everywhere(*COLUMNS, gpu=[case for case in MORE if case not in COLUMNS])
def test_convolutions_of_columns_are_accurate(device, case, run):
    """Against float64. Each product may be missing; a part of the images is left over in the sums of weights."""
    channels, outputs, side, pairs, tf32, kind = case
    taps, _, stride = kernels.KINDS[kind]
    columns, count = (3, 261) if device == "cuda" else (2, 3)
    draw = draws()
    large, small = (channels, side * stride, side * stride), (outputs, side, side)
    weight = outputs, channels, taps, taps
    convolve, spread, weigh, precise = (
        partial(found.compute) if device == "cpu" else op
        for op, found in zip(convolution.operations(), convolution.OPERATIONS.values(), strict=True)
    )
    products = [(convolve, column_products.convolved, large, weight), (weigh, column_products.weighed, large, small)]
    if stride == 2 and channels >= 16:
        products.append((spread, column_products.spread, small, weight))
    for op, meaning, image, other in products:
        shared = () if other is weight else (count,)
        own = [draw(columns, count, *image), draw(*shared, *other)]
        common = [draw(count, *image), draw(columns, *shared, *other)]
        given = [*(own if pairs != "shared" else [None, None]), *(common if pairs != "own" else [None, None])]
        exact = meaning([None if x is None else x.double() for x in given], kind, False)
        assert_near(run(op, *given, kind, tf32), exact, 1e-3 if tf32 else 3e-5)
        if pairs == "own":  # each column with its own
            given[1] = draw(columns, *shared, *other)
            exact = meaning([None if x is None else x.double() for x in given], kind, False)
            assert_near(run(op, *given, kind, tf32), exact, 3e-5)
    image, kernel = draw(count, *large), draw(*weight)
    found, exact = run(precise, image, kernel, kind), column_products.precise(image, kernel, kind)
    assert_near(found, exact, 1e-8)  # the same bits, but for a rounding here and there


# channels, outputs, side of the smaller image, images, kind: those of WRN-16-1, whose strips were chosen, and others
WRN = [
    (3, 16, 32, 2, 0),
    (16, 16, 32, 2, 0),
    (16, 32, 16, 3, 1),
    (16, 32, 16, 3, 2),
    (32, 32, 16, 3, 0),
    (32, 64, 8, 4, 1),
    (32, 64, 8, 4, 2),
    (64, 64, 8, 8, 0),
]
OTHERS = [(32, 64, 8, 3, 1), (64, 64, 8, 3, 0), (16, 16, 16, 2, 1), (3, 16, 16, 3, 0)]
SIZES = ((3, 16, 16), (16, 16, 16), (16, 32, 16), (32, 32, 8), (32, 64, 8), (64, 64, 8))
ALL = [(*size, count, kind) for size in SIZES for count in (4, 3) for kind in range(3)]


@everywhere(*WRN, *OTHERS, slow=[case for case in ALL if case not in (*WRN, *OTHERS)])
def test_convolutions_of_lanes_are_what_torch_makes(device, case, run):
    """Of the same bfloat16 numbers, so that only the order of sums differs, and a last bit here and there."""
    channels, outputs, side, count, kind = case
    count *= 32 if device == "cuda" else 1
    taps, _, stride = kernels.KINDS[kind]
    convolve, weigh = lane_kernels.operations()
    draw, lanes = draws(), 3 if device == "cuda" else 2
    images = draw(lanes, count, side * stride, side * stride, max(8, channels)).bfloat16()
    images[..., channels:] = 0
    weights, grads = draw(lanes, outputs, channels, taps, taps), draw(lanes, count, side, side, outputs).bfloat16()
    given = [(images, weights, None, kind, False), (images, weights, grads, kind, False)]
    if channels >= 16:
        given += [(grads, weights, None, kind, True), (grads, weights, images, kind, True)]
    for args in given if device == "cuda" else given[1::2]:
        assert_near(run(convolve, *args), lane_kernels._convolved_plainly(*args).double(), 1e-3)
    exact = lane_kernels._weighed(images, grads, kind, channels).double()
    assert_near(run(weigh, images, grads, kind, channels), exact, 1e-5)


# lanes, images, side, channels
PASSES = [(2, 2, 6, 16), (3, 1, 9, 256), (40, 2, 2, 32), (1, 1, 1, 128)]
THIN = [(2, 3, 5, 8), (2, 2, 4, 64)]


@pytest.mark.parametrize("relu", [True, False])
@everywhere(*PASSES, slow=THIN, gpu=[(3, 256, 32, 16), (25, 256, 8, 64), (3, 7, 9, 256), (600, 2, 4, 32)])
def test_passes_of_batch_norm_are_what_torch_makes(device, case, relu, run):
    """Of the same bfloat16 numbers, so that only the order of sums differs, and a last bit here and there."""
    lanes, count, side, channels = case
    draw = draws()
    images = (3 + draw(lanes, count, side, side, channels)).bfloat16()
    grads, other = (draw(*images.shape).bfloat16() for _ in range(2))
    scale, offset, slope, rest = (draw(lanes, channels) for _ in range(4))
    ops = norm_kernels.operations()
    mean = ops.moments(images)[0]
    for op, args, within in (
        (ops.moments, (images,), 1e-5),
        (ops.scaled, (images, scale, offset, relu), 1e-3),
        (ops.slopes, (images, grads, scale, offset, mean, relu), 1e-5),
        (ops.unscaled, (images, grads, None, scale, offset, slope, rest, relu), 1e-3),
        (ops.unscaled, (images, grads, other, scale, offset, slope, rest, relu), 1e-3),
    ):
        assert_near(run(op, *args), op(*args).double(), within)


@everywhere((2, 4, 8, 8, 16))
def test_constant_channels_have_no_variance(device, case, run):
    images = torch.full(case, 3.7).bfloat16()
    mean, var = run(norm_kernels.operations().moments, images)
    assert bool((var == 0).all())
    assert bool((mean == images[0, 0, 0, 0, 0].float()).all())


END, BARRIER = "apart * (O / 2));", "\n        __syncthreads();"
LATEST = "commit();\n        wait_for<1>();"
HERE = "u32 a[4];\n                const u32 here = "
SPOILT = {  # the kernel, what stands in its text, and what is put there instead
    "nothing": ("convolve", "", ""),
    "no wait": ("convolve", "wait_for<1>();", ""),
    "no barrier": ("convolve", LATEST + BARRIER, LATEST),
    "no barrier at the end": ("convolve", END + BARRIER, END),
    "threads that part ways": ("convolve", "multiply16(sum[i][j], a, ", "if (lane < 16) multiply16(sum[i][j], a, "),
    "not aligned": ("convolve", "load4(a, here);", "load4(a, here + 8);"),
    "a write too far": ("convolve", END + BARRIER, END + BARRIER + " result[-1] = 0;"),
    "too far in shared memory": ("convolve", HERE + "tile", HERE + "1 << 20 | tile"),
    "nothing in spread": ("spread", "", ""),
    "no wait in spread": ("spread", "wait_for<1>();", ""),
    "no barrier in spread": ("spread", LATEST + BARRIER, LATEST),
    "no barrier at the end of spread": ("spread", END + BARRIER, END),
    "nothing in weigh": ("weigh", "", ""),
    "no wait in weigh": ("weigh", "wait_for<1>();", ";"),
    "no wait for the last in weigh": ("weigh", "wait_for<0>();", ";"),
    "no barrier in weigh": ("weigh", "}" + BARRIER + "\n#pragma unroll 1", "}\n#pragma unroll 1"),
    "no barrier at the end of weigh": ("weigh", "}" + BARRIER + "\n    }", "}\n    }"),
    "nothing in add_up": ("add_up", "", ""),
    "no end in add_up": ("add_up", "if (i >= lanes * size) return;", ""),
}


@ON_CPU
@pytest.mark.parametrize(("kernel", "line", "instead"), SPOILT.values(), ids=SPOILT)
def test_what_is_wrong_in_a_kernel_is_seen(kernel, line, instead, monkeypatch):
    translated = cuda_on_cpu.translated

    def spoilt(text):
        assert line in text
        return translated(text.replace(line, instead))

    (convolve, weigh), draw = lane_kernels.operations(), draws()
    small, large = (draw(1, count, side, side, 32).bfloat16() for count, side in ((48, 8), (24, 16)))
    weights, thin = draw(1, 32, 32, 3, 3), draw(1, 2, 16, 16, 24).bfloat16()
    thin[..., 3:8] = 0
    op, args, plainly = {  # several strips for each program
        "convolve": (convolve, (large, weights, None, 0, False), lane_kernels._convolved_plainly),
        "spread": (convolve, (small[:, :24].contiguous(), weights, large, 1, True), lane_kernels._convolved_plainly),
        "weigh": (weigh, (small, small.flip(1), 0, 32), lane_kernels._weighed),
        "add_up": (weigh, (thin[..., :8].contiguous(), thin[..., 8:].contiguous(), 0, 3), lane_kernels._weighed),
    }[kernel]
    exact = plainly(*args).double()
    if instead != line:
        monkeypatch.setattr(cuda_on_cpu, "translated", spoilt)
        monkeypatch.setattr(cuda_on_cpu, "_built", cuda_on_cpu._built.__wrapped__)
    monkeypatch.setattr(kernels, "take", lambda x: True)
    monkeypatch.setattr(lane_kernels, "_PROCESSORS", 1)
    fine = []
    for backwards in (False, True):
        monkeypatch.setattr(kernels, "run", cuda_on_cpu.OnCPU(backwards))
        try:
            fine.append(bool((op(*args) - exact).norm() <= 1e-3 * exact.norm()))
        except cuda_on_cpu.KernelError:
            fine.append(False)
    assert all(fine) == (instead == line)

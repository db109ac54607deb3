"""Batches made on the device: each alone, the right ones, and by the paper's protocol."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import longhorizon as lh
from longhorizon import data


def numbered(count=50, size=6, channels=2, classes=5, test=13):
    """Images whose every pixel tells where it comes from (for count · size² · channels not too large)."""

    def part(n, start):
        values = (torch.arange(n * channels * size * size) + start) * 7 % 251 + 1  # never black
        return values.view(n, channels, size, size).to(torch.uint8), torch.arange(n) % classes

    return data.Images("numbered", *part(count, 0), *part(test, 3), classes=classes)


def resident(pad=0, dtype=torch.float64, **kw):
    made = numbered(**kw)
    return data.to_device(made.train_images, made.train_labels, made.mean, made.std, pad, dtype=dtype), made


def bytes_of(on_device, images):
    return (images - on_device.shift) / on_device.scale


def identity(on_device, images, made):
    """Which image each of a batch is."""
    same = (bytes_of(on_device, images)[:, None] - made.train_images[None].double()).abs().amax((2, 3, 4)) < 1e-6
    assert same.sum(1).eq(1).all()
    return same.double().argmax(1)


# One step


def test_a_batch_is_reproducible_alone():
    on_device, _ = resident(pad=4)
    augment = data.Augment()
    one = data.Stream(on_device, 8, seed=3, augment=augment)
    forwards = [one[t] for t in range(20)]
    backwards = [one[t] for t in reversed(range(20))][::-1]
    torch.manual_seed(99)  # nothing of the caller's matters
    alone = [data.Stream(on_device, 8, seed=3, augment=augment)[t] for t in range(20)]
    for a, b, c in zip(forwards, backwards, alone, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[0], c[0])
        assert torch.equal(a[1], c[1])


def test_the_callers_generators_are_left_alone():
    on_device, _ = resident()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    data.Stream(on_device, 8, seed=3)[4]
    data.split(100, 0.1, 0)
    assert torch.equal(torch.rand(3), expected)


def test_seeds_and_steps_differ():
    on_device, _ = resident()
    one, other = data.Stream(on_device, 8, seed=0), data.Stream(on_device, 8, seed=1)
    assert not torch.equal(one[0][0], other[0][0])
    assert not torch.equal(one[0][0], one[1][0])
    assert not torch.equal(one[0][0], one[6][0])  # the first step of the next epoch


def test_an_epoch_is_a_permutation_and_the_rest_is_dropped():
    on_device, made = resident(count=50)
    stream = data.Stream(on_device, 8, seed=0)
    assert stream.steps_per_epoch == 6
    epochs = []
    for epoch in range(3):
        batches = [stream[t] for t in range(6 * epoch, 6 * epoch + 6)]
        who = torch.cat([identity(on_device, x, made) for x, _ in batches])
        assert len(who.unique()) == 48
        assert torch.equal(torch.cat([y for _, y in batches]), made.train_labels[who])
        epochs.append(who)
    assert not torch.equal(epochs[0], epochs[1])
    assert set(torch.cat(epochs).tolist()) == set(range(50))  # other ones are left out each time


def test_only_the_index_is_seen():
    on_device, made = resident()
    index = torch.tensor([3, 14, 15, 9, 26, 5])
    stream = data.Stream(on_device, 3, seed=0, index=index)
    seen = torch.cat([identity(on_device, stream[t][0], made) for t in range(2)])
    assert sorted(seen.tolist()) == sorted(index.tolist())


def slow_twin(image, pad, row, column, mirrored):
    """Padding, cropping and flipping as anyone would write them."""
    height, width = image.shape[1:]
    wide = torch.zeros(image.shape[0], height + 2 * pad, width + 2 * pad, dtype=image.dtype)
    wide[:, pad : pad + height, pad : pad + width] = image
    cut = wide[:, row : row + height, column : column + width]
    return cut.flip(2) if mirrored else cut


@pytest.mark.parametrize("margin", [2, 3])
def test_crops_and_flips_are_those_of_the_slow_twin(margin):
    on_device, made = resident(pad=margin)
    augment = data.Augment(pad=2, flip=True)
    stream = data.Stream(on_device, 10, seed=0, augment=augment)
    order = data.Stream(data.to_device(made.train_images, made.train_labels, (0.0,) * 2, (1 / 255,) * 2), 10, seed=0)
    seen = set()
    for t in range(15):
        got, labels = stream[t]
        plain, plain_labels = order[t]  # drawn from the same seed, in the same order
        assert torch.equal(labels, plain_labels)
        for mine, original in zip(bytes_of(on_device, got), plain, strict=True):
            fits = [
                (row, column, mirrored)
                for row in range(5)
                for column in range(5)
                for mirrored in (False, True)
                if torch.allclose(slow_twin(original.double(), 2, row, column, mirrored), mine, atol=1e-6)
            ]
            assert len(fits) == 1
            seen.add(fits[0])
    assert len(seen) > 40  # of 50 ways: all sides, both ways round
    assert {row for row, _, _ in seen} == {column for _, column, _ in seen} == set(range(5))


def test_augmentation_is_uniform():
    images = torch.full((2000, 1, 3, 3), 0, dtype=torch.uint8)
    images[:, 0, 1, 0] = 255  # one white pixel, left of the middle
    on_device = data.to_device(images, torch.zeros(2000).long(), (0.0,), (1.0,), pad=1)
    x, _ = data.Stream(on_device, 2000, seed=0, augment=data.Augment(pad=1, flip=True))[0]
    where = x.mean((0, 1))
    # rows: 1/3 each; columns 0, 1, 2 of an unflipped image: 1/3, 1/3, 0 (and 1/3 cut off), mirrored likewise
    expected = torch.tensor([1 / 6, 1 / 3, 1 / 6]).expand(3, 3) / 3
    assert (where - expected).abs().max() < 0.02


def test_no_flip_unless_asked():
    on_device, made = resident(pad=0)
    x, _ = data.Stream(on_device, 50, seed=0, augment=data.Augment(pad=0, flip=False))[0]
    identity(on_device, x, made)
    x, _ = data.Stream(on_device, 50, seed=0, augment=data.Augment(pad=0, flip=True))[0]
    with pytest.raises(AssertionError):
        identity(on_device, x, made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batches_are_normalised_and_contiguous(dtype):
    on_device, made = resident(dtype=dtype)
    x, y = data.Stream(on_device, 50, seed=0)[0]
    assert x.dtype == dtype
    assert y.dtype == torch.int64
    assert x.is_contiguous()
    assert on_device.pixels.dtype == torch.uint8
    expected = (made.train_images.double() / 255 - torch.tensor(made.mean, dtype=torch.float64).view(-1, 1, 1)) / (
        torch.tensor(made.std, dtype=torch.float64).view(-1, 1, 1)
    )
    assert torch.allclose(x.double().mean((0, 2, 3)), expected.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(on_device.batch(torch.arange(50))[0].double(), expected, atol=1e-5)


def test_it_is_endless_and_iterable():
    on_device, _ = resident()
    stream = data.Stream(on_device, 8, seed=0)
    assert stream[10**7][0].shape == (8, 2, 6, 6)
    for step, (x, _) in enumerate(stream):
        assert torch.equal(x, stream[step][0])
        if step == 9:
            break
    with pytest.raises(IndexError, match="step -1"):
        stream[-1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": 51}, "batch_size=51: expected 1 to 50"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"augment": data.Augment(pad=1)}, "wider than the margin"),
    ],
)
def test_streams_that_do_not_fit_are_refused(changes, says):
    on_device, _ = resident()
    with pytest.raises(ValueError, match=says):
        data.Stream(**{"data": on_device, "batch_size": 8, "seed": 0, **changes})


def test_a_negative_margin_is_refused():
    with pytest.raises(ValueError, match="pad=-1"):
        data.Augment(pad=-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_device_sees_the_same_batches():
    made = numbered()
    one, other = (data.image_data(made, 8, 0.2, augment=True, device=d) for d in ("cpu", "cuda"))
    for step in (0, 4, 5, 17):
        for a, b in zip(one.train(1)[step], other.train(1)[step], strict=True):
            assert b.is_cuda
            torch.testing.assert_close(a, b.cpu())


# Splits and validation


def test_a_split_takes_its_share_and_no_image_twice():
    train, val = data.split(1000, 0.05, seed=0)
    assert (len(train), len(val)) == (950, 50)
    assert torch.equal(torch.cat((train, val)).sort().values, torch.arange(1000))
    assert torch.equal(data.split(1000, 0.05, seed=0)[1], val)
    assert not torch.equal(data.split(1000, 0.05, seed=1)[1], val)
    assert len(data.split(60_000, 1000 / 60_000, seed=0)[1]) == 1000


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1e-6, 0.99999])
def test_a_split_leaves_some_on_both_sides(fraction):
    with pytest.raises(ValueError, match="val_fraction="):
        data.split(1000, fraction, 0)


@pytest.mark.parametrize(("count", "batch", "sizes"), [(50, 8, [8] + [7] * 6), (50, 25, [25, 25]), (5, 8, [5])])
def test_equal_batches(count, batch, sizes):
    on_device, made = resident(count=count)
    batches = data.equal_batches(on_device, batch)
    assert [len(y) for _, y in batches] == sizes
    assert torch.equal(torch.cat([identity(on_device, x, made) for x, _ in batches]), torch.arange(count))


def test_validation_is_held_out_and_unvaried():
    made = numbered()
    parts = data.image_data(made, 8, 0.2, augment=True, dtype=torch.float64, device="cpu")
    val = torch.cat([identity(parts.train_set, x, made) for x, _ in parts.val(0)])  # none is cropped or flipped
    assert sorted(val.tolist()) == sorted(parts.split(0)[1].tolist())
    plain = data.image_data(made, 8, 0.2, augment=False, dtype=torch.float64, device="cpu")
    train = torch.cat([identity(plain.train_set, plain.train(0)[t][0], made) for t in range(20)])
    assert set(train.tolist()) == set(plain.split(0)[0].tolist())
    assert set(train.tolist()).isdisjoint(val.tolist())


def test_each_seed_has_its_own_split_unless_fixed():
    fresh, fixed = (data.image_data(numbered(), 8, 0.2, fixed_split=f) for f in (False, True))
    assert not torch.equal(fresh.split(0)[1], fresh.split(1)[1])
    assert torch.equal(fixed.split(0)[1], fixed.split(1)[1])
    assert not torch.equal(fixed.train(0)[0][0], fixed.train(1)[0][0])  # the order differs all the same


def test_the_whole_training_set_and_the_test_set():
    made = numbered()
    parts = data.image_data(made, 10, 0.2, dtype=torch.float64, device="cpu", val_batch_size=5)
    full = torch.cat([identity(parts.train_set, parts.train_full(0)[t][0], made) for t in range(5)])
    assert sorted(full.tolist()) == list(range(50))
    assert [len(y) for _, y in parts.test()] == [5, 4, 4]
    assert torch.equal(torch.cat([y for _, y in parts.test()]), made.test_labels)
    assert torch.allclose(bytes_of(parts.test_set, parts.test()[0][0]), made.test_images[:5].double())
    assert parts.steps_per_epoch == parts.train(0).steps_per_epoch == 4


def test_the_papers_protocol_on_cifar_sizes():
    made = data.Images(
        "like CIFAR-10",
        torch.arange(50_000 * 12).remainder(256).to(torch.uint8).view(50_000, 3, 2, 2),
        torch.arange(50_000) % 10,
        torch.zeros(10, 3, 2, 2, dtype=torch.uint8),
        torch.zeros(10, dtype=torch.int64),
        classes=10,
    )
    parts = data.image_data(made)
    assert parts.steps_per_epoch == 185  # 50 epochs are 9,250 steps
    assert [len(y) for _, y in parts.val(0)] == [250] * 10


def test_augmentation_is_what_is_customary():
    plain = numbered()
    varied = data.Images(**{**vars(plain), "augment": data.Augment(pad=2)})
    assert data.image_data(plain, 8, 0.2).augment == data.PLAIN
    assert data.image_data(varied, 8, 0.2).augment.pad == 2
    assert data.image_data(varied, 8, 0.2, augment=False).augment == data.PLAIN
    assert data.image_data(plain, 8, 0.2, augment=True).augment == data.Augment(4, True)


# Tasks


def test_a_task_by_names_learns():
    pytest.importorskip("sklearn")
    task = data.image_task("digits", "mlp-16", batch_size=64, val_fraction=0.2, dtype=torch.float64, device="cpu")
    hypers = {"lr": lh.Hyper(0.1, windows=2)}
    h = lh.hypergradient(task, lh.sgd(), hypers, steps=60, engine=lh.Adjoint(), seed=0)
    again = lh.hypergradient(task, lh.sgd(), hypers, steps=60, engine=lh.Forward(), seed=0)
    assert float(h.val_loss) < 0.9  # chance is 2.3
    assert torch.allclose(h.grad["lr"], again.grad["lr"], rtol=1e-9)
    model = task.model()
    assert next(model.parameters()).dtype == torch.float64
    assert task.full is not None
    assert task.test is not None
    assert task.metrics is not None
    batch = task.test()[0]
    assert float(task.metrics(model, batch)["accuracy"]) == float(
        (model(batch[0]).argmax(1) == batch[1]).double().mean()
    )


def test_a_task_from_a_function():
    made = numbered()
    task = data.image_task(
        made, lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 5)), 8, 0.2, dtype=torch.float64, val_mode="train"
    )
    model = task.model()
    assert model[1].weight.dtype == torch.float64
    assert task.loss(model, task.train(0)[0]).ndim == 0
    assert task.val_mode == "train"


def test_a_task_and_its_data_print_in_a_few_lines():
    parts = data.image_data(numbered(), 8, 0.2)
    assert "tensor" not in repr((parts.task("mlp-4"), parts.train_set))
    assert len(repr(parts.task("mlp-4"))) < 1500


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model": "lenet"}, ValueError, r"LeNet\(size=6\)"),
        ({"model": "lent"}, ValueError, "unknown model 'lent'"),
        ({"model": nn.Flatten, "init": "he"}, ValueError, "init='he' applies to a model given by its name"),
        ({"model": nn.Linear(4, 2)}, TypeError, r"image_task\(model=…\): expected a function that makes the model"),
        ({"data": 3}, TypeError, "data=3: expected a name"),
        ({"data": "cifr10"}, ValueError, "unknown data set"),
        ({"batch_size": 41}, ValueError, "batch_size=41: expected 1 to 40"),
        ({"val_fraction": 0}, ValueError, "val_fraction=0"),
        ({"val_batch_size": 0}, ValueError, "val_batch_size=0"),
        ({"batch_size": 32.5}, ValueError, "batch_size=32.5: expected a whole number of images"),
        ({"val_batch_size": 2.0}, ValueError, "val_batch_size=2.0: expected a whole number of images"),
        ({"augment": "x"}, TypeError, "augment='x': expected longhorizon.data.Augment, True, False or None"),
        ({"dtype": torch.int32}, TypeError, "dtype=torch.int32"),
        ({"dtype": "float64"}, TypeError, "dtype='float64'"),
    ],
)
def test_tasks_that_do_not_fit_are_refused(changes, error, says):
    good = {"data": numbered(), "model": "mlp-4", "batch_size": 8, "val_fraction": 0.2}
    data.image_task(**good)
    with pytest.raises(error, match=says):
        data.image_task(**{**good, **changes})


# The bridge for loaders


class Noisy(Dataset):
    """Draws from torch's global generator, as transforms do."""

    def __init__(self, count=7):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.tensor(i), {"x": torch.rand(2)}


def first(train, seed, steps=8):
    stream = iter(train(seed))
    return [next(stream) for _ in range(steps)]


def noisy_loader(seed, workers=0):
    return DataLoader(Noisy(), batch_size=3, shuffle=True, drop_last=True, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_repeats_exactly(workers):
    train = data.from_loader(lambda seed: noisy_loader(seed, workers))
    steps = 4 if workers else 8
    one = first(train, 0, steps)
    torch.manual_seed(123)
    again, other = first(train, 0, steps), first(train, 1, steps)
    for (a, x), (b, y) in zip(one, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(x["x"], y["x"])
    assert any(not torch.equal(a, b) for (a, _), (b, _) in zip(one, other, strict=True))
    assert not torch.equal(one[0][1]["x"], one[2][1]["x"])  # the second epoch draws anew


def test_a_loaders_epochs_are_shuffled_anew():
    batches = first(data.from_loader(noisy_loader), 0, 40)
    epochs = [tuple(torch.cat([batches[2 * e][0], batches[2 * e + 1][0]]).tolist()) for e in range(20)]
    assert len(set(epochs)) > 15
    assert all(len(set(epoch)) == 6 for epoch in epochs)


def test_a_loader_leaves_the_callers_generators_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first(data.from_loader(noisy_loader), 0)
    data.val_from_loader(noisy_loader)(0)
    assert torch.equal(torch.rand(3), expected)


def test_batches_are_moved():
    train = data.from_loader(noisy_loader, device="meta")
    number, nested = first(train, 0, 1)[0]
    assert number.device.type == nested["x"].device.type == "meta"
    assert data.val_from_loader(noisy_loader, device="meta")(0)[0][0].device.type == "meta"


def test_an_empty_loader_is_an_error_not_a_hang():
    train = data.from_loader(lambda seed: DataLoader(Noisy(2), batch_size=3, drop_last=True))
    with pytest.raises(ValueError, match="gave no batch in epoch 0"):
        next(iter(train(0)))
    used_up = data.from_loader(lambda seed: iter([torch.zeros(1)]))
    with pytest.raises(ValueError, match="gave no batch in epoch 1"):
        first(used_up, 0, 2)


def test_a_loader_in_the_place_of_a_function_is_refused_at_once():
    loader = DataLoader(Noisy(2))
    for make in (data.from_loader, data.val_from_loader):
        with pytest.raises(TypeError, match=rf"{make.__name__}\(make_loader=.*DataLoader.*: expected a function"):
            make(loader)


def test_a_loader_feeds_an_engine():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, dtype=torch.float64, generator=generator)
    examples = TensorDataset(x, x.sum(1, keepdim=True))
    task = lh.Task(
        model=lambda: nn.Linear(3, 1).double(),
        loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
        train=data.from_loader(lambda seed: DataLoader(examples, batch_size=8, shuffle=True)),
        val=data.val_from_loader(lambda seed: DataLoader(examples, batch_size=15)),
    )
    got = [
        lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.05, windows=2)}, steps=9, engine=engine, seed=0).grad["lr"]
        for engine in (lh.Forward(), lh.Adjoint(store="all"), lh.Adjoint(store="sqrt"))
    ]
    assert torch.allclose(got[0], got[1], rtol=1e-9)
    assert torch.allclose(got[0], got[2], rtol=1e-9)


def test_batches_of_several_streams_are_made_in_one_go():
    on_device, _ = resident(pad=4)
    streams = [data.Stream(on_device, 8, seed, torch.arange(40), data.Augment()) for seed in (3, 4, 3)]
    for steps in ([0, 0, 0], [7, 2, 0]):
        images, labels = data.Stream._joined(streams, steps)
        for i, (stream, step) in enumerate(zip(streams, steps, strict=True)):
            assert torch.equal(images[i], stream[step][0])
            assert torch.equal(labels[i], stream[step][1])
    assert data.Stream._joined([streams[0], data.Stream(on_device, 9, 3)], [0, 0]) is None

"""Networks: their sizes, their beginnings, and that both exact engines agree about every one of them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longhorizon as lh
from longhorizon import models


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("wrn-16-1", {}, 175_066),
        ("wrn-28-10", {}, 36_479_194),
        ("wrn-40-2", {"classes": 100}, 2_255_156),
        ("resnet-18", {}, 11_173_962),
        ("lenet", {"channels": 1, "size": 28}, 44_426),
        ("lenet", {"size": 32}, 62_006),
        ("mlp-64-32", {"channels": 1, "size": 8}, 64 * 65 + 32 * 65 + 10 * 33),
        ("gpt-2-64", {"classes": 50, "size": 16}, 50 * 64 + 16 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64),
    ],
)
def test_numbers_of_parameters(name, shape, parameters):
    assert count(models.make(name, **shape)) == parameters


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [("wrn-10-1", {}, 32), ("resnet18", {}, 32), ("LeNet", {"size": 32}, 32), ("mlp-8", {"size": 32}, 32)],
)
def test_images_in_logits_out(name, shape, size):
    model = models.make(name, classes=7, **shape)
    assert model(torch.randn(2, 3, size, size)).shape == (2, 7)


def test_gpt_sees_no_future():
    model = models.GPT(11, 8, layers=2, width=16, heads=2).double()
    tokens = torch.randint(11, (3, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    one, other = model(tokens), model(changed)
    assert one.shape == (3, 8, 11)
    assert torch.allclose(one[:, :5], other[:, :5], atol=1e-12)
    assert (one[:, 5:] - other[:, 5:]).abs().amax((0, 2)).min() > 1e-6
    assert torch.allclose(model(tokens[:, :3]), one[:, :3], atol=1e-12)  # shorter texts are fine


def test_gpt_ties_its_embeddings_unless_told():
    tied, free = (models.GPT(11, 8, layers=1, width=16, heads=2, tied=t) for t in (True, False))
    assert count(free) == count(tied) + 11 * 16


def test_wide_blocks_shortcut():
    same, other = models.WideBlock(4, 4, 1, 0.0), models.WideBlock(4, 8, 2, 0.0)
    for block in (same, other):
        nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(same(x), x)  # the identity, not the activated input
    assert torch.allclose(other(x), other.shortcut(torch.relu(other.norm1(x))))


def test_dropout_is_for_training():
    for model, x in (
        (models.WideResNet(10, 1, dropout=0.5), torch.randn(2, 3, 8, 8)),
        (models.GPT(5, 4, 1, 8, 2, dropout=0.5), torch.randint(5, (2, 4))),
    ):
        assert not torch.equal(model(x), model(x))
        model.eval()
        assert torch.equal(model(x), model(x))


# Initialisation


@pytest.mark.parametrize("init", ["he", "xavier"])
@pytest.mark.parametrize("name", ["lenet", "wrn-16-4", "resnet-18"])
def test_initialisation_is_what_it_says(name, init):
    model = models.make(name, init=init)
    checked = 0
    for part in model.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            area = part.weight[0, 0].numel()
            fan_in, fan_out = part.weight.shape[1] * area, part.weight.shape[0] * area
            if init == "xavier":
                variance = 2 / (fan_in + fan_out)
            else:
                variance = 2 / fan_out if isinstance(part, nn.Conv2d) else 1 / fan_in
            if part.weight.numel() > 2000:
                assert part.weight.std().item() == pytest.approx(math.sqrt(variance), rel=0.1)
                checked += 1
            assert part.bias is None or not part.bias.any()
        elif isinstance(part, nn.BatchNorm2d):
            assert part.weight.eq(1).all()
            assert not part.bias.any()
    assert checked >= 2


def test_gpt_starts_small():
    model = models.GPT(100, 32, layers=8, width=64, heads=2)
    assert model.tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[3].project2.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    loss = F.cross_entropy(model(torch.randint(100, (4, 32))).flatten(0, 1), torch.randint(100, (128,)))
    assert loss.item() == pytest.approx(math.log(100), rel=0.02)


def test_a_seed_makes_a_model():
    torch.manual_seed(3)
    one = models.make("wrn-10-1")
    torch.manual_seed(3)
    again = models.make("wrn-10-1")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, models.make("wrn-10-1").fc.weight)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: models.make("wrn-17-1"), r"depth=17, width=1\): expected a depth of 6 n \+ 4"),
        (lambda: models.make("wrn-4-1"), "depth=4"),
        (lambda: models.make("wrn-16-0"), "width=0"),
        (lambda: models.make("resnet-50"), "unknown model 'resnet-50'. Did you mean 'resnet-18'"),
        (lambda: models.make("mlp"), "unknown model 'mlp'. Its form is 'mlp-WIDTH-…'"),
        (lambda: models.make("wrn-16"), "unknown model 'wrn-16'. Its form is 'wrn-DEPTH-WIDTH'"),
        (lambda: models.make("mlp-0"), r"hidden=\(0,\), classes=10\): expected widths of at least 1"),
        (lambda: models.make("gpt-0-32"), r"GPT\(layers=0, width=32, heads=1\): expected at least 1 of each"),
        (lambda: models.make("gpt-1-0"), "width=0"),
        (lambda: models.make("lenet", size=15), "LeNet\\(size=15\\)"),
        (lambda: models.make("lenet", init="zero"), "init='zero': expected 'he' or 'xavier'"),
        (lambda: models.make("gpt-1-32", init="he"), "init='he'"),
        (lambda: models.GPT(5, 4, width=10, heads=3), "width=10, heads=3"),
        (lambda: models.GPT(5, 4)(torch.zeros(1, 5).long()), "5 tokens is longer than the model's context=4"),
    ],
)
def test_what_does_not_fit_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


# Under the engines


def image_batches(size: int, channels: int, classes: int):
    def train(seed):
        generator = torch.Generator().manual_seed(seed)
        make = lambda n: (  # noqa: E731
            torch.randn(n, channels, size, size, dtype=torch.float64, generator=generator),
            torch.randint(classes, (n,), generator=generator),
        )
        return [make(4) for _ in range(6)]

    return train


def text_batches(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(7, (3, 6), generator=generator) for _ in range(6)]


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def predict(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


ENGINE_CASES = {
    "mlp": (lambda: models.MLP(32, (5,), 3, torch.tanh), classify, image_batches(4, 2, 3)),
    "lenet": (lambda: models.make("lenet", classes=3, channels=1, size=16), classify, image_batches(16, 1, 3)),
    "wrn": (lambda: models.make("wrn-10-1", classes=3, channels=1, size=8), classify, image_batches(8, 1, 3)),
    "resnet": (lambda: models.ResNet18(3, 1, width=2), classify, image_batches(8, 1, 3)),
    "gpt": (lambda: models.GPT(7, 5, layers=1, width=8, heads=2), predict, text_batches),
    "gpt, untied, dropout": (
        lambda: models.GPT(7, 5, layers=1, width=8, heads=2, dropout=0.2, tied=False),
        predict,
        text_batches,
    ),
}


@pytest.mark.parametrize("case", ENGINE_CASES)
def test_forward_and_adjoint_agree(case):
    make, loss, batches = ENGINE_CASES[case]
    task = lh.Task(lambda: make().double(), loss, batches, lambda seed: batches(seed + 100)[:2])
    hypers = {"lr": lh.Hyper(0.05, windows=2), "momentum": lh.Hyper(0.8), "weight_decay": lh.Hyper(1e-2)}
    forward, adjoint = (
        lh.hypergradient(task, lh.sgd(), hypers, steps=4, engine=engine, seed=0)
        for engine in (lh.Forward(), lh.Adjoint())
    )
    for key in hypers:
        assert forward.grad[key].abs().max() > 1e-6
        torch.testing.assert_close(forward.grad[key], adjoint.grad[key], rtol=1e-9, atol=1e-12)

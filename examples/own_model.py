"""The smallest use of the library on a model and data of your own: what to give it, and what comes back.

Here the data are scikit-learn's digits and the model a small convolutional network; replace the four functions by
yours. The learning rate gets three values along the run, momentum and weight decay one each. All of them start at zero,
and a few outer steps move them by the sign of their hypergradients. Takes about ten seconds.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import longhorizon as lh

STEPS, OUTER = 60, 8

images, labels = (torch.as_tensor(x) for x in load_digits(return_X_y=True))
images = images.float().reshape(-1, 1, 8, 8) / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
images, labels = images[order], labels[order]


def model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(72, 10)),
    )


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def train(seed):
    """One batch per step, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(1000, (STEPS, 64), generator=generator)
    return [(images[pick], labels[pick]) for pick in picks]


def val(seed):
    return [(images[1000:], labels[1000:])]


task = lh.Task(model=model, loss=loss, train=train, val=val)
hypers = {
    "lr": lh.Hyper(0.0, windows=3, step=0.1, low=0.0, high=1.0),
    "momentum": lh.Hyper(0.0, step=0.2, low=0.0, high=0.99),
    "weight_decay": lh.Hyper(0.0, step=4e-4, low=0.0, high=0.1),
}

# The outer loop by hand: the sign of the hypergradient, half the distance after a sign flips.
values = {key: hyper.values() for key, hyper in hypers.items()}
gamma = {key: torch.full_like(values[key], hyper.step) for key, hyper in hypers.items()}
before = {key: torch.zeros_like(values[key]) for key in hypers}
for outer in range(OUTER):
    h = lh.hypergradient(task, lh.sgd(), hypers, steps=STEPS, values=values)
    shown = "   ".join(f"{key} " + " ".join(f"{v:.3g}" for v in values[key].tolist()) for key in hypers)
    print(f"run {outer}   val loss {h.val_loss:.4f}   {shown}   [{h.status}]")
    for key, hyper in hypers.items():
        sign = h.grad[key].nan_to_num().sign()
        gamma[key] = torch.where(sign * before[key] < 0, gamma[key] / 2, gamma[key])
        values[key] = (values[key] - sign * gamma[key]).clamp(hyper.low, hyper.high)
        before[key] = sign

"""The library on a model and data of your own: what to give it, what comes back, what it is worth, and how to use it.

Here the data are scikit-learn's digits and the model a small convolutional network; replace the functions by yours. The
learning rate gets three values along the run, momentum and weight decay one each. All of them start at zero, and eight
outer steps move them. Takes about ten seconds.
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
    return [(images[1000:1400], labels[1000:1400])]


def test():
    return [(images[1400:], labels[1400:])]


def accuracy(model, batch):
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


task = lh.Task(model=model, loss=loss, train=train, val=val, test=test, metrics=accuracy)
hypers = {
    "lr": lh.Hyper(0.0, windows=3, step=0.1, low=0.0, high=1.0),
    "momentum": lh.Hyper(0.0, step=0.2, low=0.0, high=0.99),
    "weight_decay": lh.Hyper(0.0, step=4e-4, low=0.0, high=0.1),
}


def told(step):
    print(f"outer step {step.index + 1}: validation loss {step.val_loss:.4f}, accuracy {step.metrics['accuracy']:.4f}")


tuned = lh.tune(task, lh.sgd(), hypers, steps=STEPS, outer_steps=OUTER, on_step=told)  # dir= keeps it all on disk
for name, values in tuned.schedule.values.items():
    print(f"{name:<13}", *(f"{value:.3g}" for value in values))

# What it is worth: trained from scratch with it, and with what people would guess, three times each.
guess = {"lr": (0.1, 0.1, 0.1), "momentum": (0.9,), "weight_decay": (5e-4,)}
for name, schedule in (("learnt", tuned.schedule), ("guessed", lh.Schedule(guess, {"name": "sgd"}))):
    found = lh.retrain(task, lh.sgd(), hypers, schedule, steps=STEPS, seeds=3)
    print(f"test, {name}:", *(f"{key} {mean:.4f} ± {spread:.4f}" for key, (mean, spread) in found.summary().items()))

# And back into plain PyTorch.
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = tuned.schedule.attach(optimizer, steps=200)  # at another length: it stretches
for batch in train(seed=1):
    optimizer.zero_grad()
    loss(net, batch).backward()
    optimizer.step()
    scheduler.step()

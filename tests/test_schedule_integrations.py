"""A learnt schedule inside Lightning and inside Hugging Face's Trainer: every step sees the values it should.

Neither package is a dependency of ours. In an environment that has them:

    pip install -c constraints.txt lightning transformers accelerate
    pytest tests/test_schedule_integrations.py
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longhorizon as lh

STEPS = 12
SCHEDULE = lh.Schedule(
    {"lr": (0.1, 0.3, 0.2), "momentum": (0.0, 0.9), "weight_decay": (1e-3,), "lr/head": (0.05, 0.01)},
    {"name": "sgd"},
    ("lr", "momentum", "weight_decay", "lr/head"),
)
TINY = torch.finfo(torch.float64).tiny  # what `attach` sets for a momentum of exactly 0
EXPECTED = [
    [
        (SCHEDULE.value(lr, t, STEPS), SCHEDULE.value("momentum", t, STEPS) or TINY, 1e-3)
        for lr in ("lr", "lr/head")  # the groups of `make_optimizer`
    ]
    for t in range(STEPS)
]

pytestmark = pytest.mark.filterwarnings("default")  # the packages' own


class Net(nn.Module):
    """Trunk and head; returns its loss, which is what the Trainer asks of a model."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, labels):
        logits = self.head(torch.tanh(self.trunk(x)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Examples(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 4, generator=generator)
        self.y = torch.randint(3, (count,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


def make_optimizer(net, seen):
    """SGD with a named group for the head; `seen` gets what every step is taken with."""
    optimizer = torch.optim.SGD(
        [{"params": net.trunk.parameters()}, {"params": net.head.parameters(), "name": "head"}], lr=1.0
    )
    optimizer.register_step_pre_hook(
        lambda o, *_: seen.append([(g["lr"], g["momentum"], g["weight_decay"]) for g in o.param_groups])
    )
    return optimizer


def plain_weights(data):
    """The same training in a loop of one's own."""
    torch.manual_seed(1)
    net = Net()
    optimizer = make_optimizer(net, [])
    scheduler = SCHEDULE.attach(optimizer, steps=STEPS)
    for t in range(STEPS):
        low = 4 * t % len(data)
        part = slice(low, low + 4)
        optimizer.zero_grad()
        net(data.x[part], data.y[part])["loss"].backward()
        optimizer.step()
        scheduler.step()
    return net.state_dict()


def assert_same(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def lightning_module(lightning, seen):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.net = Net()

        def training_step(self, batch, _):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            optimizer = make_optimizer(self.net, seen)
            scheduler = SCHEDULE.attach(optimizer, steps=int(self.trainer.estimated_stepping_batches))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module()


def lightning_fit(lightning, folder, checkpoint=None):
    """Two epochs, saved after each, from the start or from a checkpoint."""
    seen = []
    module = lightning_module(lightning, seen)
    keep = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1, every_n_epochs=1)
    trainer = lightning.Trainer(
        max_epochs=2,
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        callbacks=[keep],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(Examples(4 * STEPS // 2), batch_size=4)
    trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=True)
    return module, seen


def test_lightning_sees_the_schedule_at_every_step(tmp_path):
    lightning = pytest.importorskip("lightning")
    module, seen = lightning_fit(lightning, tmp_path)
    assert seen == EXPECTED
    assert_same(module.net.state_dict(), plain_weights(Examples(4 * STEPS // 2)))


def test_lightning_resumes_in_the_middle_of_a_schedule(tmp_path):
    lightning = pytest.importorskip("lightning")
    lightning_fit(lightning, tmp_path)
    module, seen = lightning_fit(lightning, tmp_path, tmp_path / "epoch=0.ckpt")
    assert seen == EXPECTED[STEPS // 2 :]
    assert_same(module.net.state_dict(), plain_weights(Examples(4 * STEPS // 2)))


def trainer_train(transformers, folder, resume=None, stop_at=None, **more):
    seen = []
    torch.manual_seed(1)
    net = Net()
    optimizer = make_optimizer(net, seen)
    settings = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "max_grad_norm": 0.0,  # the schedule was not learnt with a clipped gradient
        "train_sampling_strategy": "sequential",
        "save_strategy": "steps",
        "save_steps": STEPS // 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    arguments = transformers.TrainingArguments(**settings | more)
    scheduler = SCHEDULE.attach(optimizer, steps=STEPS)

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == stop_at

    trainer = transformers.Trainer(
        model=net,
        args=arguments,
        train_dataset=Examples(4 * STEPS),
        optimizers=(optimizer, scheduler),
        callbacks=[Stop()] if stop_at else [],
    )
    trainer.train(resume_from_checkpoint=resume)
    return net, seen


def test_trainer_sees_the_schedule_at_every_step(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    net, seen = trainer_train(transformers, tmp_path)
    assert seen == EXPECTED
    assert_same(net.state_dict(), plain_weights(Examples(4 * STEPS)))


def test_trainer_steps_once_per_accumulated_gradient(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    more = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    _, seen = trainer_train(transformers, tmp_path, **more)
    assert seen == EXPECTED


def test_trainer_resumes_in_the_middle_of_a_schedule(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    _, first = trainer_train(transformers, tmp_path, stop_at=STEPS // 2)
    net, rest = trainer_train(transformers, tmp_path, resume=True)
    assert first + rest == EXPECTED
    assert_same(net.state_dict(), plain_weights(Examples(4 * STEPS)))

"""Other ways to the same hypergradient, none of which knows the engines.

extrapolated   central differences at two distances
backprop       plain backpropagation through the graph of the whole run, updates typed in by hand
recursion      the paper's Z/C recursion for SGD with momentum, dense Hessians
closed_form    a quadratic: products of 3 × 3 matrices, in numpy
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import longhorizon as lh
from longhorizon import seeds
from problems import CURVATURE, TARGET, Case, Setting, compute, hypers_for


def extrapolated(case: Case, setting: Setting, **options: Any) -> dict[str, Tensor]:
    """Central differences D(δ) at δ and 2δ, combined to (4 D(δ) − D(2δ)) / 3.

    The combination cancels the δ² term of the truncation error and leaves δ⁴. With δ = 1e-4 of the value, rounding
    (about 1e-16 of the loss over δ) is near 1e-11 and truncation below it unless the run is close to chaotic, so that
    1e-6 tests the engines and not the reference.
    """
    near, far = (compute(case, setting, lh.FiniteDifference(eps), **options).grad for eps in (1e-4, 2e-4))
    return {key: (4 * near[key] - far[key]) / 3 for key in near}


# --- backpropagation through the graph ---


def _sgd(params: list[Tensor], grads: list[Tensor], memory: Any, t: int, h: dict[str, Any], nesterov: bool) -> Any:
    moved, velocities = [], []
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        g = g + h["weight_decay"] * p
        v = g if t == 0 else h["momentum"] * memory[i] + (1 - h["dampening"]) * g
        moved.append(p - h["lr"] * (g + h["momentum"] * v if nesterov else v))
        velocities.append(v)
    return moved, velocities


def _adam(params: list[Tensor], grads: list[Tensor], memory: Any, t: int, h: dict[str, Any], decoupled: bool) -> Any:
    moved, new = [], []
    b1, b2 = h["beta1"], h["beta2"]
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        m, s = (torch.zeros_like(p), torch.zeros_like(p)) if t == 0 else memory[i]
        if decoupled:
            p = p - h["lr"] * h["weight_decay"] * p
        else:
            g = g + h["weight_decay"] * p
        m, s = b1 * m + (1 - b1) * g, b2 * s + (1 - b2) * g**2
        m_hat, s_hat = m / (1 - b1 ** (t + 1)), s / (1 - b2 ** (t + 1))
        moved.append(p - h["lr"] * m_hat / (torch.sqrt(s_hat) + h["eps"]))
        new.append((m, s))
    return moved, new


def _clipped(params: list[Tensor], grads: list[Tensor], memory: Any, t: int, h: dict[str, Any]) -> Any:
    level = h["grad_clip"]
    grads = [torch.where(g > level, level, torch.where(g < -level, -level, g)) for g in grads]
    return _sgd(params, grads, memory, t, h, nesterov=False)


def _norm_clipped(params: list[Tensor], grads: list[Tensor], memory: Any, t: int, h: dict[str, Any]) -> Any:
    norm = torch.cat([g.reshape(-1) for g in grads]).norm()
    if norm + 1e-6 > h["grad_clip"]:
        grads = [g * (h["grad_clip"] / (norm + 1e-6)) for g in grads]
    return _sgd(params, grads, memory, t, h, nesterov=False)


UPDATES = {
    "sgd": lambda *args: _sgd(*args, nesterov=False),
    "sgd-from-zero": lambda *args: _sgd(*args, nesterov=False),
    "sgd-negative": lambda *args: _sgd(*args, nesterov=False),
    "nesterov": lambda *args: _sgd(*args, nesterov=True),
    "adam": lambda *args: _adam(*args, decoupled=False),
    "adam-negative": lambda *args: _adam(*args, decoupled=False),
    "adamw": lambda *args: _adam(*args, decoupled=True),
    "clipped": _clipped,
    "clipped-norm": _norm_clipped,
}


def backprop(case: Case, setting: Setting, rule: str, seed: int = 3) -> dict[str, Tensor]:
    """Keep the whole graph of the run and ask autograd for the answer. Dropout masks come from the step's seed."""
    task, hypers, steps = case.task, hypers_for(case, setting), case.steps
    values = {key: hyper.values().requires_grad_() for key, hyper in hypers.items()}
    torch.manual_seed(seeds.mix(seed, seeds.INIT))
    model = task.model()
    names, params = zip(*((n, p.detach().clone().requires_grad_()) for n, p in model.named_parameters()), strict=True)
    params, memory = list(params), None
    batches = task.train(seed)

    def loss_of(params: list[Tensor], batch: Any, hypers: dict[str, Tensor], loss: Any) -> Tensor:
        args = (batch, hypers) if task.has_learnt_loss else (batch,)
        return loss(lambda x: functional_call(model, dict(zip(names, params, strict=True)), (x,)), *args)

    now: dict[str, Any] = {}
    for t in range(steps):
        now = {key: v[t * len(v) // steps] for key, v in values.items()}
        torch.manual_seed(seeds.mix(seed, t, seeds.STEP))
        model.train()
        with sdpa_kernel(SDPBackend.MATH):  # the only attention that torch can differentiate twice
            loss = loss_of(params, batches[t], now, task.loss)
        grads = list(torch.autograd.grad(loss, params, create_graph=True))
        params, memory = UPDATES[rule](params, grads, memory, t, dict(setting.rule.defaults) | now)
    torch.manual_seed(seeds.mix(seed, steps, seeds.VALIDATE))
    model.train(task.val_mode == "train")
    losses = [loss_of(params, batch, now, task.val_loss or task.loss) for batch in task.val(seed)]
    got = torch.autograd.grad(sum(losses) / len(losses), list(values.values()))
    return dict(zip(values, got, strict=True))


# --- the paper's recursion ---


def recursion(
    loss: Any, start: Tensor, batches: list[Any], val: Any, values: dict[str, list[float]], *, as_printed: bool = False
) -> dict[str, Tensor]:
    """Z = dθ/dλ and C = dv/dλ for SGD with momentum, a column per step and hyperparameter.

        C_t = β C_{t-1} + (H + ξ) Z_{t-1} + δ_t(∂v_t/∂λ)        Z_t = Z_{t-1} − α C_t − δ_t(v_t) [α only]

    Args:
        loss: (flat weights, batch) -> scalar.
        values: lr, momentum and weight_decay, a value per step.
        as_printed: take ∂v_t/∂β_t for v_t, as Appendix A prints it, in place of v_{t-1}.
    """
    steps, theta, v = len(batches), start, torch.zeros_like(start)
    columns = {key: (start.new_zeros(len(start), steps), start.new_zeros(len(start), steps)) for key in values}
    for t, batch in enumerate(batches):
        lr, momentum, decay = (values[key][t] for key in ("lr", "momentum", "weight_decay"))
        gradient = torch.autograd.functional.jacobian(lambda w, b=batch: loss(w, b), theta)
        hessian = torch.autograd.functional.hessian(lambda w, b=batch: loss(w, b), theta)
        new_v = momentum * v + gradient + decay * theta
        direct = {"lr": torch.zeros_like(v), "momentum": new_v if as_printed else v, "weight_decay": theta}
        for key, (Z, C) in columns.items():
            C = momentum * C + hessian @ Z + decay * Z
            C[:, t] += direct[key]
            Z = Z - lr * C
            if key == "lr":
                Z[:, t] -= new_v
            columns[key] = Z, C
        theta, v = theta - lr * new_v, new_v
    slope = torch.autograd.functional.jacobian(lambda w: loss(w, val), theta)
    return {key: slope @ Z for key, (Z, _) in columns.items()}


# --- a quadratic ---


def closed_form(values: dict[str, list[float]], start: Tensor) -> tuple[float, dict[str, np.ndarray]]:
    """The final loss of Σ a (θ − c)² / 2 under SGD with momentum, and its derivative by every step's values.

    Per coordinate the run is linear: x = (θ, v, 1) goes to M x with

        v' = β v + (a + ξ) θ − a c        θ' = θ − α v'

    so x_T = M_T … M_1 x_0 and ∂x_T/∂λ_t = M_T … M_{t+1} (∂M_t/∂λ_t) M_{t-1} … M_1 x_0.
    """
    steps = len(values["lr"])
    total, grads = 0.0, {key: np.zeros(steps) for key in values}
    for a, c, w in zip(CURVATURE.tolist(), TARGET.tolist(), start.tolist(), strict=True):
        matrices, slopes = [], []
        for t in range(steps):
            lr, beta, decay = (values[key][t] for key in ("lr", "momentum", "weight_decay"))
            velocity = np.array([a + decay, beta, -a * c])
            matrices.append(np.array([np.array([1.0, 0, 0]) - lr * velocity, velocity, [0, 0, 1]]))
            by_beta, by_decay = np.array([0.0, 1, 0]), np.array([1.0, 0, 0])
            none = np.zeros(3)
            slopes.append(
                {
                    "lr": np.array([-velocity, none, none]),
                    "momentum": np.array([-lr * by_beta, by_beta, none]),
                    "weight_decay": np.array([-lr * by_decay, by_decay, none]),
                }
            )
        states = [np.array([w, 0.0, 1.0])]
        for m in matrices:
            states.append(m @ states[-1])
        error = states[-1][0] - c
        total += a * error**2 / 2
        row = np.array([a * error, 0.0, 0.0])  # ∂L/∂x_T, then pulled back through M_T, M_{T-1}, …
        for t in reversed(range(steps)):
            for key in values:
                grads[key][t] += row @ slopes[t][key] @ states[t]
            row = row @ matrices[t]
    return total, grads

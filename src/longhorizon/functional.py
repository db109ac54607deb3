"""A stateful `nn.Module` and its loss as one pure function of parameters, buffers, batch and hyperparameters.

BatchNorm needs care: torch updates running statistics in place and outside autograd, so a validation loss in
eval mode would silently lose their derivative. Ours are computed out of place, as a part of the state.
Losses whose gradient torch cannot push a tangent through have plain forms here too: see `PlainLosses`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from longhorizon import cuda, lane_norm
from longhorizon.normalise import normalise
from longhorizon.rules import Params
from longhorizon.task import Task, call_loss

Buffers = dict[str, Tensor]
Part = Literal["train", "val"]


class Functional:
    """The model and losses of a task as pure functions.

    Args:
        task: where the losses come from.
        module: a fresh model; it is kept for its structure, its own tensors are read once.
    """

    def __init__(self, task: Task, module: nn.Module):
        check_module(module)
        self._forwards = [
            (part, partial(ours, part))
            for part in module.modules()
            for kind, ours in _OURS.items()
            if isinstance(part, kind) and (kind is _BatchNorm or (type(part) is kind and "forward" not in vars(part)))
        ]
        self.module = module
        self._task = task
        names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        held: list[dict[str, Any]] = [place for part in module.modules() for place in (part._parameters, part._buffers)]
        self._places = [(place, key, names[id(t)]) for place in held for key, t in place.items() if t is not None]
        module.train()

    @property
    def has_learnt_loss(self) -> bool:
        """Whether the loss takes hyperparameters."""
        return self._task.has_learnt_loss

    def initial(self) -> tuple[Params, Buffers]:
        """Copies of the trainable parameters and of all buffers, by name."""
        params = {name: p.detach().clone() for name, p in self.module.named_parameters() if p.requires_grad}
        buffers = {name: b.detach().clone() for name, b in self.module.named_buffers()}
        return params, buffers

    def loss(
        self, params: Params, buffers: Buffers, batch: Any, hypers: Mapping[str, Tensor], part: Part = "train"
    ) -> tuple[Tensor, Buffers]:
        """The loss of a batch, and the buffers after it."""
        task, state = self._task, _copies(buffers) | params
        loss = task.val_loss if part == "val" and task.val_loss is not None else task.loss
        self._set_mode(training=part == "train" or task.val_mode == "train")
        with self._holding(state):
            value = call_loss(loss, self.module, batch, hypers)
        return value, {name: state[name] for name in buffers}

    def again(self, params: Params, buffers: Buffers) -> AbstractContextManager[None]:
        """The module with these tensors in it, for a backward pass: it runs those parts again that are checkpointed.

        What they write into the buffers then is lost; the pass forward has written it already.
        """
        return self._holding(_copies(buffers) | params)

    @contextmanager
    def _holding(self, tensors: dict[str, Tensor]) -> Iterator[None]:
        """The module with these tensors in it, and our way through some layers; afterwards it is the user's again.

        A tensor that it replaces is replaced in the dictionary, too. As torch's `functional_call`, which however leaves
        the tensors in a module that is used under two names.
        """
        own = [place[key] for place, key, _ in self._places]
        ways = [(vars(part), vars(part).get("forward"), ours) for part, ours in self._forwards]
        try:
            for attributes, _, ours in ways:
                attributes["forward"] = ours
            for place, key, name in self._places:
                place[key] = tensors.get(name, place[key])
            with SameMasks():
                yield
        finally:
            for (place, key, name), tensor in zip(self._places, own, strict=True):
                if name in tensors:
                    tensors[name] = place[key]
                place[key] = tensor
            for attributes, before, _ in ways:
                attributes.pop("forward") if before is None else attributes.update(forward=before)

    def measure(self, params: Params, buffers: Buffers, batch: Any) -> Mapping[str, Tensor]:
        """The task's metrics on a batch, in eval mode."""
        if self._task.metrics is None:
            return {}
        self._set_mode(training=False)
        with torch.no_grad(), self._holding(buffers | params):
            found: Any = call_loss(self._task.metrics, self.module, batch, {})  # type: ignore[arg-type]
        return found  # type: ignore[no-any-return]

    def _set_mode(self, training: bool) -> None:
        if self.module.training != training:
            self.module.train(training)


class PlainLosses(TorchFunctionMode):
    """Within it, `mse_loss` and `huber_loss` are computed by plain operations.

    A tangent of the fused ones' gradient fails in torch if the target has none ("ZeroTensors are immutable"), does not
    exist, or ends the process while it is traced.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _PLAIN.get(func, func)(*args, **(kwargs or {}))


class SameMasks(TorchFunctionMode):
    """Within it, what is drawn in the form of a tensor does not depend on how that lies in memory.

    Under `torch.func` it lies otherwise, and a step would draw other numbers there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _DRAWN.get(func, func)(*args, **(kwargs or {}))


def _copies(buffers: Buffers) -> Buffers:
    """Clones, because a user's module may write into its buffers."""
    return {name: b.clone() for name, b in buffers.items()}


def check_module(module: object) -> None:
    """Refuse, by name, what cannot be differentiated."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"Task.model returned {type(module).__name__}: expected an nn.Module.")
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("the model has no parameters to train; check that `model` returns it with requires_grad on.")
    for name, p in module.named_parameters():
        if p.requires_grad and not p.is_floating_point():
            raise TypeError(f"parameter {name!r} is {p.dtype}: only real floating-point parameters are supported.")
        if p.requires_grad and (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)):
            raise TypeError(
                f"parameter {name!r} has a gradient hook, which would not be called: training is a function of the "
                "weights' values alone. Change the gradient by the loss or by the rule, as lh.clipped does."
            )
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise TypeError(f"module {name!r} is SyncBatchNorm, whose statistics cross processes: use BatchNorm here.")
        if isinstance(part, _BatchNorm) and (type(part).forward is not _BatchNorm.forward or "forward" in vars(part)):
            raise TypeError(
                f"module {name!r} is {type(part).__name__}, a BatchNorm with a forward of its own, whose running "
                "statistics torch updates outside autograd: derive it from nn.Module and write them out of place."
            )
        if any(isinstance(hook, WeightNorm) for hook in part._forward_pre_hooks.values()):
            raise TypeError(
                f"module {name!r} is weight-normed by a hook, whose second derivative is wrong in torch: use "
                "torch.nn.utils.parametrizations.weight_norm."
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise TypeError(
                f"module {name!r} is {type(part).__name__} with sparse=True: rules take dense gradients; leave it out."
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise TypeError(
                f"module {name!r} is {type(part).__name__} with max_norm, which rescales its weights in place, outside "
                "autograd: leave max_norm out and scale the rows that are looked up."
            )
        if isinstance(part, _InstanceNorm) and part.track_running_stats:
            raise TypeError(
                f"module {name!r} is {type(part).__name__} with running statistics, which torch updates outside "
                "autograd: set track_running_stats=False."
            )
        if any(nn.parameter.is_lazy(p) for p in part.parameters(recurse=False)):
            raise TypeError(f"module {name!r} is {type(part).__name__}: run one batch through it inside Task.model.")


def _batch_norm(m: Any, x: Tensor) -> Tensor:
    """BatchNorm whose running statistics are a differentiable function of their past and of the batch."""
    m._check_input_dim(x)
    if not m.training and m.running_mean is not None:
        shape = [1, -1] + [1] * (x.ndim - 2)
        scale = (m.running_var + m.eps).rsqrt()
        scale = scale if m.weight is None else scale * m.weight
        shift = -m.running_mean * scale
        shift = shift if m.bias is None else shift + m.bias
        normed: Tensor = x * scale.view(shape) + shift.view(shape)
        return normed
    if cuda.is_half() and lane_norm.suits(x):
        return _tracked(m, x, lane_norm.lane_norm(x, m.weight, m.bias, m.eps))
    if not x.is_cuda:
        if m.training and m.running_mean is not None:
            var, mean = torch.var_mean(x, [d for d in range(x.ndim) if d != 1], correction=1)
            _track(m, mean, var)
        return F.batch_norm(x, None, None, m.weight, m.bias, training=True, eps=m.eps)
    # On a GPU, in plain operations, which the compiler joins with what stands around them.
    return _tracked(m, x, normalise(x, m.weight, m.bias, m.eps, rough=cuda.is_half()))


def _tracked(m: Any, x: Tensor, found: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What BatchNorm makes of a batch, with its mean and variance, which move the running statistics."""
    (normed, mean, var), count = found, x.numel() // x.shape[1]
    if count < 2:
        raise ValueError(f"BatchNorm needs more than one value per channel to train on, got {tuple(x.shape)}.")
    if m.training and m.running_mean is not None:
        _track(m, mean, var * (count / (count - 1)))
    return normed


def _track(m: Any, mean: Tensor, var: Tensor) -> None:
    """Move the running statistics; without a momentum, a plain average over all batches so far."""
    m.num_batches_tracked = m.num_batches_tracked + 1
    rate: Any = m.momentum if m.momentum is not None else mean.new_ones(()) / m.num_batches_tracked
    m.running_mean = (1 - rate) * m.running_mean + rate * mean
    m.running_var = (1 - rate) * m.running_var + rate * var


def _weight_norm(m: Any, g: Tensor, v: Tensor) -> Tensor:
    """Weight normalisation in plain operations: torch's own has a wrong second derivative."""
    others = [d for d in range(v.ndim) if m.dim == -1 or d != m.dim % v.ndim]
    return v * (g / v.square().sum(others, keepdim=True).sqrt())


_OURS: dict[type, Callable[..., Tensor]] = {_BatchNorm: _batch_norm, _WeightNorm: _weight_norm}


def _mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    if weight is not None or size_average is not None or reduce is not None:
        return F.mse_loss(input, target, size_average, reduce, reduction, weight)  # type: ignore[call-arg]
    return _reduced((input - target).square(), reduction)


def _huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    off = (input - target).abs()
    each = torch.where(off < delta, 0.5 * off.square(), delta * (off - 0.5 * delta))
    return _reduced(each if weight is None else each * weight, reduction)


def _reduced(each: Tensor, reduction: str) -> Tensor:
    return each.mean() if reduction == "mean" else each.sum() if reduction == "sum" else each


def _without_alpha(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`alpha=` ends the process when a tangent of it is traced."""

    def call(*args: Any, alpha: Any = 1, **kwargs: Any) -> Tensor:
        return (
            func(*args, **kwargs) if isinstance(alpha, int) and alpha == 1 else func(args[0], alpha * args[1], **kwargs)
        )

    return call


def _normalize(
    input: Tensor, p: float = 2.0, dim: int | tuple[int, ...] = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Tensor:
    """Spectral normalisation writes its vectors by `out=`, through which no tangent goes."""
    found = F.normalize(input, p, dim, eps)  # type: ignore[arg-type]
    return found if out is None else out.copy_(found)


_SUMS = (torch.add, torch.sub, Tensor.add, Tensor.add_, Tensor.sub, Tensor.sub_)
_PLAIN: dict[Any, Callable[..., Tensor]] = {F.mse_loss: _mse_loss, F.huber_loss: _huber_loss, F.normalize: _normalize}
_PLAIN |= {func: _without_alpha(func) for func in _SUMS}


def _contiguous_first(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return func(input.contiguous(), *args, **kwargs)

    return call


def _dropout(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        dropped = func(input.contiguous(), p, training)
        return input.copy_(dropped) if inplace else dropped

    return call


_DRAWN: dict[Any, Callable[..., Tensor]] = {F.dropout: _dropout(F.dropout), F.alpha_dropout: _dropout(F.alpha_dropout)}

_DRAWN |= {func: _contiguous_first(func) for func in (torch.dropout, torch.alpha_dropout)}

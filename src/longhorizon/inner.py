"""One pure optimizer step, and how it is put together from a model, a rule and hyperparameters.

    gradient: params, buffers, batch, hypers -> grads, buffers, loss       the expensive part, the user's model
    update:   params, grads, memory, hypers  -> params, memory             the rule, cheap

Everything else in the package is a derivative of these two: the forward engine is their JVP, the adjoint
their VJP. Nothing in here, or there, knows any optimizer by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from longhorizon import tree
from longhorizon.functional import Buffers, Functional
from longhorizon.hypers import Hyper, argument, in_short, nearest, select, step_size
from longhorizon.rules import Params, Range, Rule, Update

_WHOLE = ("all parameters",)  # the name of the vector of a group
Hypers = dict[str, Tensor]  # key -> 0-dim tensor, the values of one step


class State(NamedTuple):
    """Everything that a step changes."""

    params: Params
    buffers: Buffers
    memory: tuple[Any, ...]  # the rule's state, one per group


def busy(state: State) -> State:
    """The same with something in the rule's memory: empty, as at the start, it hides tangents, or divides by zero."""
    return state._replace(memory=tree.map(lambda x: 0.5 + x.abs() if tree.is_real(x) else x, tree.random(state.memory)))


@dataclass(frozen=True)
class Group:
    """Parameters that share all hyperparameters, like a parameter group of `torch.optim`."""

    names: tuple[str, ...]
    sources: Mapping[str, str | float]  # rule argument -> key in `hypers`, or the rule's default

    def pick(self, tensors: Params) -> Params:
        return {name: tensors[name] for name in self.names}

    def values(self, hypers: Hypers) -> dict[str, Any]:
        return {arg: hypers[s] if isinstance(s, str) else s for arg, s in self.sources.items()}


class Inner:
    """The inner step of a task under a rule."""

    def __init__(self, functional: Functional, rule: Rule, groups: tuple[Group, ...]):
        self.functional, self.rule, self.groups = functional, rule, groups
        self.cache: dict[Any, Any] = {}  # traced steps, by engine and shape
        self.probed: set[bool] = set()  # whether its derivative was looked at, forwards or backwards
        self.checked: list[tuple[Any, ...]] = []  # data and hyperparameters that its losses were tried with
        self.step_bytes: dict[Any, int] = {}  # that a step makes, by the kind of run (lanes.py)
        self.side_by_side: dict[Any, bool] = {}  # whether runs of a kind can be (lanes.py)
        self._tried = False  # whether an elementwise rule is one, which matters on a GPU

    def start(self) -> State:
        """The state before the first step."""
        params, buffers = self.functional.initial()
        memory = tuple(self.rule.init(g.pick(params)) for g in self.groups)
        for leaf in tree_leaves(memory):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"init of the rule {self.rule.name!r} returned {type(leaf).__name__} in its memory: expected "
                    "tensors, in a NamedTuple, dict or tuple; an empty tuple for none."
                )
        state = State(params, buffers, memory)
        if self.rule.elementwise and not self._tried and any(p.is_cuda for p in params.values()):
            self.check_elementwise(state)
            self._tried = True
        return state

    def check_elementwise(self, state: State) -> None:
        """Refuse a rule that says that every entry moves by itself, and moves otherwise as one vector."""
        params, memory = tree.detach(state.params), busy(state).memory
        grads = tree.random(params)
        for group, remembered in zip(self.groups, memory, strict=True):
            half = next(iter(params.values())).new_full((), 0.5)
            values = {arg: half if isinstance(s, str) else s for arg, s in group.sources.items()}
            given = group.pick(params), group.pick(grads), remembered, values
            apart = tree.leaves(self.rule.update(*given))
            try:
                together = tree.leaves(in_one(self.rule)(*given))
            except Exception:  # a memory of another form
                together = []
            same = [x.shape for x in apart] == [x.shape for x in together]
            if not same or not all(map(_close, apart, together)):
                raise ValueError(
                    f"the rule {self.rule.name!r} has elementwise=True, but moves parameters otherwise when they are "
                    "one vector: leave that out if it looks at a tensor as a whole (its norm, its shape), or remembers "
                    "less than a number per entry."
                )

    def update(
        self, params: Params, grads: Params, memory: tuple[Any, ...], hypers: Hypers
    ) -> tuple[Params, tuple[Any, ...]]:
        """Apply the rule, group by group."""
        return self._apply(self.rule.update, params, grads, memory, hypers)

    def pure_update(
        self, params: Params, grads: Params, memory: tuple[Any, ...], hypers: Hypers
    ) -> tuple[Params, tuple[Any, ...]]:
        """The same, to be traced. On a GPU with fewer operations, where the rule allows it: they are compiled.

        On a CPU pieces of a vector are not always where whole tensors would be, and what reads them rounds differently.
        """
        on_gpu = any(p.is_cuda for p in params.values())
        return self._apply(in_one(self.rule) if on_gpu else self.rule.update, params, grads, memory, hypers)

    def _apply(
        self, update: Update, params: Params, grads: Params, memory: tuple[Any, ...], hypers: Hypers
    ) -> tuple[Params, tuple[Any, ...]]:
        if self.rule.together is not None:
            grads = self.rule.together.change(grads, self.groups[0].values(hypers))
        new_params, new_memory = dict(params), []
        for group, remembered in zip(self.groups, memory, strict=True):
            moved, remembered = update(group.pick(params), group.pick(grads), remembered, group.values(hypers))
            new_params.update(moved)
            new_memory.append(remembered)
        return new_params, tuple(new_memory)

    def gradient(
        self, params: Params, buffers: Buffers, batch: Any, hypers: Hypers, create_graph: bool = False
    ) -> tuple[Params, Buffers, Tensor]:
        """The gradient of the training loss by autograd; `params` must require grad."""
        with torch.enable_grad():
            loss, new_buffers = self.functional.loss(params, buffers, batch, hypers)
            with self.functional.again(params, buffers):
                got = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph, allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for g, p in zip(got, params.values(), strict=True)]
        return dict(zip(params, grads, strict=True)), new_buffers, loss

    def step(self, state: State, batch: Any, hypers: Hypers) -> tuple[State, Tensor]:
        """One plain training step, no derivative kept."""
        params = {name: p.detach().requires_grad_() for name, p in state.params.items()}
        grads, buffers, loss = self.gradient(params, state.buffers, batch, hypers)
        with torch.no_grad():
            new_params, memory = self.update(state.params, grads, state.memory, hypers)
        buffers = {name: b.detach() for name, b in buffers.items()}
        return State(new_params, buffers, memory), loss.detach()

    def pure_step(self, state: State, batch: Any, hypers: Hypers) -> tuple[State, Tensor]:
        """The same as a pure function, to be traced."""
        grads, buffers, loss = self.pure_gradient(state.params, state.buffers, batch, hypers)
        new_params, memory = self.pure_update(state.params, grads, state.memory, hypers)
        return State(new_params, buffers, memory), loss

    def pure_gradient(
        self, params: Params, buffers: Buffers, batch: Any, hypers: Hypers
    ) -> tuple[Params, Buffers, Tensor]:
        """`gradient` as a pure function, to be traced."""

        def loss(params: Params) -> Any:
            value, after = self.functional.loss(params, buffers, batch, hypers)
            return value, (value, after)

        grads, (value, after) = torch.func.grad(loss, has_aux=True)(params)
        return grads, after, value


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)


def in_one(rule: Rule) -> Update:
    """The rule's update with all parameters of a group as one vector, where every entry moves by itself."""
    if not rule.elementwise:
        return rule.update

    def update(params: Params, grads: Params, memory: Any, values: Any) -> tuple[Params, Any]:
        if len(params) == 1 or len({(x.dtype, x.device) for x in (*params.values(), *grads.values())}) > 1:
            return rule.update(params, grads, memory, values)
        names = tuple(params)

        def whole(part: Any) -> bool:
            return isinstance(part, dict) and tuple(part) in (names, _WHOLE)

        def joined(part: Any) -> Any:
            return {_WHOLE[0]: torch.cat([x.flatten() for x in part.values()])} if whole(part) else part

        def apart(part: Any) -> Any:
            if not whole(part):
                return part
            pieces = part[_WHOLE[0]].split([x.numel() for x in params.values()])
            return {name: piece.view(params[name].shape) for name, piece in zip(names, pieces, strict=True)}

        moved, after = rule.update(joined(params), joined(grads), tree_map(joined, memory, is_leaf=whole), values)
        return apart(moved), tree_map(apart, after, is_leaf=whole)

    return update


def make_groups(rule: Rule, hypers: Mapping[str, Hyper], params: Params, learnt_loss: bool) -> tuple[Group, ...]:
    """Sort the parameters by the entries of `hypers` that apply to them.

    An entry with `params` goes before one without; two with `params` must not claim the same parameter.
    """
    check_names(rule, hypers, learnt_loss)
    entries: dict[str, dict[str, str]] = {arg: {} for arg in rule.defaults}  # argument -> parameter -> key
    for specific in (False, True):
        for key, hyper in hypers.items():
            arg = argument(key)
            if arg not in rule.defaults or (hyper.params is not None) is not specific:
                continue
            if specific and rule.together is not None and arg in rule.together.arguments:
                raise ValueError(f"hyperparameter {key!r} has `params`, but {arg!r} is one for all parameters.")
            names = list(params) if hyper.params is None else select(key, hyper.params, params)
            for name in names:
                other = entries[arg].get(name)
                if other is not None and (hypers[other].params is not None) is specific:
                    raise ValueError(
                        f"hyperparameters {other!r} and {key!r} both set {arg!r} of parameter {name!r}; "
                        "narrow one's `params`."
                    )
                entries[arg][name] = key
    used = {key for chosen in entries.values() for key in chosen.values()}
    idle = [key for key in hypers if argument(key) in rule.defaults and key not in used]
    if idle:
        raise ValueError(f"hyperparameter {idle[0]!r} applies to no parameter: others with `params` claim them all.")
    sorted_names: dict[tuple[str | float, ...], list[str]] = {}
    for name in params:
        sources = tuple(entries[arg].get(name, default) for arg, default in rule.defaults.items())
        sorted_names.setdefault(sources, []).append(name)
    return tuple(
        Group(tuple(names), dict(zip(rule.defaults, sources, strict=True))) for sources, names in sorted_names.items()
    )


def left_at_default(rule: Rule, hypers: Mapping[str, Hyper], arg: str, params: Params) -> str:
    """A word about parameters that no entry of an argument is for, where the rule's own value is not zero."""
    own = {key: hyper.params for key, hyper in hypers.items() if argument(key) == arg}
    if not own or None in own.values() or not rule.defaults.get(arg):
        return ""
    taken = {name for key, chosen in own.items() if chosen is not None for name in select(key, chosen, params)}
    left = [name for name in params if name not in taken]
    if not left:
        return ""
    return (
        f"hyperparameter {next(iter(own))!r} is not for all parameters: {len(left)} others, such as {left[0]!r}, keep "
        f"{rule.name}'s {arg}={rule.defaults[arg]:g}. If they are to have none, give {rule.name}({arg}=0.0)."
    )


def fitted(rule: Rule, hypers: Mapping[str, Hyper]) -> dict[str, Hyper]:
    """The entries within the bounds of the rule's arguments, and with their outer steps where they have none."""
    made = {}
    for key, hyper in hypers.items():
        low, high, step = rule.ranges.get(argument(key), Range())
        values = hyper.values()
        rule.check(argument(key), values.tolist(), f"hyperparameter {key!r} starts at {in_short(values)}")
        made[key] = replace(
            hyper,
            low=max((bound for bound in (low, hyper.low) if bound is not None), default=None),
            high=min((bound for bound in (high, hyper.high) if bound is not None), default=None),
            step=step_size(key, hyper, step) if step else hyper.step,
        )
    return made


def check_names(rule: Rule, hypers: Mapping[str, Hyper], learnt_loss: bool) -> None:
    """Refuse an entry that is neither an argument of the rule nor can be one of the loss."""
    for key, hyper in hypers.items():
        if argument(key) in rule.defaults:
            continue
        if not learnt_loss:
            raise ValueError(
                f"unknown hyperparameter {key!r}: it is no float argument of {rule.name}, and the loss takes no "
                f"`hypers`.{nearest(argument(key), list(rule.defaults))}"
            )
        if hyper.params is not None:
            raise ValueError(
                f"hyperparameter {key!r} belongs to the loss: `params` applies to the rule's arguments only."
            )

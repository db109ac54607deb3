"""Putting the bfloat16 kernels of norm_kernels.py in the place of BatchNorm, in the graph of runs side by side.

With n pixels of all images, μ and σ² their mean and variance for each lane and channel, g the gradient of the result:

    scale = w / √(σ² + ε)    offset = b − μ · scale                       result = x · scale + offset, and its ReLU
    dL/db = Σ g              dL/dw = Σ g · (x − μ) / √(σ² + ε)            slope = −scale · dL/dw / (n √(σ² + ε))
    dL/dx = g · scale + x · slope + rest                                  rest = −scale · dL/db / n − μ · slope

Everything but the passes over pixels is a handful of numbers, and is left to the compiler.
"""

from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from longhorizon import lane_norm, norm_kernels
from longhorizon.halves import Halves
from longhorizon.nodes import called, shape_of, value_of

aten = torch.ops.aten


class _Norm(NamedTuple):
    """What its gradient needs of a BatchNorm."""

    images: fx.Node
    mean: fx.Node
    by: fx.Node  # 1 / √(σ² + ε)
    scale: fx.Node
    offset: fx.Node
    relu: fx.Node | None  # of the result, as everybody else reads it, if there is one


class Norms:
    """Those of a graph."""

    def __init__(self, graph: fx.GraphModule, halves: Halves):
        self.graph, self.halves = graph, halves
        self._of_mean: dict[fx.Node, _Norm] = {}

    def put(self, node: fx.Node) -> None:
        """Put kernels in the place of a node, if it is a BatchNorm, or the gradient of one."""
        norm, gradient = lane_norm.operations()
        if node.target is norm:
            self._norm(node)
        elif node.target is gradient:
            self._gradient(node)

    def _norm(self, node: fx.Node) -> None:
        x, weight, bias, eps = node.args
        results = _results(node)
        cut = results[0].users and all(user.target is aten.relu.default for user in results[0].users)
        images = self.halves.of(x)  # type: ignore[arg-type]
        with self.graph.graph.inserting_before(node):
            both = self._kernel("moments", images)
            mean, var = (self._aten(aten.select.int, both, 0, i) for i in (0, 1))
            by = self._aten(aten.rsqrt.default, self._aten(aten.add.Tensor, var, eps))
            scale = self._aten(aten.mul.Tensor, by, weight)
            offset = self._aten(aten.sub.Tensor, bias, self._aten(aten.mul.Tensor, mean, scale))
            made = self.halves.back(self._kernel("scaled", images, scale, offset, bool(cut)))
        for old in list(results[0].users) if cut else [results[0]]:
            old.replace_all_uses_with(made)
        results[1].replace_all_uses_with(mean)
        results[2].replace_all_uses_with(var)
        self._of_mean[mean] = _Norm(images, mean, by, scale, offset, made if cut else None)

    def _gradient(self, node: fx.Node) -> None:
        grad: Any = node.args[0]
        norm = self._of_mean[node.args[3]]  # type: ignore[index]
        # What a ReLU lets through is seen again by the kernels, which need not read its result for it.
        cut = grad.target is aten.threshold_backward.default and grad.args[1] is norm.relu and grad.args[2] == 0
        grads = self.halves.of(grad.args[0] if cut else grad)
        _, count, _, *sides = shape_of(node.args[1])
        n = count * torch.Size(sides).numel()
        with self.graph.graph.inserting_before(node):
            sums = self._kernel("slopes", norm.images, grads, norm.scale, norm.offset, norm.mean, cut)
            of_bias, product = (self._aten(aten.select.int, sums, 0, i) for i in (0, 1))
            of_weight = self._aten(aten.mul.Tensor, product, norm.by)
            part = self._aten(aten.mul.Tensor, norm.scale, -1 / n)
            slope = self._aten(aten.mul.Tensor, part, self._aten(aten.mul.Tensor, of_weight, norm.by))
            level = self._aten(aten.mul.Tensor, norm.mean, slope)
            rest = self._aten(aten.sub.Tensor, self._aten(aten.mul.Tensor, part, of_bias), level)
            more = (norm.scale, norm.offset, slope, rest, cut)
            made = self.halves.back(self._kernel("unscaled", norm.images, grads, None, *more))
        for old, new in zip(_results(node), (made, of_weight, of_bias), strict=True):
            old.replace_all_uses_with(new)

    def _kernel(self, name: str, *args: Any) -> fx.Node:
        operation = getattr(norm_kernels.operations(), name)
        given = [value_of(x) if isinstance(x, fx.Node) else x for x in args]
        return called(self.graph, operation, args, norm_kernels.like(operation, *given))

    def _aten(self, operation: Any, *args: Any) -> fx.Node:
        value: Tensor = operation(*(value_of(x) if isinstance(x, fx.Node) else x for x in args))
        return called(self.graph, operation, args, value)


def _results(node: fx.Node) -> list[fx.Node]:
    """The nodes that read the three results of one; made where nobody does."""
    readers = {user.args[1]: user for user in node.users if user.target is getitem}
    with node.graph.inserting_after(node):
        for i in range(3):
            if i not in readers:
                readers[i] = node.graph.call_function(getitem, (node, i))
                readers[i].meta["val"] = value_of(node)[i]
    return [readers[i] for i in range(3)]

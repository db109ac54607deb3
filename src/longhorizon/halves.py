"""Which nodes of a graph there are in bfloat16 with their channels last: what operations on images there read.

What such an operation reads is kept in that form only: everybody else who reads it reads it from there.
"""

from typing import Any

import torch
from torch import fx

from longhorizon.nodes import called, value_of

aten = torch.ops.aten

_LAST, BACK = [0, 1, 3, 4, 2], [0, 1, 4, 2, 3]  # channels, to the end and back


class Halves:
    """Which nodes there are in bfloat16, channels last."""

    def __init__(self, graph: fx.GraphModule):
        self.graph = graph
        self._of: dict[fx.Node, fx.Node] = {}

    def of(self, node: fx.Node) -> fx.Node:
        """(lanes, images, channels, side, side) in bfloat16 with channels last; others read what is kept of it."""
        if node in self._of:
            return self._of[node]
        x, readers = value_of(node), list(node.users)
        with self.graph.graph.inserting_before(_next(node)):
            last = called(self.graph, aten.permute.default, (node, _LAST), x.permute(_LAST))
            more = -x.shape[2] % 8
            if more:
                filled = value_of(last).new_empty(*value_of(last).shape[:-1], x.shape[2] + more)
                last = called(self.graph, aten.constant_pad_nd.default, (last, [0, more]), filled)
            half = value_of(last).to(torch.bfloat16)
            cast = called(self.graph, aten._to_copy.default, (last,), half, dtype=torch.bfloat16)
            how = {"memory_format": torch.contiguous_format}
            kept = called(self.graph, aten.clone.default, (cast,), half.contiguous(), **how)
            again = node if more or node.op == "placeholder" else self.back(kept)
        for reader in readers if again is not node else []:
            reader.replace_input_with(node, again)
        self._of[node] = kept
        return kept

    def back(self, half: fx.Node) -> fx.Node:
        """The same numbers for everybody else, where the graph is being written."""
        whole = called(self.graph, aten._to_copy.default, (half,), value_of(half).float(), dtype=torch.float32)
        turned = called(self.graph, aten.permute.default, (whole, BACK), value_of(whole).permute(BACK))
        self._of[turned] = half
        return turned


def _next(node: fx.Node) -> fx.Node:
    """The place behind a node; behind all arguments, if it is one."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


def source_of(node: fx.Node) -> fx.Node | None:
    """What is shown in the form of everybody else, if that is all that a node does."""
    whole = node.args[0] if node.target is aten.permute.default and list(node.args[1]) == BACK else None  # type: ignore[arg-type]
    if not isinstance(whole, fx.Node) or whole.target is not aten._to_copy.default:
        return None
    half = whole.args[0]
    return half if isinstance(half, fx.Node) and value_of(half).dtype == torch.bfloat16 else None


def merge_ways_back(graph: fx.GraphModule) -> None:
    """Where numbers in bfloat16 were taken back and put into it again, read them as they were."""
    for node in list(graph.graph.nodes):
        if node.target is not aten.clone.default or value_of(node).dtype != torch.bfloat16:
            continue
        cast: Any = node.args[0]
        last = cast.args[0] if cast.target is aten._to_copy.default else None
        if not isinstance(last, fx.Node) or last.target is not aten.permute.default or list(last.args[1]) != _LAST:  # type: ignore[arg-type]
            continue
        half = source_of(last.args[0])  # type: ignore[arg-type]
        if half is not None:
            node.replace_all_uses_with(half)

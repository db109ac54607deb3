"""Two-level designs: which values go up and which go down in each of a row of training runs.

In a Hadamard matrix every column is orthogonal to every other, so that each value's slope is read off all runs as if
the others had stayed where they were. Each row is run with its negative (fold-over): their difference is free of the
curvature and of what two values do together.
"""

import torch
from torch import Tensor


def folded(values: int, pairs: int, seed: int) -> Tensor:
    """Signs of one half of a design, pairs × values; the other half is its negative.

    Which column a value gets, and its direction, are drawn from the seed: what three values do together, which the
    design cannot tell from one, then differs from one hypergradient to the next instead of adding up.

    Args:
        values: how many are shifted.
        pairs: at least how many rows; there are never fewer than values.
    """
    matrix = hadamard(max(values, pairs))
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randperm(len(matrix), generator=generator)[:values]
    directions = 2 * torch.randint(0, 2, (values,), generator=generator) - 1
    return matrix[:, columns] * directions


def hadamard(least: int) -> Tensor:
    """The smallest Hadamard matrix known here with at least so many rows, in float64.

    Orders are those of Sylvester (doubling) and Paley (a prime of the form 4k + 3, plus one): 1, 2, 4, 8, 12, 16, 20,
    24, 32, 40, 44, 48 …

    >>> hadamard(2).tolist()
    [[1.0, 1.0], [-1.0, 1.0]]
    >>> len(hadamard(9)), len(hadamard(21))
    (12, 24)
    """
    order = least
    while True:
        doublings, core = 0, order
        while core > 2 and core % 2 == 0 and not _paley(core):
            doublings, core = doublings + 1, core // 2
        if core <= 2 or _paley(core):
            break
        order += 1
    matrix = torch.ones(1, 1, dtype=torch.float64) if core == 1 else _from_prime(core - 1)
    for _ in range(doublings):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _paley(order: int) -> bool:
    prime = order - 1
    return prime % 4 == 3 and all(prime % d for d in range(2, int(prime**0.5) + 1))


def _from_prime(prime: int) -> Tensor:
    """Paley's matrix of order prime + 1: whether differences of rows and columns are squares modulo the prime."""
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    squares = {i * i % prime for i in range(1, prime)}
    matrix[0, 1:], matrix[1:, 0] = 1, -1
    for i in range(prime):
        for j in range(prime):
            if i != j:
                matrix[i + 1, j + 1] = 1 if (i - j) % prime in squares else -1
    return matrix + torch.eye(prime + 1, dtype=torch.float64)

"""The same work in JAX: a WRN-16-1 with batch statistics, and `jit(vmap(jvp(grad)))` of its loss.

Weights, data and tangents are those of the torch model, by its names, so that the results can be compared.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # it shares the device with torch

import numpy as np

Arrays = dict[str, Any]


def hessian_products(
    params: Arrays, images: np.ndarray, labels: np.ndarray, tangents: Arrays, precision: str
) -> tuple[Callable[[], Any], Callable[[], Arrays]]:
    """(repeat the gradient and H·Z, H·Z as numpy arrays by name)."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_default_matmul_precision", "highest" if precision == "float32" else "tensorfloat32")

    def convolve(x: Any, w: Any, stride: int = 1) -> Any:
        pad = w.shape[-1] // 2
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW")
        )

    def normalise(p: Arrays, name: str, x: Any) -> Any:
        mean = x.mean((0, 2, 3), keepdims=True)
        centred = x - mean
        scale = jax.lax.rsqrt((centred * centred).mean((0, 2, 3), keepdims=True) + 1e-5)
        return centred * scale * p[f"{name}.weight"][:, None, None] + p[f"{name}.bias"][:, None, None]

    def block(p: Arrays, name: str, x: Any, stride: int) -> Any:
        active = jax.nn.relu(normalise(p, f"{name}.norm1", x))
        y = jax.nn.relu(normalise(p, f"{name}.norm2", convolve(active, p[f"{name}.conv1.weight"], stride)))
        shortcut = p.get(f"{name}.shortcut.weight")
        beside = x if shortcut is None else convolve(active, shortcut, stride)
        return beside + convolve(y, p[f"{name}.conv2.weight"])

    def loss(p: Arrays, x: Any, y: Any) -> Any:
        x = convolve(x, p["conv.weight"])
        for group in range(3):
            for part in range(2):
                x = block(p, f"groups.{group}.{part}", x, 2 if group and not part else 1)
        x = jax.nn.relu(normalise(p, "norm", x)).mean((2, 3))
        logits = x @ p["fc.weight"].T + p["fc.bias"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

    @jax.jit
    def step(p: Arrays, x: Any, y: Any, z: Arrays) -> Any:
        gradient = jax.grad(lambda q: loss(q, x, y))
        return gradient(p), jax.vmap(lambda column: jax.jvp(gradient, (p,), (column,))[1])(z)

    p, z = ({name: jnp.asarray(a) for name, a in arrays.items()} for arrays in (params, tangents))
    x, y = jnp.asarray(images), jnp.asarray(labels)

    def repeat() -> Any:
        return jax.block_until_ready(step(p, x, y, z))

    return repeat, lambda: {name: np.asarray(a, dtype=np.float64) for name, a in repeat()[1].items()}

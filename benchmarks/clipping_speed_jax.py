"""The twin of `cifar_cnn` in plain JAX: per-example gradients by vmap(grad), in one compiled step.

vmap over grad gives every example's gradient, stacked; each is scaled by min(1, C/‖g‖), the scaled
ones are summed and noised with standard deviation σ·C, and SGD takes its step  [Subramani 2021].
Each library computes in its own default precision.
"""

from __future__ import annotations

import math
import os
from typing import Any

# Half of a GPU's memory would be taken at once, and PyTorch is in the same process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Weights = list[tuple[jax.Array, jax.Array]]


def initial_weights(width: int, num_classes: int = 10) -> Weights:
    """PyTorch's: uniform within ±1/√(inputs of a unit)."""
    generator = np.random.default_rng(0)
    shapes, before = [], 3
    for filters in (width, 2 * width, 4 * width):
        shapes += [(3, 3, before, filters), (3, 3, filters, filters)]
        before = filters
    shapes += [(before * 4 * 4, 128), (128, num_classes)]

    def uniform(bound: float, shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(generator.uniform(-bound, bound, shape), jnp.float32)

    bounds = [1 / math.sqrt(math.prod(shape[:-1])) for shape in shapes]
    return [(uniform(b, s), uniform(b, s[-1:])) for b, s in zip(bounds, shapes, strict=True)]


def logits(weights: Weights, x_BHWC: jax.Array) -> jax.Array:
    """Pairs of 3×3 convolutions, each pair followed by 2×2 pooling, then two layers."""
    layout = ("NHWC", "HWIO", "NHWC")
    for i, (kernel, bias) in enumerate(weights[:6]):
        x_BHWC = lax.conv_general_dilated(x_BHWC, kernel, (1, 1), "SAME", dimension_numbers=layout)
        x_BHWC = jnp.tanh(x_BHWC + bias)
        if i % 2 == 1:
            window = (1, 2, 2, 1)
            x_BHWC = lax.reduce_window(x_BHWC, -jnp.inf, lax.max, window, window, "VALID")
    (first, bias), (last, last_bias) = weights[6:]
    hidden = jnp.tanh(x_BHWC.reshape(len(x_BHWC), -1) @ first + bias)
    return hidden @ last + last_bias


def mean_loss(weights: Weights, x_BHWC: jax.Array, y_B: jax.Array) -> jax.Array:
    scores = jax.nn.log_softmax(logits(weights, x_BHWC))
    return -jnp.take_along_axis(scores, y_B[:, None], axis=1).mean()


def loss_of_one(weights: Weights, x_HWC: jax.Array, y: jax.Array) -> jax.Array:
    return mean_loss(weights, x_HWC[None], y[None])


def clipped_sum(weights: Weights, x_BHWC: jax.Array, y_B: jax.Array, max_norm: float) -> Weights:
    """Σ_i g_i·min(1, C/‖g_i‖)."""
    grads = jax.vmap(jax.grad(loss_of_one), in_axes=(None, 0, 0))(weights, x_BHWC, y_B)
    leaves = jax.tree.leaves(grads)
    norm_B = jnp.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(axis=1) for g in leaves))
    scale_B = jnp.minimum(1.0, max_norm / jnp.maximum(norm_B, 1e-12))
    return jax.tree.map(lambda g: jnp.tensordot(scale_B, g, axes=1), grads)


def noised(total: Weights, key: jax.Array, std: float) -> Weights:
    leaves, structure = jax.tree.flatten(total)
    keys = jax.random.split(key, len(leaves))
    noisy = [g + std * jax.random.normal(k, g.shape) for g, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


class Step:
    """A compiled step of SGD, plain or private, and the bytes that it needs."""

    def __init__(
        self,
        width: int,
        inputs: np.ndarray,
        targets: np.ndarray,
        *,
        rate: float,
        max_norm: float | None,
        noise: float | None,
        device: str,
    ) -> None:
        place = jax.devices(device)[0]
        batch = len(inputs)

        def step(weights: Weights, key: jax.Array, x: Any, y: Any) -> tuple[Weights, jax.Array]:
            key, now = jax.random.split(key)
            if max_norm is None or noise is None:
                grads = jax.grad(mean_loss)(weights, x, y)
            else:
                total = noised(clipped_sum(weights, x, y, max_norm), now, noise * max_norm)
                grads = jax.tree.map(lambda g: g / batch, total)
            return jax.tree.map(lambda w, g: w - rate * g, weights, grads), key

        self.data = jax.device_put((inputs.transpose(0, 2, 3, 1), targets), place)
        self.state = jax.device_put((initial_weights(width), jax.random.key(0)), place)
        self.compiled = jax.jit(step).lower(*self.state, *self.data).compile()

    def run(self) -> None:
        self.state = self.compiled(*self.state, *self.data)

    def wait(self) -> None:
        jax.block_until_ready(self.state)

    @property
    def bytes_used(self) -> int | None:
        """By the compiler's plan: temporaries and results, not the model and its inputs."""
        plan = self.compiled.memory_analysis()
        return None if plan is None else plan.temp_size_in_bytes + plan.output_size_in_bytes

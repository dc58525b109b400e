"""What optax makes of some gradients, in a process of its own: JAX starts threads, and warns at every later fork.

    python -m tests.policies.optax_reference IN.npz OUT.npz

IN holds `ratio`, `eps`, `threshold` and arrays `g0, w0, g1, w1, …` in torch's layout (rows first); OUT holds
`agc0, …` and `rms0, …`.
"""

from __future__ import annotations

import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax


def swapped(array: Any) -> Any:
    """Between torch's rows first and optax's rows last."""
    return jnp.moveaxis(jnp.asarray(array), 0, -1) if array.ndim > 1 else jnp.asarray(array)


def back(array: Any) -> Any:
    return np.asarray(jnp.moveaxis(array, -1, 0) if array.ndim > 1 else array)


def main(source: str, target: str) -> None:
    given = np.load(source)
    count = sum(name.startswith("g") for name in given)
    grads = [swapped(given[f"g{k}"]) for k in range(count)]
    weights = [swapped(given[f"w{k}"]) for k in range(count)]
    agc = optax.adaptive_grad_clip(float(given["ratio"]), float(given["eps"]))
    rms = optax.clip_by_block_rms(float(given["threshold"]))
    rows, _ = agc.update(grads, agc.init(weights), weights)
    blocks, _ = rms.update(grads, rms.init(weights), weights)
    found = {f"agc{k}": back(rows[k]) for k in range(count)}
    np.savez(target, **found, **{f"rms{k}": back(blocks[k]) for k in range(count)})


if __name__ == "__main__":
    main(*sys.argv[1:])

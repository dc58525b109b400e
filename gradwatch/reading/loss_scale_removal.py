"""The loss scale divided out of norms, so that `norm` is that of the true gradient.

`unscaled` is called at the moment a GradScaler divides the gradients (`taps/grad_scaler.py`), for the norms that were
read before it. What is read while the gradients still carry the scale, at the step of a fused optimizer, is divided as
it is read (`scale` of `CpuNorms` and `DeviceNorms`).
"""

from __future__ import annotations

from gradwatch.reading.async_copy import Number, host_value
from gradwatch.reading.foreach_norms import DeviceNorms
from gradwatch.reading.gradient_writes import Reading


def unscaled(norms: Reading, scale: Number) -> Reading:
    """These norms without a factor that was in the gradients when they were read."""
    return norms.divided(scale) if isinstance(norms, DeviceNorms) else norms.divided(host_value(scale))

"""Faults for `gradwatch selftest`, injected into the gradients of a script that `gradwatch run` has started.

They enter by tensor hooks, inside the backward and before anything reads a gradient, as real ones do. After each fault
weights, buffers, optimizer state and loss scale are put back, so that the next one meets a healthy training.
"""

from gradwatch.launch.fault_injection.injection import begin
from gradwatch.launch.fault_injection.not_injected import arm, not_injected

__all__ = ["arm", "begin", "not_injected"]

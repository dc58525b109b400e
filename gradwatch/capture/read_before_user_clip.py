"""The read that a clip of the user's asks for: the last moment at which a gradient is what backward left.

A loop that accumulates is read once, at the end of the backward it has learned to be the last; the shorter
window at the end of an epoch would then be seen only at the step boundary, after `clip_grad_norm_`. So the
clip itself (`gradwatch.taps.clip_functions`) asks for the read, and says by which factor it multiplies
(`gradwatch.capture.window.norm_after_user_clip`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.read_after_backward import Capture
from gradwatch.capture.window.norm_after_user_clip import known_scaling
from gradwatch.reading.async_copy import capturing
from gradwatch.taps.clip_functions import Clip, listen, listen_without_gradients


class BeforeClip:
    """Reads, when clipping begins, the gradients of a Capture that the end of no backward was there to read.

    Optimizers that have no capture yet (attached after their backward) get one, and `bound` is called with it.
    `idle` says that nothing may be read at present.
    """

    def __init__(
        self,
        capture: Capture,
        bound: Callable[[OptimizerCapture], None],
        idle: Callable[[], bool],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._capture = capture
        self._bound = bound
        self._idle = idle
        self._failed = failed
        self._removes = [listen(self.read), listen_without_gradients(self._clipped_nothing)]

    def close(self) -> None:
        """Remove the listeners of clips."""
        for remove in self._removes:
            remove()

    def read(self, clip: Clip | None = None) -> None:
        """Read what is unread, and notify every capture of the clip; raises only if `failed` does."""
        try:
            if not self._idle() and not capturing():
                self._read(clip)
                if clip is not None and clip.changes:
                    self._note(clip)
        except Exception as error:
            self._failed("capture", error)

    def _note(self, clip: Clip) -> None:
        """Have every capture know of a clip that is about to change gradients."""
        if clip.factor is not None:
            known = known_scaling(clip.grads, clip.factor)
            for captured in self._capture.captures:
                captured.known_scalings.append(known)
        for captured in self._capture.captures:
            if captured.is_of(clip):
                captured.clipped(clip)

    def _clipped_nothing(self, params: Sequence[Tensor], max_norm: float) -> None:
        """A clip of parameters that have no gradient."""
        try:
            if not self._idle():
                clip = Clip([], None, changes=True, bound=max_norm, params=params)
                for captured in self._capture.captures:
                    if captured.is_of(clip):
                        captured.clipped(clip)
        except Exception as error:
            self._failed("capture", error)

    @torch.no_grad()
    def _read(self, clip: Clip | None) -> None:
        for captured in self._capture.adopt_waiting(from_first_backward=False):
            self._bound(captured)
            if clip is None or captured.is_of(clip):
                captured.read()
        for captured in self._capture.captures:
            captured.read_overdue(clip)

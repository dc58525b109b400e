"""The search for a cause: the operation, module and line that made a NaN or Inf, or made gradients explode or vanish.

`held_calls/` what a step was made of, held by reference; `replay/` runs it again without a trace, under a recorder;
`loss/` the loop's own loss code; `sharded/` models spread over ranks; `diagnosis/` says what all that comes to;
`localiser` decides which of these is done.
"""

from __future__ import annotations

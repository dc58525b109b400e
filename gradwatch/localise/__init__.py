"""Search for the operation that made the first NaN or Inf: a step is held, run again under a recorder, judged.

`hold` what a step was made of; `replay` runs it again without a trace, a recorder looking on; `diagnosis` says what
it comes to.
"""

from __future__ import annotations

"""Which operation made the first NaN or Inf: a step held by reference, run again under a recorder, judged.

`hold` what a step was made of; `replay` runs it again without a trace, a recorder looking on; `diagnosis` says what
it comes to.
"""

from __future__ import annotations

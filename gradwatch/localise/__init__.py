"""Which operation made the first NaN or Inf: a step held by reference, run again under a recorder, judged.

`held` what a step was made of; `undisturbed` and `replay` run it again without a trace; `recorder` (`forward`,
`backward`, `whereabouts`, `frames`) looks on; `diagnose` says what it comes to.
"""

from __future__ import annotations

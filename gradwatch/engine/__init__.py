"""The engine: bind rules to sites, judge each step, decide what to do, remember what was seen.

`series` which series a rule is about, `rule_plan` a rule file bound to sites; of rules with `every: N`,
`staggered_reads` says which site is read at a step, `staggered_judging` which series is judged; `judge` one step,
`firing` what is pending and firing, `reporting` what is said of it; `actions` what is ordered, `clipping` standing
policies; `engine_state` what is remembered, `baseline_restarts` what is forgotten; `engine` and `bound_engine` the two
classes below.
"""

from __future__ import annotations

from gradwatch.engine.bound_engine import BoundEngine
from gradwatch.engine.columns_needed import Needs
from gradwatch.engine.engine import Engine
from gradwatch.engine.engine_state import EngineState

__all__ = ["BoundEngine", "Engine", "EngineState", "Needs"]

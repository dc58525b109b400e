"""Unit tests of rule files, as `promtool test rules` has them: series in, expected events and actions out.

`series_notation` the values of a series; `schema` the keys of a test file; `load_test_file` YAML to `RuleTests`, every
error with its place; `simulate` the engine over made-up steps; `compare` what was expected with what came.
"""

from __future__ import annotations

from gradwatch.rule_tests.compare import Outcome, compared
from gradwatch.rule_tests.load_test_file import Case, RuleTests, load_tests
from gradwatch.rule_tests.simulate import Simulation, simulate

__all__ = ["Case", "Outcome", "RuleTests", "Simulation", "compared", "load_tests", "simulate"]

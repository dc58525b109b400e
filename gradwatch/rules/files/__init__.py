"""Rule files: YAML to `RuleSet`, or a `RuleFileError` that holds everything wrong, with places.

`load` goes through the steps: `extends` finds them, `file_validation` checks each (`key_validation` one map of
it, against `pydantic_models`), `merge` joins them, `rule_building` makes rules, a section a file (`detect_section`, …).
"""

from gradwatch.rules.files.extends import extended_files
from gradwatch.rules.files.jsonschema import json_schema
from gradwatch.rules.files.load import load_rules, parse_rules
from gradwatch.rules.files.rules_digest import canonical

__all__ = ["canonical", "extended_files", "json_schema", "load_rules", "parse_rules"]

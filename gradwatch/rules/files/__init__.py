"""Rule files: YAML to `RuleSet`, or a `RuleFileError` that holds everything wrong, with places."""

from gradwatch.rules.files.jsonschema import json_schema
from gradwatch.rules.files.load import load_rules, parse_rules
from gradwatch.rules.files.rules_digest import canonical

__all__ = ["canonical", "json_schema", "load_rules", "parse_rules"]

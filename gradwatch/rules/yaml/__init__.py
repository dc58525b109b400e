"""The YAML of rule files: its text, its nodes with their lines, its scalars."""

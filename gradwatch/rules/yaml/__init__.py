"""The YAML of rule files: parsed to nodes with line and column, within limits; scalars as YAML 1.2 reads them."""

"""Columns beyond the norms, one kind a file; `column_reader` reads those of whole tensors as often as rules ask."""

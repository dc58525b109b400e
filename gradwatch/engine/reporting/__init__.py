"""A transition of a rule as it is reported: which parameter is at fault, of whose incident it is part, its Event."""

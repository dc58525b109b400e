"""Rules with a condition on other rules (`when:`).

`bind_conditions` makes the conditions of a rule file, `bound_condition` is one of them, `evaluation` takes all of them
through a step.
"""

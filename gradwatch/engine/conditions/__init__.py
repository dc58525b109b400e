"""Rules with a condition on others (`when:`).

`bound_condition` is one of them, `binding` makes them of a rule file, `evaluation` asks all of them at a step.
"""

"""The step boundary, where one step ends and is judged; a file for each way to step.

`optimizer_step` is the usual one; `step_with_closure`, `step_in_backward`, `without_optimizer` the others.
`changed_param_groups` and `replaced_parameters` notice that parameters are others than before.
"""

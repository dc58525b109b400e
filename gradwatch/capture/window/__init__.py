"""One accumulation window of one optimizer: which gradients arrived in it, their norms, what changed them since.

`arrival_counts` counts them, `accumulation_steps` learns how many backwards make a step, `hook_pruning` removes hooks
that are not needed for that; `gradient_reader` reads norms, and again where other code has changed a gradient.
"""

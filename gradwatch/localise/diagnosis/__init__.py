"""Finding made of what was seen of a step: the operation, its module, its line and its values.

`diagnose` makes it. A NaN or Inf: `operation_names`, `module_attribution`, `python_frames`, `tensor_values`. Gradients
that explode or vanish: `module_gain` and `node_gain` by how much each multiplies them, `usual_layer_norms` and
`explosion_by_norms` against what is usual.
"""

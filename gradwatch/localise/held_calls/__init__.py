"""The recorded calls of a model: what is held of them until they are replayed or released.

`step_recorder` holds the calls of a step, `model_recorder` those of one model; beside them what a forward may read or
change: `module_buffers`, `module_attributes`, `random_generators`.
"""

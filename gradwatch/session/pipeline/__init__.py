"""One step of one optimizer: measured, put off where nothing is urgent, judged, decided, published as a Record.

`step_pipeline` has these in their order; `deferred_steps` are those put off, `many_deferred_steps` judges them in one
call.
"""

"""The top of the flow: one watched training.

`watch_function` is `gradwatch.watch`, `watch` what it returns, `session` what that stands for, `attachments` all that
is put on models and optimizers; `boundary/` is called by torch at each step, `pipeline/` judges and publishes it,
`binding/` fits the rules to an optimizer; `active_or_paused` stops watching after internal errors, `saved_state` is
what a checkpoint holds.
"""

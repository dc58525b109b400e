"""gradwatch inside training frameworks, one small module each, imported only where the framework is.

    gradwatch.integrations.lightning          GradwatchCallback for `lightning`
    gradwatch.integrations.pytorch_lightning  GradwatchCallback for `pytorch_lightning`
    gradwatch.integrations.transformers       GradwatchCallback for `transformers.Trainer`
    gradwatch.integrations.accelerate         watch(accelerator, model, optimizer)
    gradwatch.integrations.ignite             watch(engine, model, optimizer)

None of them measures anything: that is `gradwatch.watch`'s work, the same everywhere. They open and close the
watch at the right moments, feed it the loss, and keep its state in the framework's checkpoints. A script that
is not to be changed at all runs under `gradwatch run` instead.
"""

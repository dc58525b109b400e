"""`gradwatch run`: watch a script that was not changed.

`script_environment` builds the child's environment and argv (no torch); `bootstrap/` is what that environment makes
every Python in the tree run at start; `auto_watch` is what runs in the training process once torch is imported;
`model_discovery` finds the models of an optimizer, `models_without_optimizer` and `tensors_without_module` what is
trained without one; `isolated_python` and `run_script` are the way in where Python ignores PYTHONPATH. At the end,
`exit_summary` prints the account, `os_exit` also where the script ends by `os._exit`.
"""

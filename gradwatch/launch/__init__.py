"""`gradwatch run`: watch a script that was not changed.

`command` builds the child's environment and argv (no torch); `bootstrap/` is what that environment makes
every Python in the tree run at start; `auto_watch` is what runs in the training process once torch is imported;
`discovery` finds the models and names their parameters; `isolated_python` and `run_script` are the way in where Python
ignores PYTHONPATH.
"""

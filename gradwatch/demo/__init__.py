"""`gradwatch demo`: an unmodified training script with faults of its own, watched through `gradwatch run`.

`train.py` is that script (it never imports gradwatch); `faults` says which faults it is asked to inject and
what counts as finding one; `follow_run` starts it and follows both its output and its journal.
"""

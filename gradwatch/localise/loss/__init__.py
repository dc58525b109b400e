"""Loss code in the loop, run again on copies: which operation and which line of it made the first NaN or Inf.

`loss_statements` finds it in the source, `loss_rerun` runs it (by `interpreter/`), `loss_cause` and `loss_gain` say
what that shows.
"""

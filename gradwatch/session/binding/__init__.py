"""The rules of one optimizer, fitted to its models and its ranks.

`bind_optimizer` makes them, `optimizer_rules` are those of one, `rule_bindings` those of all; `refused_rules` what
cannot be done here, `rank_requirements` what needs other ranks, `unread_columns` why a rule has no data.
"""

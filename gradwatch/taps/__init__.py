"""Hooks and patches of torch: one tap a file, each shared by everything that listens to it.

The lowest layer that knows torch. A tap knows no rule, no optimizer capture and no sink; it calls its listeners and
gives torch back as found when the last one leaves.
"""

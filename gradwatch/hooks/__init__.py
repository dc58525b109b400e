"""The only package that talks to autograd and optimizers. It knows Snapshots and Decisions, never a Rule."""

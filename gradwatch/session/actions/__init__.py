"""Actions that look at more than gradients: the cause of an incident, and a copy of its step."""

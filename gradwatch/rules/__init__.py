"""Rule files: the model they resolve to, codes, and actions that no model can have (`impossible_actions`)."""

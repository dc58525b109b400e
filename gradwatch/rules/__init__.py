"""Rule files: the model they resolve to and the codes of their problems; `yaml` and `files` read them."""

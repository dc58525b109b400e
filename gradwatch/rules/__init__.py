"""Rule files: the model they resolve to, codes, and what no model could have (`objections`); `yaml`, `files`."""

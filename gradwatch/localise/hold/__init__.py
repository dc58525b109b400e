"""The recorded calls of a model: what is held of them until they are replayed or released."""

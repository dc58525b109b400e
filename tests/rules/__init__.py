"""Rule files: what is refused, what they resolve to, the packs that ship."""

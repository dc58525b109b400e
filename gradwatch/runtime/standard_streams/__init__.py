"""Lines on stdout and stderr that cannot take everything: closed, a broken pipe, a full disk."""

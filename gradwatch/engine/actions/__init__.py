"""Orders of the rules of one step, as arithmetic: what each does, what is permitted, what norms are left."""

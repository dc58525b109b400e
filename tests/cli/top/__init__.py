"""`gradwatch top` in pipes and on terminals."""

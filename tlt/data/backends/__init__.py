"""Who decodes, crops and resizes."""

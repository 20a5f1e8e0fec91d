"""The published code: what it does instead (`--compat`) and the functions that it exports."""

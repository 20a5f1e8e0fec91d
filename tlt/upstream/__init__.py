"""The published code: its behaviour where ours differs (`--compat`), and the functions that it exports."""

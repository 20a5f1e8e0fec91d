"""The published code's behaviour where ours differs (`--compat`)."""

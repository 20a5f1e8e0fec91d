"""The subcommands of `benchmark.py`, a module each with `run(args) -> int`."""

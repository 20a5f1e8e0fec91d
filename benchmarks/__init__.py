"""What `benchmark.py` measures, a module per subcommand; each has `run(args) -> int`."""

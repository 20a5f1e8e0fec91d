"""What every room shares: names, progress, processes, weight files."""

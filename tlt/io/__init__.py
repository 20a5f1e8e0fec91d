"""Code that every room uses: names, progress, processes, weight files."""

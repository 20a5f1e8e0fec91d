"""What the command line and recipes may say: every flag, what it needs, and the parser. No torch."""

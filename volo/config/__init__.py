"""The flags of all programs, their rules, recipes, and the parser. Importing this does not import torch."""

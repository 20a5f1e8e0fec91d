"""The version of the project, as in pyproject.toml."""

__version__ = "0.1.0"

"""The programs behind `volo COMMAND` and the scripts at the root of the repository, one per module."""

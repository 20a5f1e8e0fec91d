"""The programs, a module each: what `volo COMMAND` and the scripts at the root of the repository run."""

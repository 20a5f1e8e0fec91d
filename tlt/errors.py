"""Errors that a user can mend, told in one line."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The message is one line that names the file or flag and the remedy.

    Programs print it without a traceback and leave with `exit_code` (see `volo.engine.console.run_program`).
    """

    exit_code = 2

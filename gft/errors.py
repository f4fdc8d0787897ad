"""The errors a user can mend. Their message is one sentence that names the cause and the mend.

The command line prints these in one line. Any other exception is a bug of ours and keeps its traceback.
"""


class UsageError(ValueError):
    """A value, a file or a call that cannot be used."""


class UsageTypeError(UsageError, TypeError):
    """The same where the type is wrong, not the value."""

"""Errors of the decoding library that a user can act on: each message says the value, the limit and the remedy."""


class AparError(Exception):
    """Base of every error this room raises on purpose; the command line prints it as one line."""


class InputError(AparError):
    """A file, column or option cannot be used as given; nothing was written."""

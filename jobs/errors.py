"""Errors that a user can act on: each message says the value, the limit and the remedy, in one line."""


class ForqError(Exception):
    """Base of every error forq raises on purpose. The command line prints it as one line and exits with `exit_code`."""

    exit_code = 1


class BadInput(ForqError):
    """The request or file cannot be used as given; nothing was stored."""

    exit_code = 2


class NotFound(ForqError):
    """No such job, row or model."""

    exit_code = 2


class Conflict(ForqError):
    """The job's state does not allow this."""


class QueueFull(ForqError):
    """The tenant has as much in the queue as it may; the same works later."""


class LeaseLost(ForqError):
    """The fencing token is out of date: another worker owns the shard now, so nothing of this write was kept."""


class Unavailable(ForqError):
    """A part of the service (database, broker, model, engine) cannot be reached or started."""

"""What decoders refuse."""

from apar.errors import AparError


class DecodingError(AparError):
    """A model, a prompt or an option cannot be used; the message says which, its value and what would do."""

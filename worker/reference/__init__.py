"""The reference backend: the decoders of `apar.decoding` for jobs, one answer at a time, in plain torch."""

from worker.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]

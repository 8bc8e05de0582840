"""Forking inside vLLM's own scheduler: hooks over it, nothing of it copied.

    add_request                 a request becomes a group with one thread; [Child] is banned          (keeping)
    schedule                    before: admission; after: who started, what was in the cache        (admitting)
    _get_local_prefix_cache_hit a fresh child finds its parent's blocks, the partial one included   (admitting)
    update_from_output          [Fork] makes a child; outputs are put into restored order           (restoring)
    _preempt_request            what a thread that stops leaves in the cache is noted                 (keeping)
    _free_request               a thread that ends gives its blocks back; the receipt is taken first  (keeping)
    finish_requests             an abort reaches every thread                                         (keeping)

Source: APAR paper, sections 3.4.5 to 3.4.7.
"""

from apar.scheduler.admitting import Admitting
from apar.scheduler.restoring import Restoring


class ForkingMixin(Admitting, Restoring):
    """Goes over vLLM's `Scheduler` or `AsyncScheduler`."""

"""The vLLM plugin: `LLM(..., scheduler_cls="apar.scheduler.ForkingScheduler")`; `vllm serve --scheduler-cls` likewise.

It needs nothing else: control tokens are named in the model's `config.json` (key `apar`) or in `additional_config`.
"""

from typing import TYPE_CHECKING, Any

from apar.scheduler.compat import UnsupportedEngine, check_version

check_version()  # before anything of vLLM's insides is imported: another version may not have it

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

from apar.scheduler.mixin import ForkingMixin  # noqa: E402

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["AsyncForkingScheduler", "ForkingScheduler", "SyncForkingScheduler", "UnsupportedEngine"]


class SyncForkingScheduler(ForkingMixin, Scheduler):  # type: ignore[misc]
    """For engines that wait for each step."""


class AsyncForkingScheduler(ForkingMixin, AsyncScheduler):  # type: ignore[misc]
    """For engines that schedule a step before the one before it is done."""


class ForkingScheduler:
    """Whichever of the two fits the engine's own setting; a subclass of the wrong one would miscount in silence."""

    def __new__(cls, vllm_config: "VllmConfig", *args: Any, **kwargs: Any) -> ForkingMixin:  # type: ignore[misc]
        chosen = AsyncForkingScheduler if vllm_config.scheduler_config.async_scheduling else SyncForkingScheduler
        return chosen(vllm_config, *args, **kwargs)

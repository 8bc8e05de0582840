"""The doorbell: a Celery message that says "shards of this model wait". It carries no data and may be lost or doubled.

The application object lives here, beside its producers; `worker.app` adds the task that answers. One queue per model,
so that a worker is only woken for what its engine can do.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import structlog

from jobs.settings import Settings

if TYPE_CHECKING:
    from celery import Celery

TASK_NAME = "forq.run_shards"
MAX_RINGS = 64
"""More messages than this wake nobody new: a worker keeps leasing for as long as there is something to lease."""
CONNECT_TIMEOUT_S = 2.0

log = structlog.get_logger()


def queue_name(model: str) -> str:
    return f"forq.{model}"


@lru_cache(maxsize=4)
def make_app(broker_url: str) -> "Celery":
    """Celery, configured as docs/reliability explains: JSON only, no results, no remote control."""
    from celery import Celery

    app = Celery("forq", broker=broker_url, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        result_backend=None,
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        worker_pool="threads",
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        task_create_missing_queues=True,
        task_default_delivery_mode="transient",
        broker_transport_options={
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_timeout": 30.0,
            "socket_keepalive": True,
            "health_check_interval": 15,
        }
        if broker_url.startswith(("redis", "rediss"))
        else {},
    )
    return app


def ring(settings: Settings, model: str, times: int) -> bool:
    """Wake the model's workers; False if the broker did not take the message (they poll, so nothing is lost)."""
    if settings.uses_embedded_broker and not settings.broker_socket.exists():
        return False  # nothing runs here: the job waits for the next `forq up`
    error = try_to_ring(settings, model, times)
    if error is not None:
        log.warning("doorbell_not_rung", model=model, reason=type(error).__name__)
    return error is None


def try_to_ring(settings: Settings, model: str, times: int) -> BaseException | None:
    """The same without a word: returns why it did not work."""
    app = make_app(settings.celery_broker_url)
    try:
        with app.connection_for_write(connect_timeout=CONNECT_TIMEOUT_S) as connection:
            producer = app.amqp.Producer(connection)
            for _ in range(max(1, min(times, MAX_RINGS))):
                app.send_task(
                    TASK_NAME, args=[model], queue=queue_name(model), producer=producer, retry=False, ignore_result=True
                )
    except _broker_errors(app) as error:
        return error
    return None


def _broker_errors(app: "Celery") -> tuple[type[BaseException], ...]:
    from kombu.exceptions import KombuError

    connection = app.connection_for_write()
    return (OSError, *connection.connection_errors, *connection.channel_errors, KombuError)

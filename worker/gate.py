"""The door to the engine: shards share it, but a suspect shard has it to itself, so that no other row is blamed for a
death that happened beside it."""

import threading
from collections.abc import Callable


class EngineGate:
    def __init__(self, poll_s: float) -> None:
        """`poll_s`: how often whoever waits looks whether it still should."""
        self._poll_s = poll_s
        self._changed = threading.Condition()
        self._num_inside = 0
        self._has_suspect = False
        self._num_suspects_waiting = 0

    def enter(self, *, alone: bool, go_on: Callable[[], bool]) -> bool:
        """Wait until the shard may have rows in the engine. False, and not inside, when `go_on` says no meanwhile."""
        if alone:
            self._change(waiting=1)
        try:
            while True:
                with self._changed:
                    if self._changed.wait_for(lambda: self._is_free(alone), self._poll_s):
                        self._num_inside += 1
                        self._has_suspect = alone
                        return True
                if not go_on():
                    return False
        finally:
            if alone:
                self._change(waiting=-1)

    def leave(self) -> None:
        with self._changed:
            self._num_inside -= 1
            self._has_suspect = False
            self._changed.notify_all()

    def _is_free(self, alone: bool) -> bool:
        if alone:
            return self._num_inside == 0
        # Waiting suspects go first: under load the engine would never be empty for them.
        return not self._has_suspect and self._num_suspects_waiting == 0

    def _change(self, waiting: int) -> None:
        with self._changed:
            self._num_suspects_waiting += waiting
            self._changed.notify_all()

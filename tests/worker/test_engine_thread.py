"""Why an engine died, as far as logs and the table of workers may know."""

from collections.abc import Sequence

import pytest

from jobs.errors import Unavailable
from jobs.sampling import Sampling
from worker.backend import Done, EngineDead, EngineFacts, Sample
from worker.engine_thread import EngineThread

CANARY = "a prompt that nobody else may read"
SAMPLE = Sample("key", [1, 2, 3], Sampling(), 4, None)


class FailingEngine(EngineThread[None]):
    def __init__(self, error: BaseException, *, at_once: bool) -> None:
        super().__init__()
        self._error, self._at_once = error, at_once
        self._num_samples = 0

    @property
    def num_unfinished(self) -> int:
        return self._num_samples

    def _build(self) -> tuple[None, EngineFacts]:
        if self._at_once:
            raise self._error
        return None, EngineFacts("failing", "1", 16, 64, 64, 64, 8)

    def _add(self, engine: None, sample: Sample, done: Done) -> None:
        self._num_samples += 1

    def _abort(self, engine: None, keys: Sequence[str]) -> None: ...

    def _advance(self, engine: None) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(f"cannot compute {CANARY!r}"), "RuntimeError"),
        (KeyError(CANARY), "KeyError"),
        (RuntimeError("CUDA error: an illegal memory access"), "RuntimeError: CUDA error: an illegal memory access"),
    ],
)
def test_with_rows_inside_only_a_device_may_say_more_than_the_kind_of_the_error(
    error: Exception, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FailingEngine(error, at_once=False)
    engine.start()
    engine.submit([SAMPLE], lambda _: None)
    assert engine.wait_dead(30)
    assert engine.failure == reason
    with pytest.raises(EngineDead, match=reason):
        engine.submit([SAMPLE], lambda _: None)
    printed = capsys.readouterr()
    assert "engine_died" in printed.out + printed.err
    assert CANARY not in printed.out + printed.err


def test_an_engine_that_cannot_start_says_why() -> None:
    engine = FailingEngine(ValueError("no room for\n 7 blocks"), at_once=True)
    with pytest.raises(Unavailable, match="ValueError: no room for 7 blocks"):
        engine.start()

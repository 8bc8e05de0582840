"""Decides whether a dropped file waits, is taken, or is rejected, from what can be seen without reading its rows."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jobs.drop.files import (
    Signature,
    hard_link_fault,
    is_being_written,
    kind_fault,
    name_fault,
    opened,
    shown,
    signature,
    unreadable,
)
from jobs.settings import DropSettings


@dataclass(frozen=True)
class Verdict:
    signatures: tuple[Signature, ...] = ()
    """Of the data file and its job.toml, when they are ready to be taken."""
    reason: str | None = None
    """Why the file is rejected."""

    @property
    def waits(self) -> bool:
        return not self.signatures and self.reason is None


WAIT = Verdict()


class Judge:
    """Remembers since when each path has looked the same, on an injected clock."""

    def __init__(
        self, settings: DropSettings, clock: Callable[[], float], note_held_open: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._note_held_open = note_held_open
        self._since: dict[Path, tuple[Signature, float]] = {}
        self._asked: set[Path] = set()

    def look(self, data: Path, toml: Path | None) -> Verdict:
        """Look at a file and its job.toml.

        Raises:
            OSError: one of them is gone, or cannot be looked at.
        """
        paths = [data] if toml is None else [data, toml]
        infos = [path.lstat() for path in paths]
        rest_s = min(self._rest_s(path, signature(info)) for path, info in zip(paths, infos, strict=True))
        is_settled = rest_s >= self._settings.settle_s
        faults = [name_fault(data.name)]
        for path, info in zip(paths, infos, strict=True):
            faults.append(_about(path, data, kind_fault(info)))
            if is_settled:  # link-then-unlink is a way to place a file: it has two names for a moment
                faults.append(_about(path, data, hard_link_fault(info)))
        fault = next(filter(None, faults), None)
        if fault is not None:
            return Verdict(reason=fault)
        if not is_settled:
            return WAIT
        trouble = None
        for path, info in zip(paths, infos, strict=True):
            try:
                with opened(path) as descriptor:
                    if signature(os.fstat(descriptor)) != signature(info):
                        return WAIT
                    if is_being_written(descriptor):
                        # However long it rests: a stalled download is not a whole file, and half of a JSONL can look
                        # like one.
                        if rest_s >= self._settings.give_up_s:
                            self._note_held_open(shown(path.name))
                        return WAIT
                    if path is data:
                        trouble = unreadable(descriptor, data.name)
            except PermissionError:
                what = "it cannot be opened (permission denied): make it readable for the user that runs forq"
                trouble = _about(path, data, what)
        if trouble is None:
            return Verdict(signatures=tuple(map(signature, infos)))
        return Verdict(reason=trouble) if rest_s >= self._settings.give_up_s else WAIT

    def keep(self, path: Path) -> None:
        """Remember a path that is not looked at this time."""
        self._asked.add(path)

    def forget_gone(self) -> None:
        """Drop the paths nobody asked about since the last call."""
        self._since = {path: known for path, known in self._since.items() if path in self._asked}
        self._asked.clear()

    def _rest_s(self, path: Path, now: Signature) -> float:
        self._asked.add(path)
        known = self._since.get(path)
        if known is None or known[0] != now:
            self._since[path] = known = (now, self._clock())
        return self._clock() - known[1]


def _about(path: Path, data: Path, fault: str | None) -> str | None:
    """A fault's sentence, with the job.toml's name where it is about that and not about the data file."""
    return fault if fault is None or path is data else f"{shown(path.name)}: {fault}"

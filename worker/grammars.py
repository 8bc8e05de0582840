"""Compiles each grammar of structured output in a process of its own before the engine sees it.

A short regular expression or schema can be a grammar that takes for ever, or all memory, or breaks its compiler: in the
engine's process that would be the end of everybody's answers. So a child tries first, with limits on memory and time,
and walks a few tokens into the grammar. What it dies of becomes the row's error.
"""

import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from jobs.sampling import Structured

COMPILE_S = 10
"""Longest CPU time for one grammar."""
PATIENCE = 12
"""Times as long may pass on the clock, on a busy machine."""
START_S = 300.0
"""Longest time for the child's imports."""
MEMORY_BYTES = 3 << 30
"""What a grammar may take, over what the child has when it is ready."""
IDLE_S = 60.0
"""The child holds some 600 MB: with nothing to do it ends, and is started again."""
KNOWN = 1024
"""Grammars remembered, with their verdicts."""
MOST_BROKEN = 5
"""Of one job, grammars that end the child: each holds up the new grammars of all others for `COMPILE_S` and a start."""
WALKED_TOKENS = 16
_OUT_OF_MEMORY = 3
_SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class _Unchecked(Exception):
    """Says what became of the child."""


class GrammarChecker:
    """Asks the child, one grammar at a time, and remembers. Any `threading.Thread` may call it."""

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        compile_s: int = COMPILE_S,
        memory_bytes: int = MEMORY_BYTES,
        idle_s: float = IDLE_S,
    ) -> None:
        limits = json.dumps([tokenizer, vocab_size, compile_s, memory_bytes, idle_s])
        self._command = [sys.executable, "-m", "worker.grammars", limits]
        self._compile_s = compile_s
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._known: dict[tuple[str, str], str | None] = {}
        self._num_broken: dict[str | None, int] = {}

    def fault(self, structured: Structured, job_id: str | None = None) -> str | None:
        """Why the engine must not be given this, or None. A job may end the child `MOST_BROKEN` times."""
        kind, text = key = _spec_of(structured)
        with suppress(KeyError):
            return self._known[key]  # without the lock: a known grammar does not wait for the check of another
        with self._lock:
            with suppress(KeyError):
                return self._known[key]
            if self._num_broken.get(job_id, 0) >= MOST_BROKEN:  # of this job, so not to be remembered
                return (
                    f"structured.{kind} is not compiled: {MOST_BROKEN} grammars of this job went over the limits, and "
                    "no other new one of it is tried: write simpler ones"
                )
            try:
                found = self._ask(kind, text)
            except _Unchecked as error:  # no fault of the grammar's, and not to be remembered
                return f"structured.{kind} cannot be checked: the process that compiles grammars {error}"
            if self._child is None:  # it took the process with it
                self._num_broken[job_id] = self._num_broken.get(job_id, 0) + 1
            fault = None if found is None else f"structured.{kind} {found}"
            if len(self._known) >= KNOWN:
                del self._known[next(iter(self._known))]  # the oldest
            self._known[key] = fault
            return fault

    def close(self) -> None:
        """End the child; a later question starts another."""
        with self._lock:
            self._end()

    def _ask(self, kind: str, text: str) -> str | None:
        child = self._child
        if child is None or child.poll() is not None:
            self._end()
            child = self._child = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            if self._read(child, START_S) is None:
                self._end()
                raise _Unchecked("does not start")
        assert child.stdin is not None
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps([kind, text]) + "\n")
            child.stdin.flush()
        answer = self._read(child, self._compile_s * PATIENCE)
        if answer is not None:
            error: str | None = answer["error"]
            return None if error is None else f"cannot be compiled: {error}"
        ended = self._end()
        if ended == 0:  # it had been idle, and was about to end
            return self._ask(kind, text)
        if ended == -signal.SIGKILL:  # by somebody else: its own limits end it otherwise
            raise _Unchecked("was killed: retry the job")
        if ended in (None, -signal.SIGPROF):
            return f"takes longer than {self._compile_s} s to compile: write a simpler one"
        if ended == _OUT_OF_MEMORY:
            return f"takes more than {self._memory_bytes >> 20} MiB of memory to compile: write a simpler one"
        return "breaks its compiler: write a simpler one"

    def _read(self, child: "subprocess.Popen[str]", timeout_s: float) -> dict[str, Any] | None:
        """The child's next line; None if it is ending, or the time is over."""
        lines: list[str] = []
        stdout = child.stdout
        assert stdout is not None
        reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
        reader.start()
        reader.join(timeout_s)
        if not lines or not lines[0]:
            return None
        answer: dict[str, Any] = json.loads(lines[0])
        return answer

    def _end(self) -> int | None:
        """Its exit code if it ended by itself; None if there was none, or it had to be killed."""
        child, self._child = self._child, None
        if child is None:
            return None
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(1.0)  # one that closed its pipe is about to end, and how it does is worth knowing
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        return code


def _spec_of(structured: Structured) -> tuple[str, str]:
    """Its kind, and itself as text."""
    if structured.regex is not None:
        return "regex", structured.regex
    if structured.choice is not None:
        return "choice", json.dumps(structured.choice)
    return "json_schema", json.dumps(structured.json_schema)


# --- the child ---


def main(tokenizer: str, vocab_size: int, compile_s: int, memory_bytes: int, idle_s: float) -> None:
    """A line of JSON in, [kind, text]; a line out, `{"error": null or text}`; the first one when it is ready."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's business
    compile_, walk = _load(tokenizer, vocab_size)
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, resource.RLIM_INFINITY))

    def answer(error: str | None) -> None:
        print(json.dumps({"error": error}), file=answers, flush=True)

    answer(None)
    while select.select([sys.stdin], [], [], idle_s)[0]:
        line = sys.stdin.readline()  # one at a time is sent, so that nothing waits in a buffer
        if not line:
            break
        kind, text = json.loads(line)
        error = None
        signal.setitimer(signal.ITIMER_PROF, compile_s)  # CPU time: the signal ends the process, also inside C
        try:
            walk(compile_(kind, text))
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except Exception as found:
            shown = _SOURCE_PLACE.sub("", " ".join(str(found).split()))
            error = shown[:300] or type(found).__name__
            if "bad_alloc" in error:
                os._exit(_OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer(error)
    os._exit(0)  # at once: whoever writes to it meanwhile is not to wait for the interpreter to tidy up


def _load(tokenizer: str, vocab_size: int) -> tuple[Callable[[str, str], Any], Callable[[Any], None]]:
    import xgrammar
    from transformers import AutoTokenizer

    info = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(tokenizer), vocab_size=vocab_size)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_(kind: str, text: str) -> Any:
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "choice":  # a list of texts is as hard as the same texts are as an enumeration
            return compiler.compile_json_schema(json.dumps({"enum": json.loads(text)}))
        return compiler.compile_json_schema(text, any_whitespace=False)

    def walk(grammar: Any) -> None:
        """Some grammars are quick to compile and slow to follow."""
        matcher = xgrammar.GrammarMatcher(grammar)
        mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
        for _ in range(WALKED_TOKENS):
            if matcher.is_terminated():
                return
            matcher.fill_next_token_bitmask(mask)
            words = mask[0].tolist()
            place = next((i for i, word in enumerate(words) if word), None)
            if place is None:
                return
            word = words[place] & 0xFFFFFFFF
            matcher.accept_token(place * 32 + (word & -word).bit_length() - 1)

    return compile_, walk


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))

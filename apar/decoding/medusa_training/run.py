"""The training run of Medusa heads: reads, resumes, loops, evaluates, checkpoints, writes the heads.

In the folder `out`: `options.json`, `log.jsonl`, `loss.png`, `checkpoints/`, and at the end `heads/` and `result.json`.
A run that was stopped and started again gives bit for bit what it would have given. One process, one device.

Lines of the log: {"step", "loss", "losses", "grad_norm", "lr", "answers", "tokens", "labels", "seconds"} for each step
(`losses` per head, `loss` their mean) and {"step", "held_out": [...]} for each evaluation, an entry per head.
"""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from apar import files
from apar.decoding.medusa_training import curves, data
from apar.decoding.medusa_training.model import TrainedHeads
from apar.decoding.medusa_training.options import MedusaTrainingOptions
from apar.errors import AparError, InputError
from apar.training import checkpoints
from apar.training.adapter import no_bars
from apar.training.claims import claim, contents_of, refuse_another_run
from apar.training.interrupts import Interrupts
from apar.training.log import Log
from apar.training.packing import Row, pack
from apar.training.run import Event, Report, learning_rate
from apar.training.sampling import Sampler, take


@dataclass(frozen=True, slots=True)
class MedusaTrainingResult:
    finished: bool
    """False: stopped on request, behind a checkpoint."""
    step: int
    steps: int
    out: Path
    heads: Path | None
    held_out: list[dict[str, Any]] | None
    """Per head, as `model.HeldOut` says."""
    figures: dict[str, Any]


def train_heads(options: MedusaTrainingOptions, report: Report = lambda event: None) -> MedusaTrainingResult:
    """Train heads, or go on training them in `options.out`.

    SIGINT and SIGTERM end it early, with a checkpoint.

    Raises:
        InputError: the base, the data or an option cannot be used; or `out` holds a run with other options.
    """
    from filelock import FileLock, Timeout

    if not (options.base / "config.json").is_file():
        raise InputError(f"{options.base} is no model folder: it has no config.json")
    options.out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(options.out / ".lock")
    try:
        lock.acquire(timeout=0)
        contents = contents_of(options)
        refuse_another_run(options, contents)
        done = files.read_json(options.out / "result.json")
        if done is not None:
            return MedusaTrainingResult(**{**done, "out": Path(done["out"]), "heads": Path(done["heads"])})
        with no_bars():
            run = _Run(options, report)
            claim(options, contents)  # only now: a run that could not begin should not bind the next one
            return run.go()
    except Timeout:
        raise AparError(f"another process is training in {options.out}: wait for it, or give another --out") from None
    finally:
        lock.release()


class _Run:
    def __init__(self, options: MedusaTrainingOptions, report: Report) -> None:
        self.options = options
        self.report = report
        report(Event(f"reading {options.data}"))
        vocabulary, forks = data.vocabulary_of(options.base)
        self.data = data.load(options, vocabulary, forks=forks)
        if options.batch_size > len(self.data.learned):
            raise InputError(
                f"--batch-size is {options.batch_size}, and there are {len(self.data.learned)} answers: "
                "lower it, or add answers"
            )
        self.sampler = Sampler(len(self.data.learned), 0, options.batch_size, 1.0, options.seed)
        self.steps = self.sampler.steps(options.epochs) if options.epochs else options.steps
        self.held_out_rows = pack(self.data.held_out, options.row_tokens)
        report(Event(_described(self.data, self.steps)))
        report(Event(f"loading {options.base}"))
        self.model = TrainedHeads(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.model.check(Row(self.data.learned[:1]))
        self.parameters = list(self.model.heads.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=options.lr, weight_decay=options.weight_decay, fused=True
        )
        self.step = 0
        self.tokens = 0
        """Tokens of this run of the program, and the seconds they took."""
        self.seconds = 0.0

    def go(self) -> MedusaTrainingResult:
        folder = self.options.out / "checkpoints"
        found = checkpoints.latest(folder)
        if found is not None:
            self.step, state = found
            self.model.heads.load_state_dict(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.report(Event(f"going on behind step {self.step} of {self.steps}"))
        log = Log(self.options.out / "log.jsonl", self.step)
        eval_every = self.options.eval_every or max(1, self.steps // 10)
        saved = self.step if found else None
        with Interrupts() as interrupts:
            if self.step == 0:
                self._evaluate(log)
            while self.step < self.steps:
                line = self._one_step(interrupts)
                if line is None:
                    if saved != self.step:
                        self._save(folder)
                    return self._result(finished=False)
                self.step += 1
                log.write(**line)
                if self.step % eval_every == 0 or self.step == self.steps:
                    self._evaluate(log)
                    curves.draw(log.lines, self.options.out / "loss.png")
                self.report(Event("", self.step, self.steps, line))
                if self.step % self.options.save_every == 0 or self.step == self.steps:
                    self._save(folder)
                    saved = self.step
        self._write()
        return self._result(finished=True)

    def _one_step(self, interrupts: Interrupts) -> dict[str, Any] | None:
        """Learn from one batch; None, with the weights as they were, when asked to stop in the middle."""
        options, began = self.options, time.perf_counter()
        trees = take(self.sampler, self.step, self.data.learned, [])
        rows = pack(trees, options.row_tokens)
        counts = [sum(self.model.num_labels(row)[head] for row in rows) for head in range(options.heads)]
        losses = torch.zeros(options.heads, dtype=torch.float32, device=self.model.device)
        self.optimizer.zero_grad(set_to_none=True)
        for row in rows:
            if interrupts.asked:
                return None
            # Each head has weights of its own: the sum of their losses trains each as if it were alone.
            means = torch.stack([s / max(n, 1) for s, n in zip(self.model.losses(row), counts, strict=True)])
            means.sum().backward()
            losses += means.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, options.max_grad_norm)
        if not math.isfinite(norm.item()):
            raise AparError(f"the gradient of step {self.step + 1} is {norm.item()}: lower --lr, or use --dtype fp32")
        rate = learning_rate(self.step, self.steps, options.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = options.lr * rate
        self.optimizer.step()
        tokens = sum(row.num_tokens for row in rows)
        seconds = time.perf_counter() - began
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        return {
            "step": self.step + 1, "loss": losses.mean().item(), "losses": losses.tolist(), "grad_norm": norm.item(),
            "lr": options.lr * rate, "answers": len(trees), "tokens": tokens, "labels": counts,
            "seconds": round(seconds, 3),
        }  # fmt: skip

    def _evaluate(self, log: Log) -> None:
        figures = self.model.evaluate(self.held_out_rows)
        if figures:
            log.write(step=self.step, held_out=figures)
            self.report(Event(_told(figures), self.step, self.steps, {"held_out": figures}))

    def _save(self, folder: Path) -> None:
        state = {"weights": self.model.heads.state_dict(), "optimizer": self.optimizer.state_dict()}
        checkpoints.save(folder, self.step, state)

    def _write(self) -> None:
        out = self.options.out
        self.report(Event(f"writing {out / 'heads'}"))
        files.write_folder(out / "heads", self.model.write)
        result = asdict(self._result(finished=True))
        files.write_json(out / "result.json", {**result, "out": str(out), "heads": str(out / "heads")})

    def _result(self, *, finished: bool) -> MedusaTrainingResult:
        out = self.options.out
        held_out = [line["held_out"] for line in Log.read(out / "log.jsonl") if "held_out" in line]
        return MedusaTrainingResult(
            finished,
            self.step,
            self.steps,
            out,
            out / "heads" if finished else None,
            held_out[-1] if held_out else None,
            {
                "answers": len(self.data.learned),
                "trees": self.data.num_trees,
                "held_out": len(self.data.held_out),
                "left_out": dict(self.data.skipped),
                "tokens": self.data.num_tokens,
                "tokens_per_s": round(self.tokens / self.seconds, 1) if self.seconds else None,
            },
        )


def _described(found: data.MedusaData, steps: int) -> str:
    left_out = "".join(f", {count} {reason}" for reason, count in sorted(found.skipped.items()))
    return (
        f"{len(found.learned)} answers, {found.num_trees} of them trees, {len(found.held_out)} held out{left_out}; "
        f"{found.num_tokens} tokens; {steps} steps"
    )


def _told(figures: list[dict[str, Any]]) -> str:
    return "held out: " + "; ".join(
        f"head {number}: loss {one['loss']:.3f}, top-1 {one['top1']:.1%}, top-5 {one['top5']:.1%}"
        for number, one in enumerate(figures, 1)
    )

"""The training run of Medusa heads: reads, resumes, loops, evaluates, checkpoints, writes the heads.

In the folder `out`: `options.json`, `log.jsonl`, `loss.png`, `checkpoints/`, and at the end `heads/` and `result.json`.
A run that was stopped and started again gives bit for bit what it would have given. One process, one device.

Lines of the log: {"step", "loss", "losses", "grad_norm", "lr", "answers", "tokens", "labels", "seconds"} for each step
(`losses` per head, `loss` their mean) and {"step", "held_out": [...]} for each evaluation, an entry per head.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from apar import files
from apar.decoding.medusa_training import curves, data
from apar.decoding.medusa_training.model import TrainedHeads
from apar.decoding.medusa_training.options import MedusaTrainingOptions
from apar.errors import InputError
from apar.training.adapter import no_bars
from apar.training.claims import claim, contents_of, refuse_another_run
from apar.training.interrupts import Interrupts
from apar.training.log import Log
from apar.training.loop import Event, Report, TrainingLoop, check_base, locked
from apar.training.packing import Row, pack
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
    check_base(options.base)
    with locked(options.out):
        contents = contents_of(options)
        refuse_another_run(options, contents)
        done = files.read_json(options.out / "result.json")
        if done is not None:
            return MedusaTrainingResult(**{**done, "out": Path(done["out"]), "heads": Path(done["heads"])})
        with no_bars():
            run = _Run(options, report)
            claim(options, contents)  # only now: a run that could not begin should not bind the next one
            return run.go()


class _Run(TrainingLoop[MedusaTrainingOptions, MedusaTrainingResult]):
    def __init__(self, options: MedusaTrainingOptions, report: Report) -> None:
        super().__init__(options, report)
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
        groups = [{"params": self.parameters, "rate": options.lr}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, weight_decay=options.weight_decay, fused=True)

    def _learn(self, interrupts: Interrupts) -> dict[str, Any] | None:
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
        norm = self._clip(self.parameters)
        rate = self._rate()
        self.optimizer.step()
        timed = self._timed(sum(row.num_tokens for row in rows), time.perf_counter() - began)
        return {
            "step": self.step + 1, "loss": losses.mean().item(), "losses": losses.tolist(), "grad_norm": norm,
            "lr": options.lr * rate, "answers": len(trees), "labels": counts, **timed,
        }  # fmt: skip

    def _held_out(self) -> tuple[Any, str] | None:
        figures = self.model.evaluate(self.held_out_rows)
        return (figures, _told(figures)) if figures else None

    def _draw(self, log: Log, path: Path) -> None:
        curves.draw(log.lines, path)

    def _weights(self) -> dict[str, Any]:
        return dict(self.model.heads.state_dict())

    def _load_weights(self, weights: dict[str, Any]) -> None:
        self.model.heads.load_state_dict(weights)

    def _write(self) -> None:
        out = self.options.out
        self.report(Event(f"writing {out / 'heads'}"))
        files.write_folder(out / "heads", self.model.write)
        result = asdict(self._result(finished=True))
        files.write_json(out / "result.json", {**result, "out": str(out), "heads": str(out / "heads")})

    def _result(self, *, finished: bool) -> MedusaTrainingResult:
        out = self.options.out
        return MedusaTrainingResult(
            finished,
            self.step,
            self.steps,
            out,
            out / "heads" if finished else None,
            self.last_held_out(),
            {
                "answers": len(self.data.learned),
                "trees": self.data.num_trees,
                "held_out": len(self.data.held_out),
                "left_out": dict(self.data.skipped),
                "tokens": self.data.num_tokens,
                "tokens_per_s": self.tokens_per_s,
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

"""The training run: reads, resumes, loops, evaluates, checkpoints, writes the model.

In the folder `out`: `options.json`, `log.jsonl`, `loss.png`, `checkpoints/`, and at the end `adapter/` (LoRA),
`model/`, `result.json`. On one process a run that was stopped and started again gives bit for bit what it would have
given.

Several processes (accelerate's or torchrun's launcher) share each batch's rows and add up their gradients.
"""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from apar import files
from apar.errors import InputError
from apar.training import adapter, data
from apar.training.claims import claim, contents_of, refuse_another_run
from apar.training.interrupts import Interrupts
from apar.training.log import Log
from apar.training.loop import Event, Report, TrainingLoop, check_base, locked
from apar.training.model import HeldOut, TrainedModel
from apar.training.options import TrainingOptions
from apar.training.packing import pack
from apar.training.sampling import Sampler, take
from apar.training.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TrainingResult:
    finished: bool
    """False: stopped on request, behind a checkpoint."""
    step: int
    steps: int
    out: Path
    model: Path | None
    adapter: Path | None
    held_out: dict[str, Any] | None
    figures: dict[str, Any]


def train(options: TrainingOptions, report: Report = lambda event: None) -> TrainingResult:
    """Train, or go on training in `options.out`.

    SIGINT and SIGTERM end it early, with a checkpoint.

    Raises:
        InputError: the base, the data or an option cannot be used; or `out` holds a run with other options.
    """
    from accelerate import PartialState

    processes = PartialState(cpu=not torch.cuda.is_available())
    check_base(options.base)
    with locked(options.out, here=bool(processes.is_main_process)):
        done = files.read_json(options.out / "result.json")
        contents = contents_of(options)
        refuse_another_run(options, contents)
        if done is not None:
            return TrainingResult(**{**done, **{k: done[k] and Path(done[k]) for k in ("out", "model", "adapter")}})
        with adapter.no_bars():
            run = _Run(options, processes, report)
            if processes.is_main_process:
                claim(options, contents)  # only now: a run that could not begin should not bind the next one
            return run.go()


def is_main_process() -> bool:
    """Whether this process writes and shows; of several only one does."""
    from accelerate import PartialState

    return bool(PartialState(cpu=not torch.cuda.is_available()).is_main_process)


class _Run(TrainingLoop[TrainingOptions, TrainingResult]):
    def __init__(self, options: TrainingOptions, processes: Any, report: Report) -> None:
        super().__init__(options, report, is_main=bool(processes.is_main_process))
        self.processes = processes
        self.report(Event(f"reading {options.data}"))
        self.vocabulary = Vocabulary(options.base, options.fork_text, options.child_text)
        self.data = data.load(options, self.vocabulary)
        self.sampler = Sampler(
            len(self.data.structured), len(self.data.unstructured), options.batch_size, options.structured_share,
            options.seed,
        )  # fmt: skip
        _check_batch(options, self.data)
        self.steps = self.sampler.steps(options.epochs) if options.epochs else options.steps
        self.held_out_rows = pack(self.data.held_out, options.row_tokens)
        self.max_depth = options.max_depth or max(1, *(tree.depth for tree in self.data.trees))
        self.report(Event(_described(self.data, self.steps)))
        self.report(Event(f"loading {options.base}"))
        torch.manual_seed(options.seed)
        self.model = TrainedModel(options, self.vocabulary, processes.device)
        self.model.check()
        self.optimizer = torch.optim.AdamW(
            self.model.groups(options.lr, options.weight_decay), lr=options.lr, fused=True
        )

    def _learn(self, interrupts: Interrupts) -> dict[str, Any] | None:
        """Learn from one batch; None, with the weights as they were, when asked to stop in the middle."""
        options, began = self.options, time.perf_counter()
        # Dropout, where a model has any, is then the same however often the run was stopped.
        torch.manual_seed((options.seed * 1_000_003 + self.step) * 1_000 + self.processes.process_index)
        trees = take(self.sampler, self.step, self.data.structured, self.data.unstructured)
        rows = pack(trees, options.row_tokens)
        num_labels = sum(row.num_labels for row in rows)
        loss = torch.zeros((), dtype=torch.float32, device=self.model.device)
        self.optimizer.zero_grad(set_to_none=True)
        for row in rows[self.processes.process_index :: self.processes.num_processes]:
            if interrupts.asked and self.processes.num_processes == 1:
                return None
            summed = self.model.loss(row) / num_labels
            summed.backward()
            loss += summed.detach()
        if self._shared(loss, interrupts):
            return None
        norm = self._clip(self.model.parameters())
        rate = self._rate()
        self.model.update(self.optimizer)
        timed = self._timed(sum(row.num_tokens for row in rows), time.perf_counter() - began)
        return {
            "step": self.step + 1, "loss": loss.item(), "grad_norm": norm, "lr": options.lr * rate,
            "row_lr": options.row_rate * rate, "answers": len(trees), "labels": num_labels, **timed,
        }  # fmt: skip

    def _shared(self, loss: torch.Tensor, interrupts: Interrupts) -> bool:
        """Add up gradients and losses of all processes; returns whether any was asked to stop."""
        if self.processes.num_processes == 1:
            return False
        from accelerate.utils import reduce

        parameters = self.model.parameters()
        for parameter in parameters:
            if parameter.grad is None:  # more processes than rows
                parameter.grad = torch.zeros_like(parameter)
        asked = torch.tensor([float(interrupts.asked)], device=loss.device)
        flat = torch.cat([loss.reshape(1), asked, *(p.grad.reshape(-1) for p in parameters if p.grad is not None)])
        flat = reduce(flat, "sum")
        loss.copy_(flat[0])
        start = 2
        for parameter in parameters:
            assert parameter.grad is not None
            end = start + parameter.numel()
            parameter.grad.copy_(flat[start:end].view_as(parameter))
            start = end
        return bool(flat[1] > 0)

    def _held_out(self) -> tuple[Any, str] | None:
        figures = self.model.evaluate(self.held_out_rows)
        return None if figures is None else (asdict(figures), _told(figures))

    def _draw(self, log: Log, path: Path) -> None:
        log.draw(path)

    def _weights(self) -> dict[str, Any]:
        return self.model.state()

    def _load_weights(self, weights: dict[str, Any]) -> None:
        self.model.load_state(weights)

    def _wait(self) -> None:
        self.processes.wait_for_everyone()

    def _write(self) -> None:
        options, out = self.options, self.options.out
        self.report(Event(f"writing {out / 'model'}"))
        if options.method == "lora":
            base_name = options.base.resolve().name
            files.write_folder(out / "adapter", lambda new: self.model.write_adapter(new, base_name, self.max_depth))
            files.write_folder(out / "model", lambda new: adapter.merge(options.base, out / "adapter", new))
        else:
            dtype = adapter.kept_dtype(options.base)
            files.write_folder(out / "model", lambda new: self.model.write(new, self.max_depth, dtype))
        result = self._result(finished=True)
        said = {**asdict(result), "out": str(out), "model": str(result.model)}
        files.write_json(out / "result.json", {**said, "adapter": result.adapter and str(result.adapter)})

    def _result(self, *, finished: bool) -> TrainingResult:
        out = self.options.out
        return TrainingResult(
            finished,
            self.step,
            self.steps,
            out,
            out / "model" if finished else None,
            out / "adapter" if finished and self.options.method == "lora" else None,
            self.last_held_out(),
            {
                "structured": len(self.data.structured),
                "unstructured": len(self.data.unstructured),
                "held_out": len(self.data.held_out),
                "left_out": dict(self.data.skipped),
                "tree_tokens": self.data.num_tokens,
                "path_tokens": self.data.num_path_tokens,
                "tokens_per_s": self.tokens_per_s,
            },
        )


def _check_batch(options: TrainingOptions, found: data.TrainingData) -> None:
    """No answer comes twice in a step."""
    shares = (options.structured_share, 1 - options.structured_share)
    for sort, share in zip(("structured", "unstructured"), shares, strict=True):
        wanted, there = math.ceil(options.batch_size * share), len(getattr(found, sort))
        if wanted > there:
            raise InputError(
                f"--batch-size is {options.batch_size}, which is {wanted} {sort} answers in a step, and there are "
                f"{there}: lower it, or add answers"
            )


def _described(found: data.TrainingData, steps: int) -> str:
    saved = 1 - found.num_tokens / found.num_path_tokens
    left_out = "".join(f", {count} {reason}" for reason, count in sorted(found.skipped.items()))
    return (
        f"{len(found.structured)} structured and {len(found.unstructured)} unstructured answers, "
        f"{len(found.held_out)} held out{left_out}; {found.num_tokens} tokens as trees, {saved:.0%} fewer than the "
        f"{found.num_path_tokens} of one sequence per path; {steps} steps"
    )


def _told(figures: HeldOut) -> str:
    return (
        f"held out: loss {figures.loss:.4f}, P([Fork]) {figures.fork_due:.4f} where due, "
        f"{figures.fork_not_due:.6f} where not"
    )

"""A judging from its file to its report, in a folder that remembers how far it came.

The folder holds `judge.json` (what was asked, and each judge's job), `prompts.parquet` (the jobs' input), and at the
end `results.parquet`, `report.json` and `report.png`. The same command on the same folder goes on where it stopped.
"""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from db.session import Database
from db.states import ENDED
from jobs import doorbell, service
from jobs.errors import BadInput, Conflict, NotFound, Unavailable
from jobs.export import iter_results
from jobs.judging.confined import prepare_confined
from jobs.judging.folder import (
    PLOT_FILE,
    PROMPTS_FILE,
    REPORT_FILE,
    RESULTS_FILE,
    copy_into,
    open_folder,
    save_state,
    write_json,
)
from jobs.judging.items import Item
from jobs.judging.options import JudgeOptions
from jobs.judging.preparing import Prepared, read_facts
from jobs.judging.presenting import plot
from jobs.judging.prompts import sampling_of
from jobs.judging.report import make_report
from jobs.judging.rubrics import Kind
from jobs.judging.table import Judged, Reply, collect, read_reply, write_table
from jobs.judging.verdicts import ReplyForm
from jobs.settings import Settings
from jobs.source import first_line
from jobs.submit import SubmitOptions, submit_file

POLL_S = 0.5
_SCRATCH_PREFIX = "forq-submit-"
"""That of jobs/submit.py: `forq purge` clears what a killed command leaves."""

Advance = Callable[[str, int, int], None]


@dataclass(frozen=True)
class _Plan:
    """Everything that is known before the judges are asked."""

    prepared: Prepared
    items: list[Item]
    form: ReplyForm
    turns: tuple[int, ...]
    constrained: dict[str, bool]
    fingerprint: str


@dataclass(frozen=True)
class Begun:
    """A judging whose jobs are submitted."""

    folder: Path
    jobs: dict[str, str]
    """Job ids by judge."""
    plan: _Plan


def begin(
    database: Database, settings: Settings, path: Path, options: JudgeOptions, folder: Path, advance: Advance
) -> Begun:
    """Read the answers, write the prompts and submit a job for each judge; what was done before is not done again.

    Raises:
        BadInput: file, rubric or options cannot be used, or the folder belongs to another judging.
    """
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX) as scratch:
        plan = _plan(settings, path, options, Path(scratch), advance)
        state = open_folder(folder, plan.fingerprint)
        prompts_file = folder / PROMPTS_FILE
        if not prompts_file.exists():
            copy_into(Path(scratch) / PROMPTS_FILE, prompts_file)
    for model in options.models:
        if model in state.jobs:
            continue
        submitted = submit_file(
            database,
            settings,
            prompts_file,
            SubmitOptions(
                model=model,
                messages_column="messages",
                sampling=sampling_of(plan.form, constrained=plan.constrained[model], logprobs=options.logprobs),
                priority=options.priority,
                name=f"judge {state.run_id}",
                # A crash before the id is noted must not make a second job: the name is this folder's alone.
                dedupe=True,
            ),
            advance,
        )
        state.jobs[model] = submitted.job_id
        save_state(state, folder)
        doorbell.ring(settings, model, submitted.num_shards)
    return Begun(folder, {model: state.jobs[model] for model in options.models}, plan)


def wait(
    database: Database, begun: Begun, advance: Advance, say: Callable[[str], None], timeout_s: float | None
) -> bool:
    """Wait for the jobs to end; False when the time is over."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    told: set[str] = set()
    while True:
        found = [_status(database, model, job_id) for model, job_id in begun.jobs.items()]
        counts = [value["counts"] for value in found]
        done = sum(c["completed"] + c["failed"] + c["cancelled"] for c in counts)
        advance("judged", done, sum(c["total"] for c in counts))
        for value in found:
            if value["error"] and value["error"] not in told:
                told.add(value["error"])
                say(value["error"])
        if all(value["state"] in ENDED for value in found):
            return True
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)


def finish(
    database: Database, settings: Settings, path: Path, options: JudgeOptions, begun: Begun, advance: Advance
) -> dict[str, Any]:
    """Read the replies, write table, report and picture, and return the report.

    Raises:
        Conflict: a job was cancelled, or could not run at all.
    """
    by_judge: dict[str, list[Judged]] = {}
    plan = begun.plan
    for model, job_id in begun.jobs.items():
        status = _status(database, model, job_id)
        if status["state"] != "completed":
            raise Conflict(
                f"judge {model}'s job {job_id} is {status['state']}{': ' if status['error'] else ''}"
                f"{status['error'] or ''}; `forq retry {job_id}`, then the same command again"
            )
        replies = _replies(database, settings, job_id, plan.form, options.logprobs, advance)
        by_judge[model] = collect(model, options.kind, plan.items, plan.turns, replies)
    report = make_report(
        options.kind,
        by_judge,
        scale=plan.prepared.rubric.scale,
        inconsistent=options.inconsistent,
        seed=options.seed,
        facts=_facts(path, options, begun),
    )
    judged = (one for found in by_judge.values() for one in found)
    write_table(judged, options.kind, options.inconsistent, begun.folder / RESULTS_FILE)
    write_json(report, begun.folder / REPORT_FILE)
    plot(report, begun.folder / PLOT_FILE)
    return report


def _plan(settings: Settings, path: Path, options: JudgeOptions, scratch: Path, advance: Advance) -> _Plan:
    if len(set(options.models)) < len(options.models):
        raise BadInput("a judge is named twice with --model: its second verdicts would be its first")
    # The reference backend has neither structured output nor log probabilities: its replies are read as they come.
    constrained = {model: options.constrained and settings.model(model).backend == "vllm" for model in options.models}
    unable = [model for model in options.models if settings.model(model).backend != "vllm"]
    if options.logprobs and unable:
        raise BadInput(
            f"--logprobs: model {unable[0]} has backend reference, which has none: use one with backend vllm"
        )
    try:
        prepared = prepare_confined(path, options, settings.limits, scratch, advance)
        items = list(read_facts(scratch))
    except OSError as error:  # the scratch folder or the disk, not the file: that one raises BadInput
        raise Unavailable(
            f"{path.name} cannot be prepared ({first_line(error)}): check space and rights in {tempfile.gettempdir()}"
        ) from None
    form = options.form(prepared.rubric)
    turns = options.judged_turns(prepared.num_turns)
    said = [
        options.kind, list(options.models), asdict(prepared.rubric), sorted(options.columns.items()), asdict(form),
        options.logprobs, sorted(constrained.items()), options.ordered, turns, options.limit, _sha256(path),
    ]  # fmt: skip
    fingerprint = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
    return _Plan(prepared, items, form, turns, constrained, fingerprint)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _status(database: Database, model: str, job_id: str) -> dict[str, Any]:
    try:
        return service.job_status(database, job_id)
    except NotFound:
        raise NotFound(
            f"judge {model}'s job {job_id} is not in this database any more: judge anew into another folder with --out"
        ) from None


def _replies(
    database: Database, settings: Settings, job_id: str, form: ReplyForm, logprobs: bool, advance: Advance
) -> dict[tuple[int, int, str | None], Reply]:
    found: dict[tuple[int, int, str | None], Reply] = {}
    for batch in iter_results(database, settings, job_id, with_logprobs=logprobs, progress=advance):
        for row in batch.to_pylist():
            found[row["item"], row["turn"], row["order"]] = read_reply(row, form)
    return found


def _facts(path: Path, options: JudgeOptions, begun: Begun) -> dict[str, Any]:
    plan = begun.plan
    return {
        "kind": options.kind,
        "file": path.name,
        "rows": plan.prepared.num_rows,
        "items": len(plan.items),
        "unpaired_questions": plan.prepared.num_unpaired if options.kind == "pairwise" else None,
        "rubric": plan.prepared.rubric.name,
        "scale": None if options.kind == "pairwise" else list(plan.prepared.rubric.scale),
        "turns": plan.prepared.num_turns,
        "judged_turns": list(plan.turns),
        "reasons": options.reasons,
        "ordered": options.ordered,
        "seed": options.seed,
        "constrained": plan.constrained,
        "jobs": begun.jobs,
    }


def default_folder(path: Path, kind: Kind) -> Path:
    """Where a judging goes that names no folder."""
    return Path(f"{path.stem}-{kind}")

"""A judging from its file to its report, in a folder that remembers how far it came.

The folder holds `judge.json` (what was asked, and each judge's job), `prompts.parquet` (the jobs' input), and at the
end `results.parquet`, `report.json` and `report.png`. The same command on the same folder goes on where it stopped.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ulid import ULID

from db.session import Database
from jobs import doorbell, service, store
from jobs.errors import BadInput, Conflict, NotFound
from jobs.export import iter_results
from jobs.judging.items import Items, read_items
from jobs.judging.presenting import plot
from jobs.judging.probabilities import can_tell
from jobs.judging.prompts import make_prompts, sampling_of, write_prompts
from jobs.judging.report import make_report
from jobs.judging.rubrics import Kind, Rubric, load_rubric
from jobs.judging.table import Judged, Reply, collect, read_reply, write_table
from jobs.judging.verdicts import ReplyForm, pair_form, score_form
from jobs.settings import Settings
from jobs.submit import SubmitOptions, submit_file

STATE_FILE, PROMPTS_FILE = "judge.json", "prompts.parquet"
RESULTS_FILE, REPORT_FILE, PLOT_FILE = "results.parquet", "report.json", "report.png"
STATE_VERSION = 1
POLL_S = 0.5
ENDED = ("completed", "failed", "cancelled")

Advance = Callable[[str, int, int], None]


@dataclass(frozen=True)
class JudgeOptions:
    """What a user may say about a judging."""

    kind: Kind
    models: tuple[str, ...]
    """The judges: aliases."""
    rubric: str | None = None
    scale: tuple[int, int] | None = None
    columns: dict[str, str] = field(default_factory=dict)
    reasons: bool = False
    logprobs: bool = False
    constrained: bool = True
    ordered: bool = True
    turns: str = "second"
    """Of two turns: `second` or `each` is judged."""
    inconsistent: str = "tie"
    """What a pair counts whose two orders disagree: `tie`, or `null`, nothing."""
    limit: int | None = None
    seed: int = 0
    """Of the bootstrap."""
    priority: int = 0


@dataclass(frozen=True)
class _Plan:
    """Everything that is known before the judges are asked."""

    items: Items
    rubric: Rubric
    form: ReplyForm
    turns: tuple[int, ...]
    constrained: dict[str, bool]
    fingerprint: str


@dataclass
class _State:
    """`judge.json`."""

    run_id: str
    fingerprint: str
    jobs: dict[str, str] = field(default_factory=dict)
    version: int = STATE_VERSION


@dataclass(frozen=True)
class Begun:
    """A judging whose jobs are submitted."""

    folder: Path
    jobs: dict[str, str]
    """Job ids by judge."""
    plan: _Plan
    errors: dict[int, str]
    """Of the items that are not asked."""


def begin(
    database: Database, settings: Settings, path: Path, options: JudgeOptions, folder: Path, advance: Advance
) -> Begun:
    """Read the answers, write the prompts and submit a job for each judge; what was done before is not done again.

    Raises:
        BadInput: file, rubric or options cannot be used, or the folder belongs to another judging.
    """
    plan = _plan(settings, path, options)
    prompts, errors = make_prompts(plan.items.items, plan.rubric, plan.form, plan.turns, options.ordered)
    if not prompts:
        raise BadInput(
            f"{path.name}: none of {len(plan.items.items)} item(s) can be judged: {next(iter(errors.values()))}"
        )
    state = _open_folder(folder, plan.fingerprint)
    prompts_file = folder / PROMPTS_FILE
    if not prompts_file.exists():
        write_prompts(prompts, prompts_file)
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
        _save(state, folder)
        doorbell.ring(settings, model, submitted.num_shards)
    return Begun(folder, {model: state.jobs[model] for model in options.models}, plan, errors)


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
        by_judge[model] = collect(model, options.kind, plan.items.items, begun.errors, plan.turns, replies)
    report = make_report(
        options.kind,
        by_judge,
        scale=plan.rubric.scale,
        inconsistent=options.inconsistent,
        seed=options.seed,
        facts=_facts(path, options, begun),
    )
    judged = (one for found in by_judge.values() for one in found)
    write_table(judged, options.kind, options.inconsistent, begun.folder / RESULTS_FILE)
    _write_json(report, begun.folder / REPORT_FILE)
    plot(report, begun.folder / PLOT_FILE)
    return report


def _plan(settings: Settings, path: Path, options: JudgeOptions) -> _Plan:
    if len(set(options.models)) < len(options.models):
        raise BadInput("a judge is named twice with --model: its second verdicts would be its first")
    for model in options.models:
        settings.model(model)
    items = read_items(path, options.kind, options.columns, options.limit)
    rubric = load_rubric(options.rubric, options.kind, items.num_turns, options.scale)
    if options.kind == "pairwise" and options.scale is not None:
        raise BadInput("--scale stands beside --kind pairwise, whose verdicts are A, B and tie: leave it out")
    form = pair_form(options.reasons) if options.kind == "pairwise" else score_form(*rubric.scale, options.reasons)
    if options.logprobs and not can_tell(form):
        raise BadInput(
            f"--logprobs needs scores that differ in their first digit, the scale is {rubric.scale[0]}-"
            f"{rubric.scale[1]}: use one within 0-9"
        )
    # The reference backend has neither: its judges' replies are read as they come.
    constrained = {model: options.constrained and settings.model(model).backend == "vllm" for model in options.models}
    unable = [model for model in options.models if settings.model(model).backend != "vllm"]
    if options.logprobs and unable:
        raise BadInput(
            f"--logprobs: model {unable[0]} has backend reference, which has none: use one with backend vllm"
        )
    turns = (1,) if items.num_turns == 1 else (1, 2) if options.turns == "each" else (2,)
    said = [
        options.kind, list(options.models), asdict(rubric), sorted(options.columns.items()), asdict(form),
        options.logprobs, sorted(constrained.items()), options.ordered, turns, options.limit, _sha256(path),
    ]  # fmt: skip
    fingerprint = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
    return _Plan(items, rubric, form, turns, constrained, fingerprint)


def _open_folder(folder: Path, fingerprint: str) -> _State:
    file = folder / STATE_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BadInput(f"{folder} is not empty and holds no judging: name another folder with --out")
        state = _State(str(ULID()), fingerprint)
        _save(state, folder)
        return state
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        state = _State(read["run_id"], read["fingerprint"], dict(read["jobs"]), read["version"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"{file} is damaged: remove {folder}, or name another folder with --out") from None
    if state.version != STATE_VERSION or state.fingerprint != fingerprint:
        raise BadInput(
            f"{folder} holds a judging of another file or with other options: name another folder with --out, or "
            "remove it"
        )
    return state


def _save(state: _State, folder: Path) -> None:
    _write_json(asdict(state), folder / STATE_FILE)


def _write_json(value: Any, path: Path) -> None:
    temporary = store.temporary_beside(path)
    try:
        temporary.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        store.publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
        "rows": plan.items.num_rows,
        "items": len(plan.items.items),
        "unpaired_questions": plan.items.num_unpaired if options.kind == "pairwise" else None,
        "rubric": plan.rubric.name,
        "scale": None if options.kind == "pairwise" else list(plan.rubric.scale),
        "turns": plan.items.num_turns,
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


def parse_columns(said: Sequence[str]) -> dict[str, str]:
    """Read `ROLE=NAME` values. Raises BadInput."""
    found: dict[str, str] = {}
    for text in said:
        role, equals, name = text.partition("=")
        if not (role and equals and name):
            raise BadInput(f"--column is {text!r}: write what a column is for and its name, like prompt=question")
        if role in found:
            raise BadInput(f"--column names {role} twice: {found[role]} and {name}")
        found[role] = name
    return found

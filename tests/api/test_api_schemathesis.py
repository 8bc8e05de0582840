"""schemathesis reads the OpenAPI document, asks every operation for what it invites and what it forbids, and compares.

A real server on a real port, without keys and with them. The operations are whatever the document has: a new route is
asked without a word here. Derandomized: every run asks the same.
"""

import copy
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
import schemathesis
import uvicorn
from api_support import finish_shard, parquet_bytes, prompts
from database_fixtures import Templates
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from schemathesis.core.failures import FailureGroup
from schemathesis.transport.serialization import Binary

from api.app import begin_shutdown, create_app
from db.session import Database
from jobs import ending, keys
from jobs.api_settings import ApiSettings
from jobs.settings import Limits, QueueSettings, Settings
from jobs.storage_settings import StorageRoot, StorageSettings
from jobs.submit import SubmitOptions, submit_file
from jobs.webhook_settings import WebhookSettings
from jobs.webhooks import registry

PLACES = [f"01JZ8Y3M5N7Q9R1S2T4V6W8X0{number}" for number in range(4)]
"""Stand in the generated paths for jobs, webhooks, files and batches that exist only once the service runs."""
HOOKS = "https://hooks.example.com/"
LONGEST_WAIT_S = 0.05
OPEN = {"/healthz", "/readyz"}
EXAMPLES = 25
FEW_EXAMPLES = 3


class Service:
    """The application behind uvicorn in a `threading.Thread`, with jobs in several states."""

    def __init__(self, home: Path, broker_url: str, templates: Templates, *, keyed: bool) -> None:
        home.mkdir()
        settings = Settings(
            home=home,
            database_url=templates.copy("sqlite", home),
            broker_url=broker_url,
            queue=QueueSettings(shard_rows=4),
            # Beyond what is generated: the document cannot name what each operator allows.
            limits=Limits(max_n=10**60, max_max_tokens=10**60),
            api=ApiSettings(rate_per_minute=0, failures_per_minute=0),
            storage=StorageSettings(roots=(StorageRoot(url=f"file://{home}"),)),
            webhooks=WebhookSettings.model_validate({"allow": [HOOKS]}),
        )
        self._export_url = f"file://{home}/answers.parquet"
        database = Database(settings.sqlalchemy_url)
        file = home / "prompts.parquet"
        pq.write_table(prompts(3), file)
        tenants = ["default", "default", "default", "theirs"]
        self.jobs = [
            submit_file(database, settings, file, SubmitOptions(model=settings.default_model, tenant=tenant)).job_id
            for tenant in tenants
        ]
        finish_shard(database, failing=(1,))
        ending.cancel(database, self.jobs[1])
        self._settings = settings
        self._num_webhooks = self._num_batches = 0
        self.webhook = self._new_webhook()
        self.headers: dict[str, str] = {}
        if keyed:
            self.headers["Authorization"] = f"Bearer {keys.create(database, 'k', ['read', 'submit'])[1]}"
        database.dispose()
        self._app = create_app(settings, poll_s=0.02, keys_required=keyed)
        config = uvicorn.Config(self._app, port=0, log_config=None, access_log=False, server_header=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self.answers: dict[str, Counter[int]] = defaultdict(Counter)
        """Operation → how often each status was answered."""
        self.file = self._new_file()
        self.batch = self._new_batch()

    def ask(self, case: Any, headers: dict[str, str]) -> Any:
        """Ask, and compare the answer with the document."""
        self.make_real(case)
        response = case.call_and_validate(base_url=self.url, headers=headers)
        self.answers[case.operation.label][response.status_code] += 1
        return response

    def make_real(self, case: Any) -> None:
        """Put in what no document can tell, and nothing else: jobs that exist, a file that can be read, no names."""
        place = case.path_parameters.get("job_id")
        if place in PLACES:
            case.path_parameters["job_id"] = self.jobs[PLACES.index(place)]
        if case.path_parameters.get("webhook_id") in PLACES:
            is_last = case.operation.label.startswith("DELETE")
            case.path_parameters["webhook_id"] = self._new_webhook() if is_last else self.webhook
        if case.operation.label == "POST /v1/webhooks" and case.meta.generation.mode.is_positive:
            self._num_webhooks += 1
            case.body = {**case.body, "url": f"{HOOKS}{self._num_webhooks}"}  # what the operator allows
        if case.operation.path.startswith(("/v1/files", "/v1/batches")):
            self._make_openai_real(case)
        wait = (case.query or {}).get("wait")
        if isinstance(wait, int | float) and LONGEST_WAIT_S < wait <= 60:
            case.query["wait"] = LONGEST_WAIT_S
        if case.operation.label == "POST /v1/jobs" and case.meta.generation.mode.is_positive:
            # Texts name things: a model, a column, an address. Only numbers can be judged by their schema.
            numbers = {name: value for name, value in case.body.items() if isinstance(value, int | float)}
            case.body = {"file": Binary(parquet_bytes()), **numbers}
            # Still what is invited: schemathesis takes a changed body with bytes in it for a wrong one.
            case._record_starting_state()
        if case.operation.label.endswith("/export") and case.meta.generation.mode.is_positive:
            case.body = {**case.body, "url": self._export_url}

    def _make_openai_real(self, case: Any) -> None:
        label = case.operation.label
        if case.path_parameters.get("file_id") in (*PLACES, self.file):  # which the others need
            case.path_parameters["file_id"] = self._new_file() if label.startswith("DELETE") else self.file
        is_positive = case.meta.generation.mode.is_positive
        if label.endswith("/cancel") and is_positive:  # twice is refused, also for one that an answer named
            case.path_parameters["batch_id"] = self._new_batch()
        elif case.path_parameters.get("batch_id") in PLACES:
            case.path_parameters["batch_id"] = self.batch
        if not is_positive:
            return
        if label == "POST /v1/batches":
            case.body = self._batch_body()

    def _batch_body(self) -> dict[str, Any]:
        self._num_batches += 1
        asked = {"input_file_id": self.file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return {**asked, "metadata": {"number": str(self._num_batches)}}

    def _new_file(self) -> str:
        files = {"file": ("prompts.parquet", parquet_bytes())}
        made = httpx.post(f"{self.url}/v1/files", data={"purpose": "batch"}, files=files, headers=self.headers)
        return str(made.raise_for_status().json()["id"])

    def _new_batch(self) -> str:
        made = httpx.post(f"{self.url}/v1/batches", json=self._batch_body(), headers=self.headers)
        return str(made.raise_for_status().json()["id"])

    def _new_webhook(self) -> str:
        database = Database(self._settings.sqlalchemy_url)
        self._num_webhooks += 1
        for old in registry.list_webhooks(database)[registry.MAX_PER_TENANT // 2 :]:
            registry.remove(database, old["id"])
        made, _ = registry.add(database, self._settings, f"{HOOKS}{self._num_webhooks}")
        database.dispose()
        return str(made["id"])

    def stop(self) -> None:
        begin_shutdown(self._app)
        self._server.should_exit = True
        self._thread.join(30)


@pytest.fixture(scope="module")
def open_service(tmp_path_factory: pytest.TempPathFactory, broker_url: str, templates: Templates) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("open") / "home", broker_url, templates, keyed=False)
    yield service
    service.stop()


@pytest.fixture(scope="module")
def keyed_service(tmp_path_factory: pytest.TempPathFactory, broker_url: str, templates: Templates) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("keyed") / "home", broker_url, templates, keyed=True)
    yield service
    service.stop()


def document(*, keyed: bool) -> dict[str, Any]:
    app = create_app(Settings(home=Path("/nonexistent"), database_url="sqlite://"), keys_required=keyed)
    return copy.deepcopy(app.openapi())


def schema_of(document: dict[str, Any]) -> Any:
    """All checks of schemathesis are on, in all its phases: examples, coverage of each constraint, random values."""
    config = {
        "dictionaries": {"jobs": {"values": PLACES}},
        "parameters": {
            f"path.{name}": {"dictionary": "jobs"} for name in ("job_id", "webhook_id", "file_id", "batch_id")
        },
    }
    return schemathesis.openapi.from_dict(document, config=schemathesis.Config.from_dict(config))


def effort(max_examples: int) -> hypothesis_settings:
    """Of random values; coverage comes on top and is always whole. Speed is not what is tested."""
    return hypothesis_settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


without_keys, with_keys = schema_of(document(keyed=False)), schema_of(document(keyed=True))


@without_keys.parametrize()
@effort(EXAMPLES)
def test_without_keys_the_service_answers_as_its_document_says(case: Any, open_service: Service) -> None:
    open_service.ask(case, {})


@with_keys.parametrize()
@effort(EXAMPLES)
def test_with_a_key_the_service_answers_as_its_document_says(case: Any, keyed_service: Service) -> None:
    keyed_service.ask(case, keyed_service.headers)


@with_keys.parametrize()
@effort(FEW_EXAMPLES)
def test_where_keys_are_required_nothing_but_the_probes_is_answered_without_one(
    case: Any, keyed_service: Service
) -> None:
    response = case.call_and_validate(base_url=keyed_service.url)
    if case.operation.path not in OPEN and response.status_code != 405:
        assert response.status_code == 401, response.text
        assert response.headers["www-authenticate"][0].startswith("Bearer")


@pytest.mark.parametrize("service", ["open_service", "keyed_service"])
def test_every_operation_that_was_asked_has_also_done_what_it_is_for(
    service: str, request: pytest.FixtureRequest
) -> None:
    """Or else all the answers above could be refusals."""
    answers = request.getfixturevalue(service).answers
    for operation, statuses in answers.items():
        assert any(200 <= status < 300 for status in statuses), (operation, statuses)
    print(sum(sum(statuses.values()) for statuses in answers.values()), "cases of", len(answers), "operations")


@pytest.mark.parametrize(
    ("says", "finds"),
    [
        (lambda doc: doc["components"]["schemas"]["JobList"]["required"].append("total"), "total"),
        (lambda doc: doc["paths"]["/v1/jobs"]["get"]["responses"].pop("200"), "status code"),
    ],
)
def test_a_document_that_says_otherwise_is_noticed(says: Any, finds: str, open_service: Service) -> None:
    wrong = document(keyed=False)
    says(wrong)
    with pytest.raises(FailureGroup, match=f"(?i){finds}"):
        schema_of(wrong)["/v1/jobs"]["GET"].Case().call_and_validate(base_url=open_service.url)
    schema_of(document(keyed=False))["/v1/jobs"]["GET"].Case().call_and_validate(base_url=open_service.url)


def test_chains_of_calls_that_pass_on_what_was_answered_are_answered_as_the_document_says(
    keyed_service: Service,
) -> None:
    """A job is submitted, and what it is called goes into the next call, as schemathesis infers from the document."""

    class Chain(with_keys.as_state_machine()):  # type: ignore[misc]
        def before_call(self, case: Any) -> None:
            keyed_service.make_real(case)

        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return {"base_url": keyed_service.url, "headers": keyed_service.headers}

        def after_call(self, response: Any, case: Any) -> None:
            followed[case.operation.label, response.status_code] += 1

    followed: Counter[tuple[str, int]] = Counter()
    Chain.run(settings=hypothesis_settings(effort(8), stateful_step_count=6))
    print(followed)

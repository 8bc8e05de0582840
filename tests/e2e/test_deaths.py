"""Parts of the running service are killed at bad moments; then every row is there once and nothing is left over."""

import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from service import MODEL, UP_S, Service, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(900)]

NUM_ROWS = 40
GONE_S = 40.0
"""A worker that is told to stop drains for 5 s; the rest is for a busy machine."""


def submit_half_done(service: Service, name: str) -> tuple[str, dict[int, str]]:
    """Submit a job and wait until some of its rows are answered and some are not. Sampled, not greedy: a row that is
    generated again reads differently. Returns the job and the answers it had at that moment."""
    path = service.write(f"{name}.parquet", {"prompt": [f"Tell me a story about {n} birds." for n in range(NUM_ROWS)]})
    job = service.submit(path, "--max-tokens", "32", "--temperature", "1")
    before = eventually(lambda: service.outputs(job), "the first rows are answered", every_s=0.02)
    assert 0 < len(before) < NUM_ROWS
    return job, before


def check_after(service: Service, job: str, before: dict[int, str]) -> None:
    status = service.wait(job)
    assert status["counts"] == {"total": NUM_ROWS, "completed": NUM_ROWS, "failed": 0, "cancelled": 0}
    service.check_every_row_is_there_once(job, NUM_ROWS)
    after = service.outputs(job)
    assert {request: after[request] for request in before} == before


def test_a_killed_worker_is_replaced_and_answered_rows_are_not_generated_again(service: Service) -> None:
    job, _ = submit_half_done(service, "worker")
    worker = service.pid_of("worker")
    psutil.Process(worker).suspend()  # so that what is stored now is what the kill leaves
    before = service.outputs(job)
    psutil.Process(worker).kill()
    assert 0 < len(before) < NUM_ROWS
    check_after(service, job, before)
    assert service.pid_of("worker") != worker
    with service.database() as database, database.read() as connection:
        reason = connection.exec_driver_sql(f"SELECT exit_reason FROM workers WHERE pid = {worker}").scalar()
    assert reason == "it died with exit code -9"
    log = (service.home / "logs" / "up.log").read_text()
    assert '"code": -9' in log
    assert "leases_released" in log


def test_a_killed_broker_api_or_watcher_is_replaced_and_no_job_notices(service: Service) -> None:
    job, before = submit_half_done(service, "parts")
    killed = {part: service.pid_of(part) for part in ("broker", "api", "watch")}
    for pid in killed.values():
        psutil.Process(pid).kill()

    def replaced() -> bool:
        now = {part["part"]: part["pid"] for part in service.ask("ps")}
        return all(now.get(part, pid) != pid for part, pid in killed.items())

    eventually(replaced, "the killed parts run again")
    check_after(service, job, before)
    # The doorbell rings again through the new broker.
    after = service.write("after.parquet", {"prompt": ["Say hello."]})
    assert service.forq("submit", after, "--max-tokens", "4", "--wait").returncode == 0


def test_when_the_supervisor_is_killed_every_part_goes_and_the_next_up_goes_on(service: Service) -> None:
    job, _ = submit_half_done(service, "supervisor")
    psutil.Process(service.pid_of("up")).kill()
    eventually(lambda: not service.processes(), "every part has gone by itself", GONE_S)
    before = service.outputs(job)  # the worker has drained: what it had begun, it could finish
    assert service.ask("ps") == []
    service.up()
    check_after(service, job, before)
    service.down()


def test_up_in_the_foreground_drains_on_ctrl_c_and_a_second_one_is_refused(idle_service: Service) -> None:
    """The last test here: the service is down before and after it."""
    service = idle_service
    assert not service.processes()
    with (service.work / "foreground.log").open("w") as log:
        up = service.start("up", stdout=subprocess.PIPE, stderr=log)

    def ready() -> bool:
        assert up.poll() is None, Path(log.name).read_text()
        return "forq is up:" in Path(log.name).read_text()

    try:
        eventually(ready, "it says that it is up", UP_S)
        for args in (["up"], ["up", "--detach"]):
            second = service.forq(*args)
            assert (second.returncode, second.stdout) == (1, "")
            assert second.stderr.splitlines()[-1] == (
                f"forq: forq is up already (pid {up.pid}): `forq ps` shows it, `forq down` stops it"
            )
        job, _ = submit_half_done(service, "ctrl-c")
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
    finally:
        up.kill()
        up.wait()
    assert not service.processes()
    with service.database() as database, database.read() as connection:
        states = connection.exec_driver_sql("SELECT DISTINCT state FROM shards").scalars().all()
        attempts = connection.exec_driver_sql(f"SELECT max(attempts) FROM shards WHERE job_id = '{job}'").scalar()
        left = connection.exec_driver_sql("SELECT exit_reason FROM workers ORDER BY started_at DESC LIMIT 1").scalar()
    assert "leased" not in states  # given back, not left to expire
    assert attempts == 0  # and nobody is to blame
    assert left == "stopped"
    status = service.ask("status", job)
    assert status["counts"]["failed"] == 0
    assert status["counts"]["completed"] == len(service.outputs(job))


def broken_service(tmp_path: Path, alias: str) -> Service:
    return Service(tmp_path / "home", f'default_model = "broken"\n[models.broken]\n{alias}\nkv_budget = "64 blocks"\n')


def submit_to_broken(service: Service) -> str:
    path = service.write("p.parquet", {"prompt": ["Say hello."]})
    return str(service.ask("submit", path)["job_id"])


def check_up_fails(service: Service, *says: str) -> dict[str, Any]:
    """`up` ends with exit code 1 and one line that names the reason, in the foreground and detached."""
    done = service.forq("up", "--detach", timeout_s=UP_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("forq: worker did not start: ")
    assert done.stderr.count("\n") == 1
    for part in says:
        assert part in done.stderr
    assert not service.processes()
    (job,) = service.ask("list")
    status: dict[str, Any] = service.ask("status", job["job_id"], exit_code=1 if job["state"] == "failed" else 0)
    return status


def test_a_model_that_is_not_there_fails_its_jobs_with_the_reason(tmp_path: Path) -> None:
    service = broken_service(tmp_path, f'path = "{tmp_path}/nowhere"')
    submit_to_broken(service)
    status = check_up_fails(service, "nowhere")
    assert status["state"] == "failed"
    assert "nowhere" in status["error"]
    assert status["counts"]["failed"] == 1


def test_an_engine_that_cannot_load_its_weights_says_so_and_the_job_waits_with_that_reason(
    tmp_path: Path, smollm2_path: Path
) -> None:
    """A model folder whose weights are cut off."""
    model = tmp_path / "model"
    model.mkdir()
    for file in smollm2_path.iterdir():
        content = file.read_bytes()
        (model / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    service = broken_service(tmp_path, f'path = "{model}"')
    submit_to_broken(service)
    status = check_up_fails(service, "the engine cannot start: ")
    assert status["state"] == "queued"
    assert "no worker serves broken now" in status["error"]
    assert "the last one ended with: the engine cannot start" in status["error"]
    assert MODEL not in status["error"]

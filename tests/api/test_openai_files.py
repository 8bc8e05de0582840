"""The routes of files: uploads good and bad, lists, expiry, deletion, whose they are, and what stays in the store."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from api_support import assert_openai_error, parquet_bytes
from openai_support import age, many
from sqlalchemy import select, update
from starlette.testclient import TestClient

from api.app import create_app
from db.clock import db_now
from db.models import File
from db.session import Database
from jobs import keys, openai_files
from jobs.settings import Settings
from jobs.submit import SubmitOptions, submit_file
from jobs.upkeep import leftovers
from jobs.upkeep.checks import CHECKS
from jobs.upkeep.purge import purge

UNKNOWN = "file-01JZ8Y3M5N7Q9R1S2T4V6W8X0Z"


def post(
    client: TestClient, content: bytes = b"{}\n", name: str = "a.jsonl", *, headers: Any = None, values: Any = None
) -> Any:
    data = {"purpose": "batch", **(values or {})}
    return client.post("/v1/files", files={"file": (name, content)}, data=data, headers=headers)


def upload(client: TestClient, *args: Any, **options: Any) -> str:
    response = post(client, *args, **options)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def stored(settings: Settings) -> list[str]:
    return sorted(path.name for path in settings.data_dir.iterdir())


def test_a_file_comes_back_as_it_was(client: TestClient, settings: Settings) -> None:
    content = many(3)
    created = post(client, content, "prömpts 1.jsonl").json()
    assert created.keys() == {
        "id", "object", "bytes", "created_at", "filename", "purpose", "status", "status_details", "expires_at",
    }  # fmt: skip
    assert (created["bytes"], created["filename"], created["expires_at"]) == (len(content), "prömpts 1.jsonl", None)
    assert abs(created["created_at"] - time.time()) < 600
    assert client.get(f"/v1/files/{created['id']}").json() == created
    got = client.get(f"/v1/files/{created['id']}/content", headers={"Accept": "application/binary"})
    assert (got.status_code, got.content) == (200, content)
    assert stored(settings)[0].endswith(".jsonl")


def test_parquet_is_known_by_its_name_or_its_content(client: TestClient, settings: Settings) -> None:
    upload(client, parquet_bytes(), "a.parquet")
    upload(client, parquet_bytes(), "upload")
    assert len(stored(settings)) == 1
    assert stored(settings)[0].endswith(".parquet")
    upload(client, b"text", "upload")
    assert len(stored(settings)) == 2


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"colour": "red"}, "colour"),
        ({"url": "file:///etc/passwd"}, "url"),
        ({"expires_after[anchor]": "created_at"}, "both or neither"),
        ({"expires_after[seconds]": "3600"}, "both or neither"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "anchor"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "59"}, "between 3600"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"}, "seconds"),
    ],
)
def test_a_refused_value_is_a_400_that_names_it(client: TestClient, data: dict[str, str], text: str) -> None:
    assert text in str(assert_openai_error(post(client, values=data), 400))
    assert client.get("/v1/files").json()["data"] == []


def test_malformed_uploads_are_refused_in_openais_form(client: TestClient) -> None:
    def send(body: bytes, kind: str) -> Any:
        return client.post("/v1/files", content=body, headers={"Content-Type": kind})

    form = "multipart/form-data; boundary=b"
    assert_openai_error(send(b"{}", "application/json"), 415, "multipart")
    assert_openai_error(send(b"", "multipart/form-data"), 400, "boundary")
    assert_openai_error(send(b"--c\r\n", form), 400)
    assert_openai_error(send(b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n', form), 400)
    no_file = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    assert_openai_error(send(no_file, form), 400, "no file")
    no_name = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n'
    assert_openai_error(send(no_name, form), 400, "file name")
    assert_openai_error(client.post("/v1/files", files={"file": ("a.jsonl", b"x")}), 400, "purpose")
    assert_openai_error(post(client, b"x" * ((1 << 20) + 1)), 413, "limits.max_upload_bytes")


def test_lists_page_in_both_orders_and_by_purpose(client: TestClient) -> None:
    ids = [upload(client, b"%d" % i) for i in range(5)]
    newest = client.get("/v1/files").json()
    assert [each["id"] for each in newest["data"]] == ids[::-1]
    assert (newest["first_id"], newest["last_id"], newest["has_more"]) == (ids[-1], ids[0], False)
    found: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = client.get("/v1/files", params={"limit": 2, "order": "asc", **after}).json()
        found += [each["id"] for each in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert found == ids
    assert client.get("/v1/files", params={"purpose": "batch_output"}).json() == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
    }  # fmt: skip
    for query in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"after": "x"}, {"before": ids[0]}):
        assert_openai_error(client.get("/v1/files", params=query), 400)


def test_an_unknown_file_is_a_404_on_every_route(client: TestClient) -> None:
    for file_id in (UNKNOWN, "x", "file-%00", "a" * 300):
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
            assert_openai_error(client.request(method, f"/v1/files/{file_id}{path}"), 404)


def test_a_file_expires_and_is_gone(client: TestClient, database: Database) -> None:
    data = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    created = post(client, values=data).json()
    assert created["expires_at"] == created["created_at"] + 3600
    with database.write() as connection:
        connection.execute(update(File).values(expires_at=db_now()))
    assert_openai_error(client.get(f"/v1/files/{created['id']}"), 404, "expired")
    assert_openai_error(client.get(f"/v1/files/{created['id']}/content"), 404)
    assert client.get("/v1/files").json()["data"] == []
    body = {"input_file_id": created["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert_openai_error(client.post("/v1/batches", json=body), 404)


def test_deleted_content_goes_once_it_is_old_and_nothing_else_names_it(
    client: TestClient, database: Database, settings: Settings
) -> None:
    one, same, other = upload(client, b"a"), upload(client, b"a"), upload(client, b"b")
    assert client.delete(f"/v1/files/{one}").json() == {"id": one, "object": "file", "deleted": True}
    assert_openai_error(client.delete(f"/v1/files/{one}"), 404)
    assert client.delete(f"/v1/files/{other}").status_code == 200
    assert list(openai_files.reclaim(database, settings)) == []  # an upload of the same could be on its way
    assert len(stored(settings)) == 2
    age(settings)
    assert len(list(openai_files.reclaim(database, settings, dry_run=True))) == 2
    assert len(list(openai_files.reclaim(database, settings))) == 1  # `same` names the other
    assert client.get(f"/v1/files/{same}/content").content == b"a"
    with database.read() as connection:
        assert connection.scalars(select(File.id)).all() == [same]


def test_content_that_a_job_names_stays(client: TestClient, database: Database, settings: Settings) -> None:
    file_id = upload(client, parquet_bytes(), "a.parquet")
    path = settings.home / "a.parquet"
    path.write_bytes(parquet_bytes())
    submit_file(database, settings, path, SubmitOptions(model=settings.default_model))
    client.delete(f"/v1/files/{file_id}")
    age(settings)
    assert list(openai_files.reclaim(database, settings)) == []
    assert len(stored(settings)) == 1


def test_purge_and_doctor_know_the_files(client: TestClient, database: Database, settings: Settings) -> None:
    kept, deleted = upload(client, b"kept"), upload(client, b"deleted")
    age(settings)
    assert list(leftovers.unnamed_files(database, settings)) == []
    client.delete(f"/v1/files/{deleted}")
    assert purge(database, settings, 0.0, dry_run=True).files == 1
    assert purge(database, settings, 0.0).files == 1
    assert client.get(f"/v1/files/{kept}/content").content == b"kept"
    (check,) = [check for check in CHECKS if check.name == "files of the API are there"]
    assert check.find(database, settings).num == 0
    for path in settings.data_dir.iterdir():
        path.unlink()
    assert check.find(database, settings).example == kept
    assert_openai_error(client.get(f"/v1/files/{kept}/content"), 404, "not on this machine")


@pytest.fixture
def guarded(settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(settings, keys_required=True, poll_s=0.05), base_url="http://forq.example") as client:
        yield client


def bearer(database: Database, *scopes: str, tenant: str = "default") -> dict[str, str]:
    return {"Authorization": f"Bearer {keys.create(database, 'k', scopes, tenant=tenant)[1]}"}


def test_files_are_their_tenants_alone(guarded: TestClient, database: Database) -> None:
    mine, others = (bearer(database, "submit", "read", tenant=tenant) for tenant in ("a", "b"))
    admin = bearer(database, "admin")
    file_id = upload(guarded, headers=mine)
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        theirs = guarded.request(method, f"/v1/files/{file_id}{path}", headers=others)
        nobodys = guarded.request(method, f"/v1/files/{UNKNOWN}{path}", headers=others)
        assert_openai_error(theirs, 404)
        assert theirs.text.replace(file_id, UNKNOWN) == nobodys.text
    assert guarded.get("/v1/files", headers=others).json()["data"] == []
    for headers in (mine, admin):
        assert [each["id"] for each in guarded.get("/v1/files", headers=headers).json()["data"]] == [file_id]


def test_any_word_is_a_key_where_none_is_required_and_none_where_one_is(
    client: TestClient, guarded: TestClient
) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/models"):
        for word in ("none", "sk-proj-1234"):
            assert client.get(path, headers={"Authorization": f"Bearer {word}"}).status_code == 200
            assert guarded.get(path, headers={"Authorization": f"Bearer {word}"}).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer forq_wrong"}).status_code == 401
    assert client.get("/v1/jobs", headers={"Authorization": "Bearer none"}).status_code == 401

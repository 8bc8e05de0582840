"""What a URL may look like, and which root allows it."""

import pytest
from pydantic import ValidationError

from jobs.errors import BadInput
from jobs.remote.urls import MAX_URL_BYTES, parse_url
from jobs.settings import Settings
from jobs.storage_settings import StorageRoot, StorageSettings

ROOTS = StorageSettings.model_validate(
    {
        "roots": [
            "s3://bucket/prefix/",
            "s3://bucket/prefix/deep",
            {"url": "s3://bucket/inputs", "write": False},
            {"url": "gs://others", "tenants": ["red"]},
            {"url": "s3://bucket/prefix/red", "tenants": ["red"]},
            "file:///data/in",
        ]
    }
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("s3://bucket/prefix/../a.parquet", "'..' part"),
        ("s3://bucket/prefix/./a.parquet", "'..' part"),
        ("s3://bucket/prefix/..", "'..' part"),
        ("s3://bucket/prefix//a.parquet", "an empty"),
        ("s3://bucket//prefix/a.parquet", "an empty"),
        ("s3://bucket/prefix/%2e%2e/a.parquet", "percent-encoded"),
        ("s3://bucket/prefix/%2E./a.parquet", "percent-encoded"),
        ("s3://bucket/prefix%2Fa.parquet", "percent-encoded"),
        ("s3://bucket/prefix/a.parquet?versionId=1", "query"),
        ("s3://bucket/prefix/a.parquet#1", "fragment"),
        ("s3://bucket/prefix\\a.parquet", "backslash"),
        ("s3://bucket/prefix/a\n.parquet", "control"),
        ("s3://bucket/prefix/a\x00.parquet", "control"),
        ("s3://bucket/prefix/a\u202e.parquet", "control"),
        ("s3://bucket/prefix/", "names a folder"),
        ("s3://bucket", "names a folder"),
        ("s3:///prefix/a.parquet", "no bucket's name"),
        ("s3://Bucket/a.parquet", "no bucket's name"),
        ("s3://bucket:9000/a.parquet", "no bucket's name"),
        ("s3://../a.parquet", "no bucket's name"),
        ("S3://bucket/a.parquet", "use s3://, gs://, file://"),
        ("http://169.254.169.254/latest/meta-data", "use s3://, gs://, file://"),
        ("ftp://host/a.parquet", "use s3://, gs://, file://"),
        ("s3a://bucket/a.parquet", "use s3://, gs://, file://"),
        ("/data/in/a.parquet", "use s3://, gs://, file://"),
        ("file://host/data/in/a.parquet", "names the host"),
        ("file:////etc/passwd", "an empty"),
        ("file:///data/in/../../etc/passwd", "'..' part"),
        ("s3://bucket/" + "a" * MAX_URL_BYTES, f"over {MAX_URL_BYTES} bytes"),
    ],
)  # fmt: skip
def test_a_url_that_could_mean_two_things_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(BadInput) as refusal:
        parse_url(text)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    "text",
    [
        "s3://user:hunter2@bucket/a.parquet",
        "s3://hunter2@bucket/a",
        "s3://bucket/a?X-Amz-Signature=hunter2",
        "x://u:hunter2@h/",
    ],
)
def test_no_refusal_repeats_a_password_or_a_signature(text: str) -> None:
    with pytest.raises(BadInput) as refusal:
        parse_url(text)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    "text", ["s3://bucket/ä b/100%/q=1&r,(2)+~.parquet", "gs://a_b.c-d/x", "file:///data/in/x.jsonl"]
)
def test_a_url_is_taken_as_it_is_written(text: str) -> None:
    url = parse_url(text)
    assert str(url) == text
    assert text.endswith(url.key)


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("s3://bucket/prefix/a.parquet", "s3://bucket/prefix/"),
        ("s3://bucket/prefix/b/a.parquet", "s3://bucket/prefix/"),
        ("s3://bucket/prefix/deep/a.parquet", "s3://bucket/prefix/deep/"),
        ("file:///data/in/a.parquet", "file:///data/in/"),
    ],
)
def test_the_deepest_root_that_allows_a_url_is_its_root(text: str, root: str) -> None:
    assert ROOTS.root_of(parse_url(text), to_write=False, tenant=None).url == root


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a.parquet",
        "s3://bucket/prefix-evil/a.parquet",
        "s3://bucket/prefixa.parquet",
        "s3://bucket/prefix",
        "s3://bucket-evil/prefix/a.parquet",
        "s3://bucket.evil/prefix/a.parquet",
        "gs://bucket/prefix/a.parquet",
        "file:///data/in-evil/a.parquet",
        "file:///data/a.parquet",
        "file:///etc/passwd",
    ],
)
def test_a_url_outside_of_the_roots_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"under none of the roots .*storage\.roots"):
        ROOTS.root_of(parse_url(text), to_write=False, tenant=None)


def test_without_roots_no_url_is_opened() -> None:
    with pytest.raises(BadInput, match=r"storage\.roots is empty"):
        StorageSettings().root_of(parse_url("s3://bucket/a.parquet"), to_write=False, tenant=None)


def test_a_root_for_inputs_takes_no_output() -> None:
    url = parse_url("s3://bucket/inputs/a.parquet")
    assert ROOTS.root_of(url, to_write=False, tenant="blue").url == "s3://bucket/inputs/"
    with pytest.raises(BadInput, match="read only"):
        ROOTS.root_of(url, to_write=True, tenant=None)


def test_a_root_of_some_tenants_is_closed_to_others_but_not_to_the_operator() -> None:
    url = parse_url("gs://others/a.parquet")
    assert ROOTS.root_of(url, to_write=True, tenant="red").url == "gs://others/"
    assert ROOTS.root_of(url, to_write=True, tenant=None).url == "gs://others/"
    inside = parse_url("s3://bucket/prefix/red/a.parquet")
    assert ROOTS.root_of(inside, to_write=True, tenant="red").url == "s3://bucket/prefix/red/"
    for closed in (url, inside):  # also where a root around it is everybody's
        with pytest.raises(BadInput, match="under none of the roots"):
            ROOTS.root_of(closed, to_write=False, tenant="blue")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("file:///", "whole machine"),
        ("http://host/", "use s3://"),
        ("s3://bucket/../", "'..' part"),
        ({"url": "s3://bucket/", "endpoint_override": "localhost:9000"}, "no address"),
        ({"url": "s3://bucket/", "endpoint_override": "http://u:hunter2@host"}, "no address"),
        ({"url": "file:///data/", "anonymous": True}, "no meaning for files"),
        ({"url": "gs://bucket/", "region": "eu"}, "GCS finds the region"),
        ({"url": "s3://bucket/", "secret_key": "hunter2"}, "Extra inputs"),
    ],
)
def test_a_root_that_cannot_be_one_is_refused(value: object, says: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        StorageRoot.model_validate(value)
    assert says in str(refusal.value)


def test_a_root_is_named_once() -> None:
    with pytest.raises(ValidationError, match="twice"):
        StorageSettings.model_validate({"roots": ["s3://bucket", "s3://bucket/"]})


def test_roots_can_be_said_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORQ_STORAGE__ROOTS", '["s3://bucket/a", {"url": "gs://bucket", "write": false}]')
    assert [(root.url, root.write) for root in Settings().storage.roots] == [
        ("s3://bucket/a/", True),
        ("gs://bucket/", False),
    ]

"""`file://`: what a root's folder opens, and what it does not."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from transfers import transfers

from jobs.errors import BadInput, Unavailable
from jobs.remote.files import input_file, output_file
from jobs.remote.local import publish
from jobs.remote.urls import Url, parse_root, parse_url
from jobs.settings import Limits, Settings


def silent(phase: str, done: int, total: int) -> None: ...


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.parquet").write_bytes(b"inside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.parquet").write_bytes(b"secret")
    return folder


@pytest.fixture
def files(tmp_path: Path, root: Path) -> Settings:
    return Settings.model_validate(
        {"home": tmp_path / "home", "storage": {"roots": [f"file://{root}"]}, "limits": Limits(max_upload_bytes=100)}
    )


def read(settings: Settings, path: Path) -> bytes:
    with input_file(settings, parse_url(f"file://{path}"), silent) as local:
        return local.read_bytes()


def write(settings: Settings, path: Path, content: bytes = b"new") -> None:
    with output_file(settings, parse_url(f"file://{path}"), silent) as local:
        local.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_under_the_root_is_read_and_written(files: Settings, root: Path) -> None:
    assert read(files, root / "a.parquet") == b"inside"
    write(files, root / "inner" / "out.parquet")
    assert (root / "inner" / "out.parquet").read_bytes() == b"new"
    write(files, root / "a.parquet", b"replaced")
    assert (root / "a.parquet").read_bytes() == b"replaced"
    assert names(root / "inner") == ["out.parquet"]
    assert names(files.home / "tmp") == []


def test_a_link_out_of_the_root_opens_nothing(files: Settings, root: Path) -> None:
    outside = root.parent / "outside"
    (root / "file.parquet").symlink_to(outside / "secret.parquet")
    (root / "folder").symlink_to(outside)
    (root / "up").symlink_to("..")
    for path in (root / "file.parquet", root / "folder" / "secret.parquet", root / "up" / "outside" / "secret.parquet"):
        with pytest.raises(BadInput, match="leads out of its root by a symbolic link"):
            read(files, path)
    with pytest.raises(BadInput, match="leads out of its root by a symbolic link"):
        write(files, root / "folder" / "new.parquet")
    assert names(outside) == ["secret.parquet"]


def test_an_output_replaces_a_link_and_not_what_it_leads_to(files: Settings, root: Path) -> None:
    secret = root.parent / "outside" / "secret.parquet"
    (root / "out.parquet").symlink_to(secret)
    write(files, root / "out.parquet")
    assert not (root / "out.parquet").is_symlink()
    assert secret.read_bytes() == b"secret"


def test_a_link_inside_of_the_root_is_followed(files: Settings, root: Path) -> None:
    (root / "latest").symlink_to("inner")
    (root / "b.parquet").symlink_to("a.parquet")
    assert read(files, root / "b.parquet") == b"inside"
    write(files, root / "latest" / "out.parquet")
    assert names(root / "inner") == ["out.parquet"]


def test_a_root_may_be_a_link_itself(tmp_path: Path, root: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    settings = Settings.model_validate({"home": tmp_path / "home", "storage": {"roots": [f"file://{tmp_path}/link"]}})
    assert read(settings, tmp_path / "link" / "a.parquet") == b"inside"


def test_a_link_put_there_after_the_look_opens_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs.remote import local

    url, root_url = parse_url(f"file://{root}/inner/secret.parquet"), Url("file", "", f"{root}/".lstrip("/"))
    (root / "inner" / "secret.parquet").write_bytes(b"")
    real_open = os.open

    def open_late(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "inner":  # the attacker's moment
            (root / "inner").rename(root / "gone")
            (root / "inner").symlink_to(root.parent / "outside")
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(local.os, "open", open_late)
    with pytest.raises(BadInput, match="cannot be opened"), local.open_input(url, root_url):
        pass


def test_what_is_no_regular_file_is_refused_at_once(files: Settings, root: Path) -> None:
    os.mkfifo(root / "pipe.parquet")
    (root / "folder.parquet").mkdir()
    for name in ("pipe.parquet", "folder.parquet"):
        with pytest.raises(BadInput, match="not a regular file"):
            read(files, root / name)
    with pytest.raises(BadInput, match="is a folder"):
        write(files, root / "folder.parquet")
    assert names(root) == ["a.parquet", "folder.parquet", "inner", "pipe.parquet"]


def test_what_is_not_there_or_too_large_is_refused(files: Settings, root: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        read(files, root / "none.parquet")
    with pytest.raises(BadInput, match=r"none/out\.parquet: there is no folder .*/none: make it"):
        write(files, root / "none" / "out.parquet")
    (root / "large.parquet").write_bytes(bytes(101))
    with pytest.raises(BadInput, match=r"has 101 bytes, the limit is 100: split it, or raise limits\.max_upload_bytes"):
        read(files, root / "large.parquet")
    with pytest.raises(BadInput, match="forq reads"):
        read(files, root / "inner.csv")


def test_an_export_that_fails_leaves_the_old_output(files: Settings, root: Path) -> None:
    def fail() -> None:
        with output_file(files, parse_url(f"file://{root}/a.parquet"), silent) as local:
            local.write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (root / "a.parquet").read_bytes() == b"inside"
    assert names(root) == ["a.parquet", "inner"]
    assert names(files.home / "tmp") == []


def test_a_path_is_used_as_it_is(files: Settings, tmp_path: Path) -> None:
    path = tmp_path / "outside-of-all-roots"
    with input_file(files, path, silent) as same:
        assert same == path
    with output_file(files, path, silent) as same:
        assert same == path


def test_an_output_whose_writer_is_killed_leaves_nothing(files: Settings, root: Path) -> None:
    seen: list[int] = []

    def kill(phase: str, done: int, total: int) -> None:
        if done >= 8 << 20:
            seen.append(done)
            for transfer in transfers():
                transfer.kill()

    with (
        pytest.raises(Unavailable, match="the transfer died"),
        output_file(files, parse_url(f"file://{root}/a.parquet"), kill) as local,
    ):
        local.write_bytes(bytes(64 << 20))
    assert seen
    assert names(root) == ["a.parquet", "inner"]
    assert (root / "a.parquet").read_bytes() == b"inside"


def test_where_no_file_is_without_a_name_an_output_is_whole_or_not_at_all(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def without(path: str, flags: int, *args: int, **where: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return open_file(path, flags, *args, **where)

    def broken() -> Iterator[bytes]:
        yield b"half"
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "open", without)
    url, base = parse_url(f"file://{root}/out.parquet"), parse_root(f"file://{root}")
    with pytest.raises(Unavailable, match="cannot be written"):
        publish(url, base, broken())
    assert names(root) == ["a.parquet", "inner"]
    publish(url, base, iter([b"wh", b"ole"]))
    assert (root / "out.parquet").read_bytes() == b"whole"
    assert names(root) == ["a.parquet", "inner", "out.parquet"]

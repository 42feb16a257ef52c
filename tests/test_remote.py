"""Inputs under URLs: an S3 server and a web server on this machine, which also fail."""

import gzip
import io
import json
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from test_inputs import published

from bertdata.cli import main
from bertdata.errors import InputError, RemoteError, UsageError
from bertdata.remote import reader, requests, stores
from bertdata.remote.reader import RemoteFile
from bertdata.write import build

ROWS = [f"the stone {number} under the river" for number in range(400)]
TEXT = "\n\n".join(ROWS).encode()


def as_parquet(rows):
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": rows}), sink, row_group_size=50)
    return sink.getvalue()


PACKED = {
    "a.txt": TEXT,
    "a.txt.gz": gzip.compress(TEXT),
    "a.txt.zst": pa.compress(TEXT, "zstd", asbytes=True),
    "a.jsonl": "".join(json.dumps({"text": row}) + "\n" for row in ROWS).encode(),
    "a.parquet": as_parquet(ROWS),
}


@pytest.mark.parametrize("name", PACKED)
def test_an_object_gives_the_bytes_of_the_file(bucket, tmp_path, vocab, name):
    (tmp_path / name).write_bytes(PACKED[name])
    options = {"tokenizer": vocab, "shard_size": 3000}
    build(tmp_path / name, tmp_path / "local", **options)
    with patch.multiple(reader, _FIRST=100, _MOST=1000):  # many requests
        build(bucket.put(f"dir/{name}", PACKED[name]), tmp_path / "remote", **options)
    assert published(tmp_path / "remote") == published(tmp_path / "local")


def test_a_directory_and_a_pattern_stand_for_objects(bucket, tmp_path, vocab):
    for name in ("in/a.txt", "in/b/c.txt", "in/.hidden.txt", "in/notes.pdf", "in/d.txt.gz", "inside.txt"):
        bucket.put(name, gzip.compress(TEXT) if name.endswith("gz") else TEXT)
    said = []
    for url, number in (
        (f"{bucket.url}/in", 3),
        (f"{bucket.url}/in/", 3),
        (f"{bucket.url}/in/*.txt", 1),
        (f"{bucket.url}/in/**/*.txt", 2),
        (bucket.url, 4),
    ):
        said.clear()
        report = build(url, tmp_path / "out", tokenizer=vocab, say=said.append, overwrite=True)
        assert report.dataset.num_documents == number * len(ROWS)
        assert said[0].startswith(f"reading {number} file{'s' * (number > 1)}: {number} text; ")
    assert "in/notes.pdf" in said[1]


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90)), max_size=12), st.integers(1, 40), st.integers(1, 70)
)
def test_a_reader_gives_what_a_file_gives(reads, first, most):
    content = bytes(range(256))
    asked = []

    def fetch(start, stop):
        assert 0 <= start < stop <= len(content)
        asked.append(stop - start)
        return content[start:stop]

    file = RemoteFile("s3://u", len(content), "v", fetch)
    with patch.multiple(reader, _FIRST=first, _MOST=most), file.open() as opened:
        plain = io.BytesIO(content)
        for place, length in reads:
            if place < 256:
                assert opened.seek(place) == plain.seek(place)
            assert opened.read(length) == plain.read(length)
            assert opened.tell() == plain.tell()
    assert all(size <= max(first, most) for size in asked)


# ---------------------------------------------------------------------------------------------------- servers that fail


class Faulty(BaseHTTPRequestHandler):
    """Serves one file in ranges, as a web server and as an object store do, and fails as `faults` says."""

    protocol_version = "HTTP/1.1"
    content = TEXT
    faults: dict[int, str] = {}  # number of a request for a part of the file → fault; -1: all of them
    count = 0
    etag = '"1"'

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self._answer(200, len(self.content))

    def do_GET(self):
        given = self.headers.get("Range")
        start, stop = 0, len(self.content)
        if given and not self.content:
            self._answer(416, 0, "bytes */0")
            return
        if given:
            start, stop = (int(part) for part in given.removeprefix("bytes=").split("-"))
            stop = min(stop + 1, len(self.content))
        fault = ""
        if stop - start > 1:  # not the question for the size
            fault = self.faults.get(Faulty.count, self.faults.get(-1, ""))
            Faulty.count += 1
        if fault.isdigit():
            self._answer(int(fault), 0)
            return
        if fault == "reset":
            self.connection.close()
            return
        if fault == "changed":
            Faulty.etag = '"2"'
        if (given_etag := self.headers.get("If-Match")) and given_etag != self.etag:
            self._answer(412, 0)
            return
        self._answer(206 if given else 200, stop - start, f"bytes {start}-{stop - 1}/{len(self.content)}")
        piece = self.content[start:stop]
        self.wfile.write(piece[: len(piece) // 2] if fault == "cut" else piece)
        if fault == "cut":
            self.connection.close()

    def _answer(self, status, size, content_range=None):
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.send_header("ETag", self.etag)
        self.send_header("Last-Modified", "Sun, 22 Nov 2026 12:00:00 GMT")
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()


@pytest.fixture
def faulty(monkeypatch, tmp_path):
    """Scheme → URL of a text, and a function that sets what goes wrong."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    for name, value in {"AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": "a-secret", "AWS_REGION": "us-east-1",
                        "AWS_ENDPOINT_URL": f"http://{address}", "HOME": str(tmp_path)}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(requests, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(requests, "TIMEOUT_S", 5.0)
    monkeypatch.setattr(reader, "_FIRST", 500)
    monkeypatch.setattr(reader, "_MOST", 2000)
    stores._store_at.cache_clear()

    def fail(**faults):
        Faulty.faults, Faulty.count, Faulty.etag = faults.get("at", {}), 0, '"1"'

    fail()
    yield {"http": f"http://{address}/dir/a.txt?token=secret", "s3": "s3://bucket/dir/a.txt"}, fail
    server.shutdown()
    server.server_close()
    stores._store_at.cache_clear()


@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("fault", ["500", "503", "429", "cut", "reset"])
def test_what_passes_is_tried_again(faulty, tmp_path, vocab, scheme, fault):
    urls, fail = faulty
    (tmp_path / "a.txt").write_bytes(TEXT)
    build(tmp_path / "a.txt", tmp_path / "local", tokenizer=vocab)
    fail(at={0: fault, 2: fault, 3: fault})
    build(urls[scheme], tmp_path / "remote", tokenizer=vocab)
    assert Faulty.count > 4
    assert published(tmp_path / "remote") == published(tmp_path / "local")


@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("500", "the server answers with 500 (tried 6 times); try again later"),
        ("403", "the server refuses access (403); "),
        ("404", "does not exist; check the name"),
        ("cut", "(tried 6 times); try again later"),
        ("reset", "(tried 6 times); try again later"),
        ("changed", "changed while it was read; run again when nobody changes it"),
    ],
)
def test_what_does_not_pass_is_one_sentence_without_secrets(faulty, tmp_path, vocab, scheme, fault, said):
    urls, fail = faulty
    fail(at={-1: fault} if fault != "changed" else {1: fault})
    result = CliRunner().invoke(main, ["build", urls[scheme], "--out", str(tmp_path / "out"), "--tokenizer", vocab])
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.startswith(f"Error: {urls[scheme].partition('?')[0]}")
    assert result.stderr.count("\n") == 1
    assert "secret" not in result.output
    assert not (tmp_path / "out").exists()


def test_names_of_web_files_are_quoted_and_may_be_empty(faulty, tmp_path, vocab):
    urls, _ = faulty
    address = urls["http"].rpartition("/dir/")[0]
    assert build(f"{address}/my Ärger.txt", tmp_path / "out", tokenizer=vocab).dataset.num_documents == len(ROWS)
    with patch.object(Faulty, "content", b""), pytest.raises(InputError, match="empty file"):
        build(f"{address}/a.txt", tmp_path / "empty", tokenizer=vocab)


def test_ctrl_c_does_not_wait_for_an_answer(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1",
                            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        command = [sys.executable, "-m", "bertdata", "pull", "s3://bucket/x", str(tmp_path / "x")]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = silent.accept()  # the request has begun
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=50)[1]  # without an answer a request lasts a minute
            connection.close()
    assert (process.returncode, said.startswith("interrupted; ")) == (130, True)


def test_nothing_secret_is_stored(faulty, tmp_path, vocab):
    urls, _ = faulty

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(urls["http"], tmp_path / "out", tokenizer=vocab, shard_size=2000, progress=stop)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"secret" in path.read_bytes()]
    assert build(urls["http"].replace("secret", "other"), tmp_path / "out", tokenizer=vocab, shard_size=2000)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert any(b"/dir/a.txt" in path.read_bytes() for path in files)  # in the list of inputs
    assert not [path for path in files if b"?token" in path.read_bytes()]


def test_a_server_that_sends_no_parts_is_refused(tmp_path, vocab):
    class Plain(Faulty):
        def do_GET(self):
            self._answer(200, 3)
            self.wfile.write(b"abc")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Plain)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(RemoteError, match="a.txt: the server does not send parts of files; download it first"):
        build(f"http://127.0.0.1:{server.server_port}/a.txt", tmp_path / "out", tokenizer=vocab)
    server.shutdown()
    server.server_close()


# ------------------------------------------------------------------------------------------- names that are not there


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("{}/none.txt", "{}/none.txt does not exist, and no file is below it or matches it; check the name"),
        ("{}/*.txt", "{}/*.txt does not exist, and no file is below it or matches it; check the name"),
        (
            "s3://no-such-bucket/a.txt",
            "s3://no-such-bucket/a.txt: there is no such bucket; check the name and the region",
        ),
    ],
)
def test_what_is_not_there_is_one_sentence(bucket, tmp_path, vocab, url, said):
    with pytest.raises(RemoteError) as caught:
        build(url.format(bucket.url), tmp_path / "out", tokenizer=vocab)
    assert str(caught.value) == said.format(bucket.url)


def test_no_credentials_are_one_sentence(bucket, tmp_path, vocab, monkeypatch):
    url = bucket.put("a.txt", TEXT)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    stores._store_at.cache_clear()
    with pytest.raises(
        RemoteError, match=f"^{url}: no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACC"
    ):
        build(url, tmp_path / "out", tokenizer=vocab)


def test_the_files_of_the_aws_command_line_are_read(bucket, tmp_path, vocab, monkeypatch):
    url = bucket.put("a.txt", TEXT)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]\naws_access_key_id = k\naws_secret_access_key = s\n")
    (tmp_path / ".aws" / "config").write_text("[default]\nregion = eu-central-1\n")
    stores._store_at.cache_clear()
    assert stores._s3_config()["region"] == "eu-central-1"
    assert build(url, tmp_path / "out", tokenizer=vocab).dataset.num_documents == len(ROWS)


def test_an_object_that_changes_during_a_build_is_refused(bucket, tmp_path, vocab):
    url = bucket.put("a.txt", TEXT)

    def change(done, total):
        bucket.put("a.txt", TEXT + b"\n\nmore")

    with pytest.raises((RemoteError, InputError), match="changed while it was read"):
        build(url, tmp_path / "out", tokenizer=vocab, shard_size=2000, workers=1, progress=change)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://key:secret@bucket/a.txt", "s3://bucket/a.txt was given with a login or a query; leave it out"),
        ("az://container/a.txt?sig=secret", "az://container/a.txt was given with a login or a query; leave it out"),
        ("http://[::1/secret", "a URL has a server or a port that cannot be"),
        ("s3://", "s3:// names no server or bucket"),
        ("hf://datasets/one", "hf://datasets/one names no dataset of the hub"),
        ("https://u:sec\u2100ret@host/a", "a URL has a server or a port that cannot be; give one such as"),
        ("https://host:port/a.txt", "a URL has a server or a port that cannot be; give one such as"),
        ("s3://bucket/a//b.txt", "s3://bucket/a//b.txt has an empty part, a dot for a part, or a space"),
        ("s3://bu cket/b.txt", "s3://bu cket/b.txt has an empty part, a dot for a part, or a space"),
        ("S3://bucket/a.txt", "an input is a URL of the kind S3; give a path, or a URL of s3, gs"),
        ("ftp://user:secret@host/a.txt", "an input is a URL of the kind ftp; give a path, or a URL of s3, gs"),
    ],
)
def test_a_url_that_cannot_be_read_is_one_sentence_without_secrets(tmp_path, url, said):
    with pytest.raises(UsageError) as caught:
        build(url, tmp_path / "out", tokenizer="none")
    assert str(caught.value).startswith(said)
    assert "secret" not in str(caught.value)


def test_a_login_is_not_told_to_the_server_of_a_redirect(tmp_path, vocab):
    seen = []

    class Second(Faulty):
        def do_GET(self):
            seen.append(self.headers.get("Authorization"))
            super().do_GET()

    class First(Faulty):
        def do_GET(self):
            assert self.headers.get("Authorization") == "Basic dTpzZWNyZXQ="
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{second.server_port}/a.txt")
            self.send_header("Content-Length", "0")
            self.end_headers()

    second = ThreadingHTTPServer(("127.0.0.1", 0), Second)
    first = ThreadingHTTPServer(("127.0.0.1", 0), First)
    Faulty.faults = {}
    for server in (first, second):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    build(f"http://u:secret@127.0.0.1:{first.server_port}/a.txt", tmp_path / "out", tokenizer=vocab)
    assert set(seen) == {None}
    for server in (first, second):
        server.shutdown()
        server.server_close()


def test_a_damaged_file_of_the_aws_command_line_is_not_shown(bucket, tmp_path, vocab, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("aws_secret_access_key = a-secret\n")
    stores._store_at.cache_clear()
    with pytest.raises(
        RemoteError, match="credentials cannot be read as a file of the AWS command line; correct it"
    ) as caught:
        build(f"{bucket.url}/a.txt", tmp_path / "out", tokenizer=vocab)
    assert "a-secret" not in str(caught.value)

"""Inputs under URLs: an S3 server and a web server on this machine, which also fail."""

import gzip
import signal
import socket
import subprocess
import sys
import threading
from unittest.mock import Mock
from urllib.parse import quote, unquote

import pytest
from support.commands import refused, refuses
from support.data import build
from support.disk import contents, put, without_origins
from support.limits import limits
from support.servers import Handler, serving, use_server
from support.sources import made

from bertdata.remote import stores, web

ROWS = [f"the stone {number} under the river" for number in range(150)]
TEXT = "\n\n".join(ROWS).encode()


@pytest.mark.parametrize("kind", ["text", "gzip", "jsonl", "parquet"])
def test_an_object_gives_the_bytes_of_the_file(bucket, tmp_path, vocab, kind):
    path, _ = made(tmp_path, 0, kind, ROWS)
    options = {"tokenizer": vocab, "shard_size": 2000, "documents": "line"}
    build(path, tmp_path / "local", **options)
    with limits(first_bytes=100, most_bytes=1000):  # many requests
        build(bucket.put(f"dir/{path.name}", path.read_bytes()), tmp_path / "remote", **options)
    assert without_origins(tmp_path / "remote") == without_origins(tmp_path / "local")


def test_a_directory_and_a_pattern_stand_for_objects(bucket, tmp_path, vocab):
    names = ["in/a.txt", "in/b/c.txt", "in/b/.git/e.txt", "in/.hidden.txt", "in/notes.pdf", "in/d.txt.gz", "inside.txt"]
    for name in names:
        bucket.put(name, gzip.compress(TEXT) if name.endswith("gz") else TEXT)
    numbers = {"in": 3, "in/": 3, "in/*.txt": 1, "in/**/*.txt": 2, "in/b/**": 1, "in/.h*": 1, "": 4}
    for url, number in numbers.items():
        url = f"{bucket.url}/{url}".removesuffix("/" * (not url))
        dataset = build(url, tmp_path / "out", tokenizer=vocab, overwrite=True).dataset
        assert dataset.num_documents == number * len(ROWS)


KEYS = ["/a.txt", "a.txt", "d/a.txt", "d/a.txt/", "d//b.txt", "d/c\n[1]%#?.txt", "d/../e.txt"]


@pytest.mark.parametrize("is_open", ["false", "Yes"])
def test_keys_that_obstore_refuses_are_read_or_named(tmp_path, vocab, monkeypatch, is_open):
    """In a bucket that lists them in two pages, with or without a login."""

    def get(request):
        path, _, query = request.path.partition("?")
        assert ("X-Amz-Signature" in query or "Authorization" in request.headers) == (is_open == "false")
        if "list-type" in query:
            page = KEYS[3:] if "continuation-token=1" in query else KEYS[:3]
            fields = "<Size>5</Size><ETag>1</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            listed = "".join(f"<Contents><Key>{quote(key)}</Key>{fields}</Contents>" for key in page)
            listed += "<NextContinuationToken>1</NextContinuationToken>" * (page == KEYS[:3])
            listed = f"<ListBucketResult><EncodingType>url</EncodingType>{listed}</ListBucketResult>"
            request.answer(200, listed.encode())
        else:
            assert unquote(path).removeprefix("/bucket/") in KEYS
            request.answer(206, b"stone", Content_Range="bytes 0-4/5", ETag='"1"')

    said = []
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", is_open)
    with serving(get) as address:
        use_server(monkeypatch, f"http://{address}")
        dataset = build("s3://bucket/", tmp_path / "out", tokenizer=vocab, validation=0, say=said.append).dataset
        assert stores.file_at("s3://bucket//a.txt").size == 5
    assert dataset.num_documents == 6
    assert any("left out 1 file" in line and "s3://bucket/d/../e.txt" in line for line in said)


class Faulty(Handler):
    """Serves a text in ranges, as a web server and as an object store do, and fails as `faults` says."""

    faults: dict[int, str] = {}  # number of a request for a part of the file → fault; -1: all of them
    count = 0
    etag = '"1"'
    released = threading.Event()  # what "silent" waits for
    gave_up: list[str] = []  # where it was not released
    asked: list[str] = []  # the paths of all requests

    def do_HEAD(self):
        self.send(200, TEXT)

    def do_GET(self):
        self.asked.append(self.path)
        span, start, stop = self.headers.get("Range"), 0, len(TEXT)
        if span:
            start, last = map(int, span.removeprefix("bytes=").split("-"))
            stop = min(last + 1, stop)
        fault = ""
        if stop - start > 1:  # not the question for the size
            fault = self.faults.get(Faulty.count, self.faults.get(-1, ""))
            Faulty.count += 1
        if fault in ("changed", "changed by date"):
            Faulty.etag = '"2"'
        if fault == "silent" and not self.released.wait(20):
            self.gave_up.append(self.path)
        if fault in ("silent", "reset"):
            return  # the connection ends without an answer
        if fault.isdigit():
            self.send(int(fault))
        elif self.headers.get("If-Match", self.etag) != self.etag:
            self.send(412)
        else:
            piece, range_of = TEXT[start:stop], f"bytes {start}-{stop - 1}/{len(TEXT)}"
            sent = piece[: len(piece) // 2] if fault == "cut" else piece
            self.send(206 if span else 200, sent, Content_Length=str(len(piece)), Content_Range=range_of)

    def send(self, status, content=b"", **headers):
        tag = {} if "changed by date" in self.faults.values() else {"ETag": self.etag}
        date = f"Sun, 22 Nov 2026 12:00:0{self.etag[1]} GMT"
        self.answer(status, content, **tag, Last_Modified=date, **headers)


@pytest.fixture
def faulty(monkeypatch, limit, tmp_path):
    """Scheme → URL of a text, and a function that sets what goes wrong: number of a request → fault."""
    monkeypatch.setenv("HOME", str(tmp_path))
    limit(first_wait_s=0.001, first_bytes=500, most_bytes=1000)

    def fail(faults):
        Faulty.faults, Faulty.count, Faulty.etag = faults, 0, '"1"'

    fail({})
    Faulty.released.clear()
    Faulty.gave_up.clear()
    with serving(Faulty) as address:
        use_server(monkeypatch, f"http://{address}")
        yield {"http": f"http://{address}/dir/a.txt?token=secret", "s3": "s3://bucket/dir/a.txt"}, fail
        stores.store_at.cache_clear()


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_what_passes_is_tried_again(faulty, tmp_path, vocab, limit, scheme):
    urls, fail = faulty
    expected = without_origins(build(put(tmp_path / "a.txt", TEXT), tmp_path / "local", tokenizer=vocab).dataset.path)
    for fault in ("500", "503", "429", "cut", "reset", "silent"):
        if fault == "silent":
            limit(timeout_s=0.2)
            stores.store_at.cache_clear()
        fail({0: fault} if fault == "silent" else {0: fault, 2: fault, 3: fault})
        build(urls[scheme], tmp_path / fault, tokenizer=vocab)
        assert Faulty.count > 2
        assert without_origins(tmp_path / fault) == expected
    assert not Faulty.gave_up
    Faulty.released.set()


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_what_does_not_pass_is_one_sentence_without_secrets(faulty, tmp_path, vocab, scheme):
    urls, fail = faulty
    changed = ["changed", *["changed by date"] * (scheme == "http")]  # a server that sends no ETag
    for faults, kind, tries in (
        (["500", "cut", "reset"], "server-failed", 6),
        (["401", "403"], "access-denied", 1),
        (["404"], "not-found", 1),
        (["400", "402", "499"], "server-unsuitable", 1),
        (changed, "changed", 2),
    ):
        for fault in faults:
            fail({1 if kind == "changed" else -1: fault})
            sentence = refused(
                "bertdata", "build", urls[scheme], "--out", tmp_path / "out", "--tokenizer", vocab, kind=kind
            )
            assert sentence.startswith(urls[scheme].partition("?")[0])
            assert "secret" not in sentence
            assert Faulty.count == tries
            assert not (tmp_path / "out").exists()


def test_names_of_web_files_are_quoted(faulty, tmp_path, vocab):
    urls, _ = faulty
    address = urls["http"].rpartition("/dir/")[0]
    for number, name in enumerate(["my Ärger.txt?of=my Ärger", "my%20%C3%84rger.txt?of=my%20%C3%84rger"]):
        Faulty.asked.clear()
        dataset = build(f"{address}/{name}", tmp_path / f"out{number}", tokenizer=vocab).dataset
        assert dataset.num_documents == len(ROWS)
        assert {*Faulty.asked} == {"/my%20%C3%84rger.txt?of=my%20%C3%84rger"}


def test_an_answer_is_not_larger_than_what_was_asked_for(tmp_path, vocab):
    """And one with a wrong size, or about an empty file, is an error."""
    answers, unsuitable = {"of": (206, "0-0/9")}, "server-unsuitable"

    def get(request):
        status, span = answers["of"]
        request.answer(status, b"a" * 1_000_000, Content_Range=f"bytes {span}")

    with serving(get) as address:
        assert len(web.part_of(f"http://{address}/", "a", 0, 10)) == 11
        for status, span, kind in (
            (206, "0-0/\xb2", unsuitable),
            (206, "0-0/" + "9" * 5000, unsuitable),
            (200, "0-0/9", unsuitable),
            (416, "*/0", "empty"),
        ):
            answers["of"] = status, span
            with refuses(kind, "inputs" if kind == "empty" else None):
                build(f"http://{address}/a.txt", tmp_path / "out", tokenizer=vocab)


def test_ctrl_c_does_not_wait_for_an_answer(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_server(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        command = [sys.executable, "-m", "bertdata", "pull", "s3://bucket/x", str(tmp_path / "x")]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = silent.accept()  # the request has begun
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=50)[1]  # without an answer a request lasts a minute
            connection.close()
    assert (process.returncode, said.count("\n")) == (130, 1)


def test_nothing_secret_is_stored(faulty, tmp_path, vocab):
    urls, _ = faulty
    options = {"tokenizer": vocab, "shard_size": 2000}
    with pytest.raises(KeyboardInterrupt):
        build(urls["http"], tmp_path / "out", progress=Mock(side_effect=KeyboardInterrupt), **options)
    stored = b"".join(contents(tmp_path / "out").values())
    assert stored
    assert b"secret" not in stored
    build(urls["http"].replace("secret", "other"), tmp_path / "out", **options)
    stored = b"".join(contents(tmp_path / "out").values())
    assert b"/dir/a.txt" in stored  # in the list of inputs
    assert b"?token" not in stored


def test_what_is_not_there_is_one_sentence(bucket, tmp_path, vocab):
    for url in (f"{bucket.url}/none.txt", f"{bucket.url}/*.txt", "s3://no-such-bucket/a.txt"):
        with refuses("not-found" if "no-such" not in url else "bad-url", given=url):
            build(url, tmp_path / "out", tokenizer=vocab)


def test_the_files_of_the_aws_command_line_give_what_variables_do_not(bucket, tmp_path, vocab, monkeypatch):
    """Without any login, or with a damaged file of them, there is one sentence."""
    url = bucket.put("a.txt", TEXT)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    for name, value in (("HOME", home), ("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9"), ("AWS_PROFILE", "work")):
        monkeypatch.setenv(name, str(value))

    def read(out):
        stores.store_at.cache_clear()
        return build(url, tmp_path / out, tokenizer=vocab).dataset.num_documents

    with refuses("access-denied", says="AWS_ACCESS_KEY_ID"):
        read("none")
    put(home / ".aws" / "credentials", "aws_secret_access_key = a-secret\n")
    with refuses("not-of-format") as caught:
        read("none")
    assert "a-secret" not in str(caught.value)
    keys = "[work]\naws_access_key_id = k\naws_secret_access_key = s\naws_session_token = t%1\n"
    paths = put(tmp_path / "c", "[profile work]\nregion = eu-central-1\n"), put(tmp_path / "k", keys)
    for name, path in zip(("CONFIG_FILE", "SHARED_CREDENTIALS_FILE"), paths, strict=True):
        monkeypatch.setenv(f"AWS_{name}", str(path))
    assert read("named") == len(ROWS)
    assert stores.s3_config().items() >= {"region": "eu-central-1", "session_token": "t%1"}.items()
    monkeypatch.setenv("AWS_DEFAULT_REGION", "x")
    assert "region" not in stores.s3_config()


def test_a_redirect_is_followed_without_the_login(tmp_path, vocab):
    seen = []

    class Second(Faulty):
        faults = {}

        def do_GET(self):
            seen.append(self.headers.get("Authorization"))
            super().do_GET()

    def first(request):
        assert request.headers.get("Authorization") == "Basic dTpzZWNyZXQ="
        request.answer(302, Location=f"http://{target}/a.txt")

    with serving(Second) as target, serving(first) as address:
        build(f"http://u:secret@{address}/a.txt", tmp_path / "out", tokenizer=vocab)
    assert set(seen) == {None}

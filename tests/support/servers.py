"""A web server of this machine, and a store of objects that is a directory."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch

from bertdata.files import make_directory, write_file
from bertdata.remote import stores
from bertdata.remote.access import RemoteFile, missing_error


class Handler(BaseHTTPRequestHandler):
    """Sends answers of a web server, and prints nothing about them."""

    def log_message(self, *arguments):
        pass

    def answer(self, status, content=b"", **headers):
        """The content is not sent to who asks for the headers alone. headers: with _ in place of -."""
        self.send_response(status)
        for name, value in {"Content_Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving(handler):
    """A context with a web server; yields its host and port. handler: a Handler, or a function of each request."""
    if not isinstance(handler, type):
        handler = type("Answering", (Handler,), {"do_GET": handler})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def use_server(monkeypatch, address):
    """Makes an address the store of s3:// URLs."""
    values = {"ACCESS_KEY_ID": "a-key", "SECRET_ACCESS_KEY": "a-secret", "REGION": "us-east-1", "ENDPOINT_URL": address}
    for name, value in values.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    stores.store_at.cache_clear()


@contextmanager
def directory_as_store(base):
    """A context in which URLs of s3:// are files below a directory; yields the function from a URL to its path."""

    def path_of(url):
        return base / url.removeprefix("s3://")

    def file_at(url):
        if not path_of(url).exists():
            raise missing_error(url)
        content = path_of(url).read_bytes()
        return RemoteFile(url, len(content), "1", lambda start, stop: content[start:stop])

    def files_below(url, prefix):
        bucket = path_of("/".join(url.split("/")[:3]))
        keys = [str(path.relative_to(bucket)) for path in (bucket / prefix).rglob("*") if path.is_file()]
        return {key: file_at(f"s3://{bucket.name}/{key}") for key in keys}

    def write(url, content):
        try:
            data = content if isinstance(content, bytes) else content.read_bytes()
        except FileNotFoundError:
            raise missing_error(url) from None
        make_directory(path_of(url).parent)
        write_file(path_of(url), data)

    with patch.multiple(stores, file_at=file_at, files_below=files_below, write=write):
        yield path_of

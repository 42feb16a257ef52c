"""A web server of this machine, and a store of objects that is a directory."""

import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
    """A context in which a web server answers as `handler`; yields its host and port."""
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


class Store:
    """The functions of bertdata.remote.stores that transfers use, over a directory."""

    def __init__(self, base):
        self.base = base / "store"

    def path(self, url):
        return self.base / url.removeprefix("s3://")

    def file_at(self, url):
        path = self.path(url)
        if not path.exists():
            raise missing_error(url)
        content = path.read_bytes()
        return RemoteFile(url, len(content), "1", lambda start, stop: content[start:stop])

    def files_below(self, url, prefix):
        bucket = self.path(f"s3://{url.removeprefix('s3://').partition('/')[0]}")
        files = [path for path in (bucket / prefix).rglob("*") if path.is_file()]
        keys = [str(path.relative_to(bucket)) for path in files]
        return {key: self.file_at(f"s3://{bucket.name}/{key}") for key in keys}

    def write(self, url, content):
        incoming = self.base / f"incoming-{os.getpid()}"  # no bucket has this name
        try:
            data = content if isinstance(content, bytes) else content.read_bytes()
        except FileNotFoundError:
            raise missing_error(url) from None
        self.path(url).parent.mkdir(parents=True, exist_ok=True)
        incoming.write_bytes(data)
        os.replace(incoming, self.path(url))

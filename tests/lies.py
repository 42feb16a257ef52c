"""A proxy in front of an S3 server that does not do what it is asked, or does not say that it has done it."""

import http.client
import random
import threading
import time
from collections import Counter
from contextlib import contextmanager
from urllib.parse import urlsplit

from helpers import Handler, serving

LIES = ("lost", "unanswered", "twice", "late", "slow", "cut")
WAIT_S = 0.05  # of what is late or slow


class Liar(Handler):
    """Forwards requests. Of a share of them the lie is one of LIES:

    lost: the server never gets it. unanswered: it is done, without an answer. twice: it is done twice, and the second
    answer is given. late: it is done some time after the connection ended without an answer. slow: after some time.
    cut: the answer is only half there.
    """

    lies = None  # set by `lying`

    def relay(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        lie = self.lies.of(self.command, self.path)
        if lie == "lost":
            return
        if lie == "late":
            threading.Timer(WAIT_S, self.forward, (body,)).start()
            return
        if lie == "slow":
            time.sleep(WAIT_S)
        for _ in range(1 + (lie == "twice")):
            status, headers, content = self.forward(body)
        if lie == "unanswered" or (lie == "cut" and not content):
            return
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if lie == "cut" else content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = relay

    def forward(self, body):
        headers = dict(self.headers)
        if self.lies.ignores_conditions_of(self.path):
            headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
        server = http.client.HTTPConnection(urlsplit(self.lies.server).netloc, timeout=60)
        server.request(self.command, self.path, body, headers)
        with server.getresponse() as answer:
            content = answer.read()
        left_out = {"transfer-encoding", "connection", "content-length"}
        named = [(name, value) for name, value in answer.getheaders() if name.lower() not in left_out]
        size = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        return answer.status, [*named, ("Content-Length", size or "0")], content


class Lies:
    """What a proxy does. share: how much of the requests it lies about. Its draws are counted by lie."""

    def __init__(self, server, seed):
        self.server, self.share, self.unconditional = server, 0.0, ""
        self.counts, self._draw, self._lock = Counter(), random.Random(seed), threading.Lock()

    def of(self, method, path):
        with self._lock:
            lie = self._draw.choice(LIES) if self._draw.random() < self.share else "none"
            self.counts[lie] += 1
        return lie

    def ignores_conditions_of(self, path):
        return bool(self.unconditional) and urlsplit(path).path.endswith(self.unconditional)


@contextmanager
def lying(server, seed):
    """Yields the Lies of a proxy in front of the server of an address, and the address of the proxy."""
    lies = Lies(server, seed)
    with serving(type("Liar", (Liar,), {"lies": lies})) as address:
        yield lies, f"http://{address}"

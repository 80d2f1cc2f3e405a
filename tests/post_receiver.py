"""An HTTP server that keeps what is posted to it, and answers as it is told."""

from __future__ import annotations

import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests import support

Post = tuple[str, dict[str, str], bytes]  # Path, headers, body.


class PostReceiver:
    def __init__(self) -> None:
        self.posts: queue.Queue[Post] = queue.Queue()
        self.answer = (200, b"{}")
        self.has_posts = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.posts.put((self.path, dict(self.headers), body))
                receiver.has_posts.set()
                status, said = receiver.answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def do_GET(self) -> None:
                """Answers when something has been posted."""
                receiver.has_posts.wait(support.DEADLINE_S)
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def next_post(self) -> Post:
        return self.posts.get(timeout=support.DEADLINE_S)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

"""A judge model that needs no model: an OpenAI-compatible endpoint that finds answers bad and good in turn, or as
told."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

OPINIONS = (
    "The user corrects it.\nHINT: Answer in one short plain sentence.\nVERDICT: bad",
    "The user is content.\nHINT: none\nVERDICT: good",
)


class JudgeEndpoint:
    """Answers on a free port of loopback while it is open."""

    def __init__(self, opinion: Callable[[str], str] | None = None) -> None:
        """Args:
        opinion: from the prompt to what the judge says.
        """
        opinions = itertools.cycle(OPINIONS)
        turn = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with turn:
                    text = opinion(asked["messages"][-1]["content"]) if opinion else next(opinions)
                body = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A server that is killed while it asks leaves a broken connection, which is nothing to report."""

        self._http = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

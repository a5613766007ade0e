"""As much of the hub's API as an upload needs, on a loopback port; what it is sent is kept."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """commits: path -> bytes of each; refuse: status that every request is answered with."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.commits: list[dict[str, bytes]] = []
        self.tokens: set[str | None] = set()
        self.refuse: int | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Silent."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hub.tokens.add(self.headers.get("Authorization"))
                status, answer = (hub.refuse, {"error": "no"}) if hub.refuse else (200, hub.answer(self.path, body))
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """What the hub says to a request that it grants."""
        if path == "/api/repos/create":
            made = json.loads(body)
            self.created.append(made)
            return {"url": f"{self.url}/{made['organization']}/{made['name']}"}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]}
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.commits.append({one["path"]: base64.b64decode(one["content"]) for one in files})
            return {"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.url}/me/mine/commit/{'1' * 40}"}
        assert path == "/api/validate-yaml", path
        return {"errors": [], "warnings": []}

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

"""The metadata services of three clouds on loopback, with the headers, tokens and status codes of the real ones."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Clouds:
    """What the services say; ``asked``: the paths of all requests, with their methods."""

    address: str = ""
    spot: dict[str, str] | None = None
    rebalance: dict[str, str] | None = None
    preempted: bool = False
    maintenance: str = "NONE"
    events: list[dict[str, Any]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    given: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def preempt(self) -> None:
        """Preempt Google's machine: whoever waits for the change is answered."""
        with self.changed:
            self.preempted = True
            self.changed.notify_all()


def _handler(clouds: Clouds) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, text: str = "", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            clouds.asked.append(f"PUT {self.path}")
            seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if self.path != "/latest/api/token" or not seconds.isdigit() or not 1 <= int(seconds) <= 21600:
                return self.answer(400)
            if "X-Forwarded-For" in self.headers:
                return self.answer(403)
            clouds.given += 1
            clouds.tokens.add(token := f"token-{clouds.given}")
            return self.answer(200, token, X_aws_ec2_metadata_token_ttl_seconds=seconds)

        def do_GET(self) -> None:
            clouds.asked.append(f"GET {self.path}")
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            if parts.path.startswith("/latest/meta-data/"):
                return self.aws(parts.path.removeprefix("/latest/meta-data/"))
            if parts.path.startswith("/computeMetadata/v1/instance/"):
                return self.gcp(parts.path.removeprefix("/computeMetadata/v1/instance/"), query)
            if parts.path.startswith("/metadata/"):
                return self.azure(parts.path.removeprefix("/metadata/"), query)
            return self.answer(404)

        def aws(self, path: str) -> None:
            if self.headers.get("X-aws-ec2-metadata-token") not in clouds.tokens:
                return self.answer(401)
            values = {"spot/instance-action": clouds.spot, "events/recommendations/rebalance": clouds.rebalance}
            value = values.get(path)
            return self.answer(404) if value is None else self.answer(200, json.dumps(value))

        def gcp(self, path: str, query: dict[str, str]) -> None:
            if self.headers.get("Metadata-Flavor") != "Google":
                return self.answer(403)
            if path == "preempted" and query.get("wait_for_change") == "true":
                with clouds.changed:
                    clouds.changed.wait(float(query.get("timeout_sec", "60")))
            values = {"preempted": "TRUE" if clouds.preempted else "FALSE", "maintenance-event": clouds.maintenance}
            return self.answer(200, values[path], Metadata_Flavor="Google") if path in values else self.answer(404)

        def azure(self, path: str, query: dict[str, str]) -> None:
            if self.headers.get("Metadata") != "true" or "api-version" not in query:
                return self.answer(400, '{"error":"Bad request. Required metadata header not specified"}')
            if path == "instance/compute/name" and query.get("format") == "text":
                return self.answer(200, "machine-1")
            if path == "scheduledevents":
                return self.answer(200, json.dumps({"DocumentIncarnation": 1, "Events": clouds.events}))
            return self.answer(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def fake_clouds() -> Iterator[Clouds]:
    """Serve all three until the block is left."""
    clouds = Clouds()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(clouds)) as server:
        clouds.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="clouds")
        thread.start()
        try:
            yield clouds
        finally:
            clouds.preempt()  # nobody waits any more
            server.shutdown()
            thread.join()


if __name__ == "__main__":  # python -m tests.machine.clouds SECONDS LEFT: AWS announces the end after so many seconds
    with fake_clouds() as served:
        print(served.address, flush=True)
        time.sleep(float(sys.argv[1]))
        end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + float(sys.argv[2])))
        served.spot = {"action": "terminate", "time": end}
        print(f"announced {end}", flush=True)
        time.sleep(float(sys.argv[2]))

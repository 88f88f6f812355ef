"""A small server in the place of W&B's, as far as its client needs one to begin, feed and resume runs."""

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from http_stand_in import QuietHandler, serving

KEY = "a" * 40
"""A key of an account that the client accepts."""


class WandbRuns:
    """Rows of history by the id of each run."""

    def __init__(self) -> None:
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.address = ""
        self.num_refusals = 0
        """Runs to refuse before one is taken."""

    def curve(self, run_id: str, key: str) -> list[tuple[int, float]]:
        return [(row["_step"], row[key]) for row in self.history[run_id] if key in row]

    def answer(self, operation: str, variables: dict[str, Any]) -> Any:
        """Result of a GraphQL operation."""
        name, entity = variables.get("name"), {"id": "entity", "name": "team"}
        rows = self.history.get(str(name))
        run = {"id": "run", "name": name, "displayName": name, "config": "{}", "historyLineCount": len(rows or ())}
        if operation == "UpsertBucket":
            self.history.setdefault(str(name), [])
            project = {"id": "project", "name": variables["project"], "entity": entity}
            return {"upsertBucket": {"bucket": {**run, "project": project}, "inserted": rows is None}}
        if operation == "RunResumeStatus":
            summary = {key: value for row in rows or () for key, value in row.items()}
            more = {"eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]", "wandbConfig": '{"t": 1}', "tags": []}
            tail = json.dumps([json.dumps(row) for row in (rows or ())[-1:]])
            found = {**run, **more, "historyTail": tail, "summaryMetrics": json.dumps(summary)}
            return {"model": {"id": "project", "entity": entity, "bucket": None if rows is None else found}}
        if operation == "CreateRunFiles":
            files = [{"name": one, "uploadUrl": f"{self.address}/{one}"} for one in variables["files"]]
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        return {}

    def stream(self, run_id: str, files: dict[str, Any]) -> None:
        """Take rows of history that begin at an offset."""
        chunk = files.get("wandb-history.jsonl")
        if chunk:
            self.history[run_id][chunk["offset"] :] = [json.loads(line) for line in chunk["content"]]


@contextmanager
def wandb_server(port: int = 0) -> Iterator[WandbRuns]:
    """Serve runs for the block, on a free port unless it is given."""
    runs = WandbRuns()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self._body()
            if self.path.endswith("/graphql"):
                request = json.loads(body)
                found = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
                operation = found[1] if found else ""
                if operation == "UpsertBucket" and runs.num_refusals > 0:
                    runs.num_refusals -= 1
                    self._send({"errors": [{"message": "permission denied"}]}, 403)
                else:
                    self._send({"data": runs.answer(operation, request.get("variables") or {})})
            elif self.path.endswith("/file_stream"):
                runs.stream(self.path.split("/")[-2], json.loads(body).get("files") or {})
                self._send({"exitcode": None, "limits": {}})
            else:
                self._send({})

        def do_PUT(self) -> None:
            self._body()
            self._send({})

        def _body(self) -> bytes:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

        def _send(self, answer: Any, status: int = 200) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with serving(Handler, port) as found:
        runs.address = f"http://127.0.0.1:{found}"
        yield runs

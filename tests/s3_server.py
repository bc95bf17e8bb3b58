"""An S3-compatible server (moto) on loopback, in a process of its own, which can be made to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "anyone",
    "AWS_SECRET_ACCESS_KEY": "anything",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


class Server:
    """A running server with an empty bucket."""

    def __init__(self, port: int, faults: Path) -> None:
        self.environment = {
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "NO_PROXY": "127.0.0.1",
        }
        """For processes that use it."""
        self._faults = faults

    def fail(
        self,
        do: str,
        *,
        method: str = "",
        times: int = 1 << 30,
        status: int = 500,
        seconds: float = 0.0,
    ) -> None:
        """Fail requests from now on.

        Args:
            do: "status" answers `status`; "cut" sends half of the body, and says so in its length; "wait" answers after `seconds`.
            method: of the requests; all without one.
            times: how many requests.
        """
        rule = {
            "do": do,
            "method": method,
            "times": times,
            "status": status,
            "seconds": seconds,
            "id": time.monotonic_ns(),
        }
        part = self._faults.with_suffix(".part")
        part.write_text(json.dumps(rule))
        part.replace(self._faults)

    def heal(self) -> None:
        """Answer all requests again."""
        self._faults.unlink(missing_ok=True)


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """Run a server; `folder` holds its files."""
    faults, log = folder / "faults.json", folder / "server.log"
    environment = {**os.environ, **CREDENTIALS}
    with log.open("wb") as errors:
        command = [sys.executable, __file__, str(faults)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
        yield Server(int(line), faults)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _failing(application: Any, faults: Path) -> Any:
    """A WSGI application that fails as the file says."""
    failed: Counter[int] = Counter()

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        try:
            rule = json.loads(faults.read_text())
        except FileNotFoundError:
            return application(environ, start_response)  # type: ignore[no-any-return]
        if (
            rule["method"] not in ("", environ["REQUEST_METHOD"])
            or failed[rule["id"]] >= rule["times"]
        ):
            return application(environ, start_response)  # type: ignore[no-any-return]
        failed[rule["id"]] += 1
        if rule["do"] == "wait":
            time.sleep(rule["seconds"])
            return application(environ, start_response)  # type: ignore[no-any-return]
        if rule["do"] == "status":
            names = {
                403: ("Forbidden", "AccessDenied"),
                500: ("Internal Server Error", "InternalError"),
            }
            reason, code = names[rule["status"]]
            body = f"<Error><Code>{code}</Code><Message>{reason}</Message></Error>".encode()
            start_response(
                f"{rule['status']} {reason}",
                [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))],
            )
            return [body]
        shortened: list[Any] = []

        def keep(status: str, headers: list[tuple[str, str]], *_: object) -> None:
            others = [
                pair
                for pair in headers
                if not pair[0].lower().startswith(("content-length", "x-amz-checksum"))
            ]
            shortened[:] = [status, others]

        whole = b"".join(application(environ, keep))
        half = whole[: len(whole) // 2]
        start_response(shortened[0], [*shortened[1], ("Content-Length", str(len(half)))])
        return [half]

    return answer


def main() -> None:
    """Serve until the process is ended; prints the port."""
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, _failing(application, Path(sys.argv[1])), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.port}").create_bucket(Bucket=BUCKET)
    print(server.port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

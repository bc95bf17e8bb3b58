"""An SSH server (asyncssh) on loopback, which runs what it is asked to in a folder, as another machine would."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Run a server in a process of its own; gives the arguments of ssh that reach it, as `--tx ssh=...` takes them.

    Args:
        folder: for its keys.
        environment: variables of what it runs.
    """
    command = [sys.executable, __file__, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment})
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        known = "-o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no -o LogLevel=ERROR -o BatchMode=yes"
        yield f"-F none -p {port} -i {folder / 'client'} {known} anyone@127.0.0.1"
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def _serve(folder: Path) -> None:
    import asyncssh

    for name in ("client", "host"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(folder / name))
        (folder / name).chmod(0o600)
        key.write_public_key(str(folder / f"{name}.pub"))

    async def run(process: asyncssh.SSHServerProcess[bytes]) -> None:
        child = await asyncio.create_subprocess_shell(
            process.command or "",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
        process.exit(await child.wait())

    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[str(folder / "host")],
        authorized_client_keys=str(folder / "client.pub"),
        process_factory=run,
        encoding=None,
    )
    print(server.get_port(), flush=True)
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))

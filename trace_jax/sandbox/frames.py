"""Messages between the pool and its trusted helpers: JSON objects in frames of one size, with file descriptors.

Untrusted code holds no end of these sockets. What it says reaches the pool as bytes of stdout and stderr and as an
exit status, and in no other way.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

SIZE = 1024  # bytes of a frame


def send(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Sends a message and copies of the descriptors. Raises OSError where the other end is gone."""
    data = json.dumps(message).encode().ljust(SIZE)
    if len(data) != SIZE:
        raise ValueError(f"a message of {len(data)} bytes does not fit a frame of {SIZE}")
    sent = socket.send_fds(sock, [data], fds) if fds else 0
    sock.sendall(data[sent:])


def receive(sock: socket.socket, max_fds: int = 0) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its descriptors; None where the other end is gone."""
    data, fds = b"", []
    try:
        while len(data) < SIZE:
            more, new, _, _ = socket.recv_fds(sock, SIZE - len(data), max_fds)
            fds += new
            if not more:
                break
            data += more
    except ConnectionError:
        data = b""
    for fd in fds:
        os.set_inheritable(fd, False)
    if len(data) < SIZE:
        for fd in fds:
            os.close(fd)
        return None, []
    return json.loads(data), fds

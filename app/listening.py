"""The server's own socket; quick to import, so that a taken port is told of before anything is loaded."""

from __future__ import annotations

import errno
import socket
from typing import Final

from engine.errors import ConfigError, RelevoError

# Data that nobody acknowledges for so long ends a connection: a vanished or stalled reader cannot hold the server.
USER_TIMEOUT_SECONDS: Final = 30
# Where nothing is sent, as while a whole answer is computed, the system asks after its client, first after so long and
# then every so often. Three questions without an answer are as long as the above; one lost packet ends nothing.
KEEPALIVE_IDLE_SECONDS: Final = 15
KEEPALIVE_INTERVAL_SECONDS: Final = 5
KEEPALIVE_PROBES: Final = 3


def open_listening_socket(host: str, port: int) -> socket.socket:
    """A bound TCP socket, not listening yet; connections inherit its options.

    Raises:
        ConfigError: the host is unknown.
        RelevoError: the port is taken, or may not be used.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"The host {host!r} cannot be resolved: {error.strerror}.") from None
    family, kind, protocol, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Linux has all but TCP_KEEPALIVE, which is what macOS calls TCP_KEEPIDLE; macOS has no TCP_USER_TIMEOUT.
        for name, value in (
            ("TCP_USER_TIMEOUT", USER_TIMEOUT_SECONDS * 1000),
            ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
            ("TCP_KEEPALIVE", KEEPALIVE_IDLE_SECONDS),
            ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
            ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ):
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise cannot_listen(error, host, port) from None
    return listener


def cannot_listen(error: OSError, host: str, port: int) -> RelevoError:
    """What a user is told when the system refuses an address."""
    if error.errno == errno.EADDRINUSE:
        return RelevoError(f"Port {port} on {host} is taken by another program; choose another with --port.")
    return RelevoError(f"Cannot listen on {host} port {port}: {error.strerror}.")

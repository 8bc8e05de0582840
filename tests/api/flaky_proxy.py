"""A TCP proxy before a real server, which loses answers or gives its own: what networks and load balancers do."""

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class FlakyProxy:
    """`faults` are used up one for each connection; then connections are passed on whole."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.faults: list[Callable[[socket.socket, socket.socket], None]] = []
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.num_connections += 1
                fault = self.faults.pop(0) if self.faults else _pass_on
                threading.Thread(target=self._serve, args=(client, fault), daemon=True).start()

    def _serve(self, client: socket.socket, fault: Callable[[socket.socket, socket.socket], None]) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self._server_port)) as server:
            fault(client, server)
            for end in (client, server):  # to close it is not enough while another thread reads from it
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def lose_the_answer(client: socket.socket, server: socket.socket) -> None:
    """Pass the request on, wait for the server's answer, and break the connection."""
    threading.Thread(target=_pump, args=(client, server), daemon=True).start()
    server.recv(1)


def cut_the_answer(client: socket.socket, server: socket.socket) -> None:
    """Break the connection behind the first kilobyte of the answer."""
    threading.Thread(target=_pump, args=(client, server), daemon=True).start()
    sent = 0
    while sent < 1024 and (data := server.recv(1024 - sent)):
        client.sendall(data)
        sent += len(data)


def busy(client: socket.socket, server: socket.socket) -> None:
    """Answer as a load balancer does that has no server."""
    client.recv(65536)
    client.sendall(
        b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )


def pass_one_and_lose(client: socket.socket, server: socket.socket) -> None:
    """Two requests of a kept connection: the first is answered, the second's answer is lost."""
    _pass_one(client, server)
    _pass_one(server, client)
    _pass_one(client, server)
    server.recv(1)


def _pass_one(source: socket.socket, target: socket.socket) -> None:
    """One message, in however many pieces it comes: its head, and as many bytes as that says."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = source.recv(1 << 16)
        if not piece:
            return
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    while length is not None and len(body) < int(length[1]):
        body += source.recv(1 << 16)
    target.sendall(head + b"\r\n\r\n" + body)


def _pass_on(client: socket.socket, server: socket.socket) -> None:
    threading.Thread(target=_pump, args=(client, server), daemon=True).start()
    _pump(server, client)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)

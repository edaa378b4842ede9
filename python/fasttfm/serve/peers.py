"""``Peers``: what the processes of a server know of one another.

A process that is asked for the health or the metrics of the server asks the others, each of which has a Unix socket in
a folder that only this user may read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

_ANSWER_SECONDS = 2.0  # for a process to say its state


class Peers:
    """The processes of a server, as one of them sees the others.

    Args:
        folder: Has the socket of each.
        number: Of this process, from 0 on.
        count: Of all processes.
    """

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self._folder, self.number, self._count = folder, number, count

    def _socket(self, number: int) -> str:
        return str(self._folder / f"{number}.socket")

    async def publish(self, state: Callable[[], dict[str, Any]]) -> asyncio.AbstractServer:
        """Tells the others this process's state whenever they connect."""

        async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(orjson.dumps(state()))
            writer.close()

        return await asyncio.start_unix_server(tell, self._socket(self.number))

    async def states(self) -> list[dict[str, Any]]:
        """The states of the other processes."""
        others = [number for number in range(self._count) if number != self.number]
        return list(await asyncio.gather(*(self._ask(number) for number in others)))

    async def _ask(self, number: int) -> dict[str, Any]:
        try:
            return await asyncio.wait_for(self._read(number), _ANSWER_SECONDS)
        except (OSError, TimeoutError, asyncio.TimeoutError, orjson.JSONDecodeError):
            return {"reason": f"process {number} does not answer"}

    async def _read(self, number: int) -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(self._socket(number))
        try:
            state: dict[str, Any] = orjson.loads(await reader.read())
            return state
        finally:
            writer.close()

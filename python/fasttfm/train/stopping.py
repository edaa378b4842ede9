"""``Stop``: SIGINT and SIGTERM end a run after a step, not within one."""

from __future__ import annotations

import signal
from typing import Any


class Stop:
    """A context that records SIGINT and SIGTERM, so that the run ends after the current step.

    Args:
        launched: Whether a launcher started this process as one of several. When one of them ends, the others get an
            error, and a moment later the launcher's SIGTERM. After an error the first SIGTERM is therefore only
            recorded, so that the error's message is still printed.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, *, launched: bool) -> None:
        self.asked = False
        self.launched = launched
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        def ask(number: int, frame: Any) -> None:
            if self.asked:  # the second signal ends the process at once
                raise KeyboardInterrupt
            self.asked = True

        try:
            self._before = {number: signal.signal(number, ask) for number in self._SIGNALS}
        except ValueError:  # not in the main thread, where no signal arrives
            self._before = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for number, handler in self._before.items():
            if number == signal.SIGTERM and self.launched and kind is not None:
                continue
            signal.signal(number, handler)

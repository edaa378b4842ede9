"""``Generator``: continues prompts for an event loop. One thread runs the steps of a ``GenerationSession``."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.generate import Generation, GenerationSession
from fasttfm.serve import errors
from fasttfm.serve.engine import Arrivals
from fasttfm.serve.limits import Admission, Deadline

_UNFINISHED = "�"  # what an incomplete character is decoded to


class Stream:
    """The tokens of one sequence as they are computed. Only the event loop reads it."""

    def __init__(self, prompt: list[int], options: Mapping[str, Any]) -> None:
        self.prompt, self.options = prompt, options
        self.begun = time.perf_counter()
        self.cancelled = False  # the thread ends the sequence at its next step
        self.generation: Generation | None = None  # of the thread
        self.tokens_seen = 0  # of the thread
        self.steps: Iterator[int] | None = None  # of the thread
        self._tokens: deque[int] = deque()
        self._ended = False
        self._error: errors.RequestError | None = None
        self._arrived = asyncio.Event()

    def feed(self, tokens: list[int], ended: bool, error: errors.RequestError | None) -> None:
        self._tokens.extend(tokens)
        self._ended, self._error = ended, error
        self._arrived.set()

    async def read(self, deadline: float) -> AsyncIterator[list[int]]:
        """Yields the tokens that have arrived since the last time; ``deadline`` is of
        ``time.perf_counter``."""
        try:
            while True:
                tokens = list(self._tokens)
                self._tokens.clear()
                self._arrived.clear()
                if tokens:
                    yield tokens
                elif self._error is not None:
                    raise self._error
                elif self._ended:
                    return
                else:
                    with Deadline(max(0.0, deadline - time.perf_counter())):
                        await self._arrived.wait()
        finally:
            self.cancelled = True


class Generator:
    """Runs the sequences of one session. Its thread starts sequences, ends cancelled ones, and hands tokens over."""

    def __init__(self, session: GenerationSession, admission: Admission, arrivals: Arrivals) -> None:
        self._session, self._admission, self._arrivals = session, admission, arrivals
        self._inbox: deque[Stream] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.running = 0  # sequences, for the choice of a session
        self._thread = threading.Thread(target=self._run, name="fasttfm-generator", daemon=True)
        self._thread.start()

    @property
    def capacity(self) -> int:
        """The maximum number of tokens of a sequence, prompt included."""
        return self._session.capacity

    def submit(self, prompt: list[int], options: Mapping[str, Any]) -> Stream:
        self._admission.enter_queue(1)
        stream = Stream(prompt, options)
        with self._changed:
            if self._closed:
                self._admission.leave_queue(1)
                raise errors.unavailable("the server is shutting down")
            self._inbox.append(stream)
            self.running += 1
            self._changed.notify()
        return stream

    def close(self) -> None:
        """Ends the thread after all sequences have ended."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        active: list[Stream] = []
        while True:
            with self._changed:
                while not self._inbox and not active and not self._closed:
                    self._changed.wait()
                arrived = list(self._inbox)
                self._inbox.clear()
                if self._closed and not arrived and not active:
                    return
            active += [stream for stream in arrived if self._start(stream)]
            for stream in active:
                if stream.cancelled and stream.generation is not None:
                    stream.generation.cancel()
            failure = self._step(active)
            active = [stream for stream in active if not self._hand_over(stream, failure)]

    def _start(self, stream: Stream) -> bool:
        self._admission.leave_queue(1)
        if stream.cancelled:
            self._end(stream, [], None)
            return False
        try:
            stream.generation = self._session.submit(stream.prompt, **stream.options)
        except ValueError as error:
            self._end(stream, [], errors.RequestError(422, "Validation", str(error)))
            return False
        stream.steps = iter(stream.generation)
        return True

    def _step(self, active: list[Stream]) -> errors.RequestError | None:
        """Runs the session until a sequence has a new token. All others advance with it."""
        for stream in active:
            generation, steps = stream.generation, stream.steps
            if generation is None or steps is None or generation.done:
                continue
            known = len(generation.tokens)
            try:
                for _ in steps:
                    if len(generation.tokens) > known:
                        break
            except Exception as error:
                return errors.failed(error)
            return None
        return None

    def _hand_over(self, stream: Stream, failure: errors.RequestError | None) -> bool:
        """Hands new tokens to the event loop; returns whether the sequence has ended."""
        generation = stream.generation
        assert generation is not None
        done = generation.done or failure is not None
        tokens = generation.tokens[stream.tokens_seen :]
        stream.tokens_seen += len(tokens)
        if done:
            self._end(stream, tokens, failure)
        elif tokens:
            self._arrivals.put(functools.partial(stream.feed, tokens, False, None))
        return done

    def _end(self, stream: Stream, tokens: list[int], error: errors.RequestError | None) -> None:
        with self._changed:
            self.running -= 1
        self._arrivals.put(functools.partial(stream.feed, tokens, True, error))


class Decoding:
    """The text of tokens that arrive one by one, up to a stop string.

    A text is emitted once its characters are complete and no stop string can begin in it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: list[str], ends: set[int]) -> None:
        self._tokenizer, self._stops, self._ends = tokenizer, stops, ends
        self._ids: list[int] = []
        self._prefix = self._read = 0  # tokens before which text is known, and up to which it is emitted
        self._held = ""
        self.tokens = 0
        self.stopped = False  # by a stop string or an end token

    def add(self, tokens: list[int]) -> str:
        """The text that can be emitted after these tokens."""
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            if token in self._ends:
                self.stopped = True
                break
            self._ids.append(token)
            self._held += self._new_text()
            self._find_stop()
        return self._take(0 if self.stopped else self._pending())

    def finish(self) -> str:
        """The text that was held back."""
        if not self.stopped:
            self._held += self._new_text(whole=True)
            self._find_stop()
        return self._take(0)

    def _new_text(self, whole: bool = False) -> str:
        """Decodes from the previous token on, because a token's text may depend on the one before it."""
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        text = self._tokenizer.decode(self._ids[self._prefix :])
        if len(text) <= len(before) or (text.endswith(_UNFINISHED) and not whole):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _find_stop(self) -> None:
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self._held, self.stopped = self._held[: min(places)], True

    def _pending(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=0)
        for size in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0

    def _take(self, kept: int) -> str:
        end = len(self._held) - kept
        text, self._held = self._held[:end], self._held[end:]
        return text

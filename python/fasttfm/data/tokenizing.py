"""``tokenizers``: tokenizes the windows of a stream, in worker processes ahead of their use or in this process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np

from fasttfm.data.shard_files import Row
from fasttfm.data.shards import token_arrays, token_dtype
from fasttfm.data.tokenizer import Tokenizer

Window = TypeVar("Window")
Arrays = dict[str, np.ndarray]
_PARALLELISM = "TOKENIZERS_PARALLELISM"  # of the tokenizers library


class Pending(Generic[Window]):
    """Windows in their order, and their tokens. With workers, further windows are read and tokenized in advance."""

    def __init__(self, windows: Iterator[Window], rows: Callable[[Window], list[Row]], tokenizing: _Tokenizing) -> None:
        self.windows, self.rows, self.tokenizing = windows, rows, tokenizing
        self.futures: deque[Future[tuple[Window, Future[Arrays]]]] = deque()

    def next(self) -> tuple[Window, Arrays]:
        reader, pool = self.tokenizing.reader, self.tokenizing.pool
        if reader is None or pool is None:
            window = next(self.windows)
            return window, arrays_of(self.tokenizing.tokenizer, self.rows(window))
        while len(self.futures) <= self.tokenizing.ahead:
            self.futures.append(reader.submit(self._read, pool))
        window, arrays = self.futures.popleft().result()
        return window, arrays.result()

    def _read(self, pool: ProcessPoolExecutor) -> tuple[Window, Future[Arrays]]:
        window = next(self.windows)
        return window, pool.submit(_tokenize, self.rows(window))


class _Tokenizing:
    """A thread that reads, and processes that tokenize."""

    def __init__(self, tokenizer: Tokenizer, workers: int) -> None:
        self.tokenizer, self.ahead = tokenizer, max(1, workers)
        self.reader: ThreadPoolExecutor | None = None
        self.pool: ProcessPoolExecutor | None = None

    def __call__(self, windows: Iterator[Window], rows: Callable[[Window], list[Row]]) -> Pending[Window]:
        return Pending(windows, rows, self)


@contextlib.contextmanager
def tokenizers(tokenizer: Tokenizer, workers: int) -> Iterator[_Tokenizing]:
    """A context with workers, which are ended after it."""
    tokenizing = _Tokenizing(tokenizer, workers)
    if not workers:
        yield tokenizing
        return
    pool = ProcessPoolExecutor(workers, initializer=_start, initargs=(tokenizer, os.getpid()))
    reader = ThreadPoolExecutor(1, thread_name_prefix="fasttfm-reader")
    try:
        with _single_threaded():
            pool.submit(os.getpid).result()  # processes start now, before the reader's thread
        tokenizing.reader, tokenizing.pool = reader, pool
        yield tokenizing
    finally:
        reader.shutdown(wait=True, cancel_futures=True)
        pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Processes that start in this context tokenize in one thread. Those that are forked after this process has
    tokenized in several threads must do so, and this setting avoids the library's warning."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        os.environ.pop(_PARALLELISM)
        os.environ.update({} if before is None else {_PARALLELISM: before})


def arrays_of(tokenizer: Tokenizer, rows: list[Row]) -> Arrays:
    """The arrays of a shard (``TokenShards``). A row of token ids is one sentence."""
    texts = [row for row in rows if isinstance(row, str)]
    tokens = [row for row in rows if not isinstance(row, str)]
    arrays = token_arrays(tokenizer, texts)
    if not tokens:
        return arrays
    dtype = token_dtype(tokenizer.vocab_size)
    ends = len(arrays["tokens"]) + np.cumsum([len(row) for row in tokens], dtype=np.int64)
    count = arrays["documents"][-1] + 1 + np.arange(len(tokens), dtype=np.int64)
    return {
        "tokens": np.concatenate([arrays["tokens"], *tokens]).astype(dtype, copy=False),
        "sentences": np.concatenate([arrays["sentences"], ends]),
        "documents": np.concatenate([arrays["documents"], count]),
    }


# ---- in a worker -----------------------------------------------------------------------------------------------------

_tokenizer: Tokenizer | None = None


def _start(tokenizer: Tokenizer, parent: int) -> None:
    global _tokenizer
    _tokenizer = tokenizer
    # The parent stops after the step that a signal interrupts, and needs its workers until then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process after its parent, which may have been killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _tokenize(rows: list[Row]) -> Arrays:
    assert _tokenizer is not None
    return arrays_of(_tokenizer, rows)

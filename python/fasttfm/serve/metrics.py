"""Metrics with the names of text-embeddings-inference, in Prometheus' text format, and the numbers of the page."""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_DURATIONS = tuple(1e-5 * 1.5**power for power in range(1, 36))
_LENGTHS = tuple(2.0**power for power in range(20))
_BATCHES = tuple(2.0**power for power in range(13))
_TOKENS = tuple(2.0**power for power in range(21))
_KEPT = 4096  # requests whose latency the page shows
_WINDOW = 10.0  # seconds over which the page's rates are computed


class Distribution:
    """A histogram. ``observe`` is called for every request: it costs a search and two additions, not a lock."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def state(self) -> list[Any]:
        return [list(self._counts), self._sum]

    def add(self, state: Sequence[Any]) -> None:
        """Adds the counts and the sum of another histogram with the same bounds."""
        counts, total = state
        self._counts = [ours + theirs for ours, theirs in zip(self._counts, counts, strict=True)]
        self._sum += total

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum of all values."""
        names = [*(format(bound, ".6g") for bound in self._bounds), "+Inf"]
        return list(zip(names, map(float, itertools.accumulate(self._counts)), strict=True)), self._sum


class Metrics:
    """What the server counts. Requests are counted by the event loop, batches by the sessions' threads under a lock.

    Args:
        gauges: Name -> a function that returns labels and values when ``/metrics`` is read.
    """

    def __init__(self) -> None:
        self.gauges: dict[str, tuple[str, Callable[[], Iterator[tuple[dict[str, str], float]]]]] = {}
        self._requests: dict[tuple[str, str, str], int] = {}  # (metric, label, value) -> count
        self._lock = threading.Lock()
        durations = ("", "_tokenization", "_queue", "_inference")
        self._durations = [Distribution(_DURATIONS) for _ in durations]
        self._histograms = {
            **{
                f"te_request{part}_duration": histogram
                for part, histogram in zip(durations, self._durations, strict=True)
            },
            "te_request_input_length": Distribution(_LENGTHS),
            "te_batch_next_size": Distribution(_BATCHES),
            "te_batch_next_tokens": Distribution(_TOKENS),
            "fasttfm_time_to_first_token": Distribution(_DURATIONS),
        }
        self._lengths = self._histograms["te_request_input_length"]
        self._batch_sizes = self._histograms["te_batch_next_size"]
        self._batch_tokens = self._histograms["te_batch_next_tokens"]
        self.first_tokens = self._histograms["fasttfm_time_to_first_token"]
        self._recent: deque[tuple[float, float, int, int]] = deque(maxlen=_KEPT)  # end, seconds, texts, tokens

    def count(self, metric: str, label: str, value: str) -> None:
        key = (metric, label, value)
        self._requests[key] = self._requests.get(key, 0) + 1

    def answered(self, method: str, durations: Sequence[float], texts: int, tokens: int) -> None:
        """A request that was computed: its durations in all, of tokenization, in the queue and of the computation."""
        self.count("te_request_success", "method", method)
        for histogram, seconds in zip(self._durations, durations, strict=True):
            histogram.observe(seconds)
        self._recent.append((time.monotonic(), durations[0], texts, tokens))

    def read(self, lengths: Sequence[int]) -> None:
        """The numbers of tokens of a request's inputs."""
        for length in lengths:
            self._lengths.observe(length)

    def launched(self, sequences: int, tokens: int) -> None:
        """A batch, in a session's thread."""
        with self._lock:
            self._batch_sizes.observe(sequences)
            self._batch_tokens.observe(tokens)

    def recent(self) -> dict[str, Any]:
        """Rates and latencies of the last seconds, for the page."""
        now = time.monotonic()
        last = [request for request in self._recent if now - request[0] <= _WINDOW]
        seconds = sorted(request[1] for request in last)

        def percentile(fraction: float) -> float | None:
            return seconds[min(len(seconds) - 1, int(fraction * len(seconds)))] * 1e3 if seconds else None

        span = max(1.0, now - last[0][0]) if len(last) == _KEPT else _WINDOW
        return {
            "window_seconds": _WINDOW,
            "requests_per_second": len(last) / span,
            "texts_per_second": sum(request[2] for request in last) / span,
            "tokens_per_second": sum(request[3] for request in last) / span,
            "latency_ms": {"p50": percentile(0.5), "p90": percentile(0.9), "p99": percentile(0.99)},
        }

    # ---- several processes ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All numbers, for another process of the same server."""
        return {
            "requests": [[*key, count] for key, count in list(self._requests.items())],
            "histograms": {name: histogram.state() for name, histogram in self._histograms.items()},
            "recent": list(self._recent),
            "gauges": {name: [about, list(read())] for name, (about, read) in self.gauges.items()},
        }

    @classmethod
    def total(cls, states: Sequence[Mapping[str, Any]]) -> Metrics:
        """The sums of the numbers of several processes."""
        total = cls()
        samples: dict[str, tuple[str, dict[str, tuple[dict[str, str], float]]]] = {}
        for state in states:
            for *key, count in state["requests"]:
                name: Any = tuple(key)
                total._requests[name] = total._requests.get(name, 0) + count
            for name, histogram in state["histograms"].items():
                total._histograms[name].add(histogram)
            for name, (about, numbers) in state["gauges"].items():
                _, sums = samples.setdefault(name, (about, {}))
                for labels, number in numbers:
                    sums[str(labels)] = (labels, number + sums.get(str(labels), (labels, 0.0))[1])
        merged = sorted(
            (tuple(request) for state in states for request in state["recent"]), key=lambda request: request[0]
        )
        total._recent.extend(merged)
        for name, (about, sums) in samples.items():
            total.gauges[name] = (about, lambda sums=sums: iter(sums.values()))  # type: ignore[misc]
        return total

    # ---- Prometheus --------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Any]:
        """For ``prometheus_client``. Counters have TEI's names, which do not end in ``_total``: such metrics are of
        the type unknown."""
        from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, UnknownMetricFamily

        families: dict[str, Any] = {}
        for (metric, label, value), count in list(self._requests.items()):
            if metric not in families:
                families[metric] = UnknownMetricFamily(metric, f"Requests by {label}.", labels=[label])
            families[metric].add_metric([value], count)
        yield from families.values()
        for name, histogram in self._histograms.items():
            buckets, total = histogram.buckets()
            family = HistogramMetricFamily(name, f"{name.removeprefix('te_').replace('_', ' ')}.", labels=[])
            family.add_metric([], buckets, total)
            yield family
        for name, (about, read) in self.gauges.items():
            samples = list(read())
            gauge = GaugeMetricFamily(name, about, labels=list(samples[0][0]) if samples else [])
            for labels, number in samples:
                gauge.add_metric(list(labels.values()), number)
            yield gauge

    def describe(self) -> list[Any]:
        return []

    def exposition(self) -> bytes:
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

"""Benchmarks: ``measure`` times ops and peers, ``timing`` has the clocks, ``report`` tables and charts."""

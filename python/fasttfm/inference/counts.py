"""``SessionCounts``: what a session has computed."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class SessionCounts:
    """Statistics of what a session has computed."""

    texts: int = 0
    tokens: int = 0
    batches: int = 0
    seconds: float = 0.0  # from the launch of batches until their results are on the host
    empty: int = 0  # texts without tokens, whose vector is 0
    truncated: int = 0  # texts
    left_out: int = 0  # tokens of the truncated texts

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def since(self, before: SessionCounts) -> SessionCounts:
        """What was computed after ``before`` was copied."""
        names = [field.name for field in fields(self)]
        return SessionCounts(**{name: getattr(self, name) - getattr(before, name) for name in names})

    def note(self, max_length: int) -> str:
        """A message about truncated and empty texts; empty if there are none."""
        parts = []
        if self.truncated:
            texts = f"{self.truncated:,} of {self.texts:,} texts have more than {max_length} tokens and are truncated"
            parts.append(f"{texts} ({self.left_out:,} tokens are ignored)")
        if self.empty:
            parts.append(f"{self.empty:,} of {self.texts:,} texts have no tokens; their vectors are zero")
        return "; ".join(parts)

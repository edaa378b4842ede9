"""``PatchReport``: a readable summary of what ``fasttfm.patch`` did to a model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PatchReport:
    """The changes with the number of modules, and the parts that were not changed with the reason. Printable."""

    model: str
    changed: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.model}, patched by fasttfm", "changed:"]
        lines += [f"  {what} ({count} {'module' if count == 1 else 'modules'})" for what, count in self.changed.items()]
        if self.left:
            lines += ["left as it is:", *(f"  {what}: {why}" for what, why in self.left.items())]
        return "\n".join(lines)

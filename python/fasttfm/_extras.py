"""Messages about missing optional packages."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The commands that install one of the extras of pyproject.toml: from an index, and from a clone."""
    return f"pip install 'fasttfm[{extra}]' (from a clone: pip install '.[{extra}]')"


def missing(what: str, package: str, extra: str) -> ImportError:
    """The error that says which package ``what`` needs and how to install it."""
    return ImportError(f"{what} needs {package}: {how_to_install(extra)}")

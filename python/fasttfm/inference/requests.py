"""What is submitted to a session, and how its dispatcher launches a group of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fasttfm.inference.formats import Tokens
from fasttfm.inference.network import Output


class Item(NamedTuple):
    """What was submitted, and the output to compute."""

    sequences: Sequence[Tokens]
    output: Output
    single: bool = True  # whether the result is that of the only sequence
    tag: Any = None  # for ``Session.on_launch``


def launch_items(
    items: list[Item],
    launch: Callable[[list[Tokens], Output], Callable[..., Any]],
    on_launch: Callable[[list[Any], int, int], None] | None,
) -> Callable[[], Sequence[Any]]:
    """Starts the computation of items, which may ask for different outputs. Returns a function that waits for it and
    returns each one's result or error.

    Args:
        launch: ``Scheduler.launch``.
        on_launch: Called before, with the tags of all items, the number of their sequences and of their tokens.
    """
    if on_launch is not None:
        lengths = [len(sequence.ids) for item in items for sequence in item.sequences]
        on_launch([item.tag for item in items], len(lengths), sum(lengths))
    groups: dict[Output, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(item.output, []).append(index)
    waiting = [
        (indices, launch([sequence for index in indices for sequence in items[index].sequences], output))
        for output, indices in groups.items()
    ]

    def finish() -> list[Any]:
        results: list[Any] = [None] * len(items)
        for indices, wait in waiting:
            errors: dict[int, BaseException] = {}
            rows, begin = wait(errors), 0
            for index in indices:
                end = begin + len(items[index].sequences)
                failed = [errors[number] for number in range(begin, end) if number in errors] if errors else ()
                results[index] = failed[0] if failed else rows[begin] if items[index].single else rows[begin:end]
                begin = end
        return results

    return finish

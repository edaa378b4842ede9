"""``fasttfm predict --labels``: entities of the given types, by GLiNER."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fasttfm.cli.options import check_output_file

# Options of other models, by their names in the arguments.
_OTHERS = ("task", "adapter", "replace", "max_length", "text_column", "pair_column", "label_column", "rows_per_part")


def run_entities(arguments: argparse.Namespace) -> int:
    """Writes a line of JSON for each text, with its entities."""
    from fasttfm.tasks.entities import load_gliner, records
    from fasttfm.tasks.prediction_files import opened, read_texts
    from fasttfm.train.progress import tracked

    for name in _OTHERS:
        if getattr(arguments, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')}: expected without --labels, got {getattr(arguments, name)}")
    if arguments.format not in (None, "jsonl"):
        raise ValueError(f"--format: expected jsonl with --labels, got {arguments.format}")
    check_output_file(arguments)
    options: dict[str, Any] = {"flat": not arguments.nested, "tokens_per_batch": arguments.tokens_per_batch}
    if arguments.threshold is not None:
        options["threshold"] = arguments.threshold
    given = {name: getattr(arguments, name) for name in ("tokenizer", "device", "precision")}
    model = load_gliner(arguments.model, **given)
    texts: Any = arguments.text or read_texts(arguments.data)
    found: Any = records(model, texts, arguments.labels, **options)
    if not arguments.quiet and arguments.text is None:
        found = tracked(found, "texts", total=None)
    count = 0
    with opened(arguments.output) as file:
        for record in found:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += 1
    if arguments.output is not None:
        print(f"output     {arguments.output} (entities, {count:,} texts)")
    return 0

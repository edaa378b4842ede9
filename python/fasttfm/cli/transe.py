"""``fasttfm transe``: learns vectors of a knowledge graph's entities and relations (TransE).

  fasttfm transe                                            the shipped graph
  fasttfm transe --data triples.tsv --width 100 --epochs 500
  fasttfm transe --data train.tsv --test test.tsv --output kg
  fasttfm transe --graph conceptnet.tsv --output kg         for finetune --graph conceptnet.tsv --graph-vectors kg

A line of --data has head, relation and tail, separated by tabs. A line of --graph is an edge as finetune --graph
reads it: relation, head, tail and, if there is one, a weight, which TransE ignores. The output directory contains
entity2id.txt, entity2vec.vec, relation2id.txt and relation2vec.vec in the format of OpenKE and of ERNIE's released
knowledge embeddings, and metrics.json. Hits@10 and mean rank are filtered: a test fact's head or tail is ranked among
all entities except those that complete another known fact.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from fasttfm._atomic_files import write_json
from fasttfm.cli.options import Formatter, check_output, exit_on_user_error, output_of, sentence


def add_parser(subparsers: Any) -> None:
    """Adds the ``transe`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "transe", help="learn vectors of a knowledge graph", description=__doc__, formatter_class=Formatter
    )
    files = parser.add_mutually_exclusive_group()
    files.add_argument(
        "--data", type=Path, metavar="FILE", help="triples: head, relation, tail (default: the shipped graph)"
    )
    files.add_argument("--graph", type=Path, metavar="FILE", help="edges: relation, head, tail and, optionally, weight")
    parser.add_argument(
        "--test",
        type=Path,
        metavar="FILE",
        help="triples to rank: head, relation, tail (default: a fraction of the data)",
    )
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.05,
        metavar="FRACTION",
        help="fraction of the triples that are ranked, not learnt; 0 learns and ranks all",
    )
    group = parser.add_argument_group("training")
    group.add_argument("--width", type=int, default=100, metavar="N", help="width of the vectors")
    group.add_argument("--epochs", type=int, default=200, metavar="N", help="passes over the triples")
    group.add_argument("--batch-size", type=int, default=512, metavar="N", help="triples per step")
    group.add_argument("--learning-rate", type=float, default=0.01, metavar="RATE", help="Adam's learning rate")
    group.add_argument("--margin", type=float, default=1.0, metavar="NUMBER", help="margin of the ranking loss")
    group.add_argument("--negatives", type=int, default=4, metavar="N", help="corrupted triples for each triple")
    group.add_argument("--norm", type=int, default=1, choices=(1, 2), help="L1 or L2 distance")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="random seed")
    group = parser.add_argument_group("run")
    group.add_argument(
        "--output", type=Path, metavar="DIR", help="output directory (default: a new one under fasttfm-runs)"
    )
    group.add_argument("--overwrite", action="store_true", help="write to --output even if it has files")
    group.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    with exit_on_user_error(arguments):
        from fasttfm.data.graphs import read_graph
        from fasttfm.data.knowledge import facts_of, read_triples
        from fasttfm.data.texts import shipped_knowledge
        from fasttfm.models.entity_files import write_embeddings
        from fasttfm.train.progress import tracked
        from fasttfm.train.transe import TransESettings, train_transe

        check_output(arguments, data=arguments.data, graph=arguments.graph, test=arguments.test)
        names = ("width", "epochs", "batch_size", "learning_rate", "margin", "negatives", "norm", "seed")
        settings = TransESettings(
            **{name: getattr(arguments, name) for name in names},
            held_out=0.0 if arguments.test is not None else arguments.held_out,
        )
        source = arguments.graph or arguments.data or shipped_knowledge("triples")
        graph = read_triples(source) if arguments.graph is None else facts_of(read_graph(source))
        test = None
        if arguments.test is not None:
            test = read_triples(arguments.test, entities=graph.entities, relations=graph.relations).triples
        print(
            f"{len(graph.triples):,} triples, {len(graph.entities):,} entities, {len(graph.relations):,} relations: "
            f"{source if arguments.data or arguments.graph else 'the shipped graph'}"
        )
        if len(graph.relations) > len(graph.triples[:, 0].unique()):
            print("note       more names of relations than of heads: lines of relation, head, tail are read by --graph")
        output = output_of(arguments, "transe")
        watch: Any = iter if arguments.quiet else partial(tracked, unit="epochs", total=settings.epochs)
        trained = train_transe(graph, settings, test=test, watch=watch)
        write_embeddings(output, graph.entities, graph.relations, trained.entities, trained.relations)
        scores = {"hits_at_10": trained.hits(10), "mean_rank": trained.mean_rank}
        counts = {"triples": len(graph.triples), "entities": len(graph.entities), "ranks": len(trained.ranks)}
        write_json(output / "metrics.json", {"data": str(source), **counts, "loss": trained.loss, **scores})
        print(f"{len(trained.ranks) // 2:,} triples ranked: {sentence(scores)} of {len(graph.entities):,}")
        print(f"output     {output}")
    return 0

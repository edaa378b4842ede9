"""TransE on small graphs: what it learns, how facts are ranked, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fasttfm.cli.main import main
from fasttfm.data.graphs import read_graph, read_graph_vectors
from fasttfm.data.knowledge import Graph, facts_of, read_triples
from fasttfm.data.texts import shipped_knowledge
from fasttfm.models.entity_files import read_entities, read_names
from fasttfm.train.transe import TransESettings, ranks, train_transe


def chain(length: int) -> Graph:
    """0 -> 1 -> 2 ..., and edges to the second next entity."""
    facts = [(number, step - 1, number + step) for step in (1, 2) for number in range(length - step)]
    return Graph([str(number) for number in range(length)], ["next", "next but one"], torch.tensor(facts))


def test_ranks_are_filtered() -> None:
    entities = torch.tensor([[0.0], [1.0], [1.1], [5.0]])
    relations = torch.tensor([[1.0]])
    facts = torch.tensor([[0, 0, 1], [0, 0, 2]])
    assert ranks(entities, relations, facts[1:], facts).tolist() == [1, 1]  # entity 1 is nearer, and true as well
    assert ranks(entities, relations, facts[1:], facts[1:]).tolist() == [2, 1]
    far = torch.tensor([[3, 0, 0]])
    assert ranks(entities, relations, far, far).tolist() == [4, 4]
    same = torch.zeros(9, 2)
    assert ranks(same, torch.zeros(1, 2), facts[:1], facts[:1]).tolist() == [5, 5]  # neither best nor worst


def test_unseen_facts_rank_high() -> None:
    graph = read_triples(shipped_knowledge("triples"))
    settings = TransESettings(width=32, epochs=60, learning_rate=0.02)
    found = train_transe(graph, settings)
    assert len(found.ranks) == 2 * round(0.05 * len(graph.triples))
    chance = len(graph.entities) / 2
    assert found.mean_rank < chance / 4
    assert found.hits(10) > 0.5
    torch.testing.assert_close(found.entities.norm(dim=1), torch.ones(len(graph.entities)))
    again = train_transe(graph, settings)
    assert torch.equal(found.entities, again.entities)  # the seed decides


@pytest.mark.parametrize("norm", [1, 2])
def test_a_chain_is_learnt(norm: int) -> None:
    seen: list[int] = []
    settings = TransESettings(width=8, epochs=150, held_out=0.0, norm=norm, learning_rate=0.03)
    found = train_transe(chain(6), settings, watch=lambda epochs: (seen.append(each) or each for each in epochs))
    assert seen == list(range(150))
    assert found.mean_rank < 2.5


def test_invalid_settings() -> None:
    for name, value, message in (
        ("width", 0, "width: expected a number from 1 on, got 0"),
        ("margin", 0.0, "margin: expected a number above 0, got 0.0"),
        ("norm", 3, "norm: expected 1 or 2, got 3"),
        ("held_out", 1.0, "held_out: expected a fraction of the facts"),
    ):
        with pytest.raises(ValueError, match=message):
            TransESettings(**{name: value})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--width", "8", "--epochs", "3", "--quiet"]
    output = tmp_path / "kg"
    assert main(["transe", "--output", str(output), *options]) == 0
    said = capsys.readouterr().out
    assert "451 triples, 126 entities, 4 relations: the shipped graph" in said
    assert "23 triples ranked: hits at 10" in said
    names, vectors = read_entities(output)
    assert vectors.shape == (len(names), 8) == (126, 8)
    assert read_names(output / "relation2id.txt") == ["part_of", "is_a", "capital_of", "borders_on"]
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["ranks"] == 46
    assert 0 <= metrics["hits_at_10"] <= 1
    test = tmp_path / "test.tsv"
    test.write_text("Spain\tborders_on\tFrance\n")
    assert main(["transe", "--test", str(test), "--output", str(tmp_path / "other"), *options]) == 0
    assert "1 triples ranked" in capsys.readouterr().out
    test.write_text("Mars\tborders_on\tFrance\n")
    for arguments, status, message in (
        (["--test", str(test)], 1, "line 1: expected one of the 126 known entities, got 'Mars'"),
        (["--output", str(output)], 2, "--output: expected a new or empty directory"),
        (["--margin", "-1"], 2, "margin: expected a number above 0, got -1.0"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["transe", *options, *arguments])
        assert stopped.value.code == status
        assert message in capsys.readouterr().err


def test_edge_files_of_kagnet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges = tmp_path / "edges.tsv"
    edges.write_text("/r/IsA\t/c/en/Red_Cup\tthing\t2.0\nAtLocation\tred cup\tkitchen\nIsA\tkitchen\troom\n")
    options = ["--width", "8", "--epochs", "2", "--held-out", "0", "--quiet"]
    assert main(["transe", "--graph", str(edges), "--output", str(tmp_path / "kg"), *options]) == 0
    assert "3 triples, 4 entities, 2 relations" in capsys.readouterr().out
    graph = read_graph(edges)
    facts = {tuple(row) for row in facts_of(graph).triples.tolist()}
    assert facts == {(0, 0, 1), (0, 1, 2), (2, 0, 3)}  # without inverses
    assert read_graph_vectors(tmp_path / "kg", graph).concepts.shape == (4, 8)
    edges.write_text("IsA\tcup\tthing\nIsA\tkitchen\troom\n")
    assert main(["transe", "--data", str(edges), "--output", str(tmp_path / "wrong"), *options]) == 0
    assert "lines of relation, head, tail are read by --graph" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["transe", "--data", str(edges), "--graph", str(edges), *options])
    assert stopped.value.code == 2

"""KagNet (Lin et al., 2019): answers are scored by an encoder's vector of the statement and a vector of a graph.

    s = the encoder's vector of "question [SEP] answer"
    g = GraphReasoner(schema graph of question and answer, s)
    score(question, answer) = MLP([g; s])

The scores of a question's answers go into one softmax. ``GraphFields`` and ``GraphChoice`` are mixins for the
configuration and the multiple-choice model of a family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fasttfm.models.checkpoint_names import rule
from fasttfm.models.outputs import GraphChoiceOutput
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import Layout, flatten_choices
from fasttfm.nn.graph import GraphBatch, GraphReasoner
from fasttfm.nn.losses import token_loss

if TYPE_CHECKING:
    from typing_extensions import Unpack

GRAPH_NAMES = (rule("graph", "graph"), rule("scorer", "scorer"))  # in checkpoints of every family


@dataclass
class GraphFields:
    """The fields of a configuration that describe the graph and the sizes of its encoder."""

    graph_concepts: int = 1
    graph_relations: int = 2  # with their inverses
    concept_size: int = 100
    graph_layers: int = 2
    path_size: int = 256
    pair_size: int = 128
    graph_dropout: float = 0.1
    freeze_concepts: bool = False  # whether the vectors of concepts and relations are not trained


class GraphChoice(PretrainedModel):
    """Chooses between answers: ``input_ids`` [B, choices, S], or packed, and a schema graph for each sequence."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.classifier
        self.graph = GraphReasoner(
            config.graph_concepts,
            config.graph_relations,
            config.concept_size,
            config.hidden_size,
            layers=config.graph_layers,
            path_size=config.path_size,
            pair_size=config.pair_size,
            dropout=config.graph_dropout,
            freeze=config.freeze_concepts,
        )
        self.scorer = nn.Sequential(
            nn.Linear(self.graph.output_size + config.hidden_size, config.pair_size),
            nn.Dropout(config.graph_dropout),
            nn.LeakyReLU(),
            nn.Linear(config.pair_size, 1),
        )
        self.finish()

    def initialise(self, module: nn.Module) -> None:
        """The graph's layers have torch's initialization, because the encoder's is for its own width. Vectors of
        concepts and relations have length 1 on average."""
        parts = [self._modules[name] for name in ("graph", "scorer") if name in self._modules]
        inside = any(module is inner for part in parts if part is not None for inner in part.modules())
        if inside and isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.concept_size**-0.5)
        elif inside and isinstance(module, (nn.Linear, nn.LSTM)):
            module.reset_parameters()
        else:
            super().initialise(module)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        graph: GraphBatch,
        labels: Tensor | None = None,
        num_choices: int | None = None,
        **layout: Unpack[Layout],
    ) -> GraphChoiceOutput:
        name = type(self).__name__
        choices, ids, others = flatten_choices(
            name, num_choices, input_ids, attention_mask, token_type_ids, position_ids
        )
        choosing: Any = self  # the family's multiple-choice model, which this class is mixed into
        encoded = choosing.encoder.encode(ids, *others, reads_first=True, **layout)
        statements = choosing.summarise(encoded).to(self.scorer[0].weight.dtype)
        if graph.graphs != len(statements):
            raise ValueError(f"{name}: graph: expected {len(statements)} graphs, one per choice, got {graph.graphs}")
        reasoned = self.graph(graph, statements)
        with torch.autocast(statements.device.type, enabled=False):  # as the graph's attention
            logits = self.scorer(torch.cat([reasoned.vectors, statements], -1)).view(-1, choices)
        loss = None if labels is None else token_loss(logits, labels)
        return GraphChoiceOutput(loss, logits, reasoned.path_weights, reasoned.pair_weights, **encoded.returned())

"""``GLiNER``: the entities of texts, and checkpoints of the gliner package, of its models with one encoder that score
spans. The network is in ``gliner_spans``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fasttfm.models.checkpoint_files import CheckpointError, CheckpointReader, write_tensors
from fasttfm.models.deberta_v2_config import DebertaV2Config
from fasttfm.models.directories import checkpoint_directory
from fasttfm.models.gliner_config import GLiNERConfig
from fasttfm.models.gliner_spans import SpanScorer
from fasttfm.models.gliner_texts import (
    EntityTokenizer,
    TextTokens,
    entities_in,
    packed,
    targets,
    unique,
    words_of,
)
from fasttfm.models.hub import GLINER_CONFIG

if TYPE_CHECKING:
    from typing_extensions import Self

_ENCODER = "token_rep_layer.bert_layer.model."
_NAMES = {  # of our modules in checkpoints
    "projection.": "token_rep_layer.projection.",
    "rnn.": "rnn.lstm.",
    "start.": "span_rep_layer.span_rep_layer.project_start.",
    "end.": "span_rep_layer.span_rep_layer.project_end.",
    "span.": "span_rep_layer.span_rep_layer.out_project.",
    "prompt.": "prompt_rep_layer.",
}
_ONE_FILE = 2**63  # bytes: the gliner package does not read several
_WORD_TABLE = f"{_ENCODER}embeddings.word_embeddings.weight"


class GLiNER(SpanScorer):
    """Finds the entities of texts.

    Args:
        tokenizer: What reads texts, of ``fasttfm.data`` or of the tokenizers library. The markers that it lacks are
            added to a copy of it. Without one the model only takes ids.
    """

    def __init__(self, config: GLiNERConfig, tokenizer: Any = None) -> None:
        read = None if tokenizer is None else EntityTokenizer.of(tokenizer, config)
        if read is not None:
            config.class_token_index = read.marker
        super().__init__(config)
        config.vocab_size = config.encoder.vocab_size
        self.tokenizer = read

    # ---- texts -------------------------------------------------------------------------------------------------------

    def batch_of(
        self,
        texts: Sequence[Sequence[str]],
        labels: Sequence[str] | Sequence[Sequence[str]],
        entities: Sequence[Sequence[tuple[int, int, str]]] | None = None,
    ) -> dict[str, Any]:
        """The arguments of a call for texts, each a list of words.

        Args:
            labels: The types of entities, or a list of them for each text.
            entities: For training: of each text its entities, as their first and last word and their type. Those that
                are longer than ``max_width``, or not in the text or its types, are left out.
        """
        shared = not labels or any(isinstance(label, str) for label in labels)
        given: Any = labels
        types = [unique(given)] * len(texts) if shared else [unique(each) for each in given]
        for name, each in (("labels", types), ("entities", texts if entities is None else entities)):
            if len(each) != len(texts):
                raise ValueError(f"GLiNER: {name}: expected a list for each of {len(texts)} texts, got {len(each)}")
        if not all(map(len, texts)) or not all(types) or not texts:
            raise ValueError("GLiNER: texts: expected a word and a type or more for each text, got a text without")
        read = self._read(texts, types)
        batch = packed(read, self.device)
        if entities is not None:
            batch["labels"] = targets(read, types, entities, self.config.max_width).to(self.device)
        return batch

    def predict_entities(
        self,
        texts: str | Sequence[str],
        labels: Sequence[str],
        *,
        threshold: float = 0.5,
        flat: bool = True,
        multi_label: bool = False,
        tokens_per_batch: int = 4096,
    ) -> Any:
        """The entities of each text, or of a single one, by their places: dictionaries with ``start`` and ``end`` (a
        range of characters), ``text``, ``label`` and ``score``.

        Args:
            labels: The types of entities, in words. Repeated ones count once.
            threshold: Entities have a higher probability than this.
            flat: Whether entities have no common words; otherwise one may be inside of another.
            multi_label: Whether a span may have several types.
            tokens_per_batch: The maximum number of tokens in a packed batch; a longer text is a batch by itself.
        """
        if not 0 <= threshold <= 1:
            raise ValueError(f"GLiNER: threshold: expected a number in [0, 1], got {threshold}")
        options = {"flat": flat, "multi_label": multi_label}
        given = [texts] if isinstance(texts, str) else list(texts)
        types, words = unique(labels), [words_of(text) for text in given]
        found: list[list[dict[str, Any]]] = [[] for _ in given]
        known = [number for number, each in enumerate(words) if each and types]  # a text may be empty
        read = self._read([[word.text for word in words[number]] for number in known], [types] * len(known))
        for batch in _batches(read, tokens_per_batch):
            for index, probabilities in zip(batch, self._probabilities([read[i] for i in batch]), strict=True):
                number = known[index]
                for first, last, label, score in entities_in(probabilities, threshold, **options):
                    start, end = words[number][first].start, words[number][last].end
                    place = {"start": start, "end": end, "text": given[number][start:end]}
                    found[number].append({**place, "label": types[label], "score": score})
        return found[0] if isinstance(texts, str) else found

    @torch.inference_mode()
    def _probabilities(self, read: Sequence[TextTokens]) -> Any:
        """[texts, words, widths, types], in evaluation mode."""
        was_training = self.training
        try:
            return self.eval()(**packed(read, self.device)).logits.float().sigmoid().cpu().numpy()
        finally:
            self.train(was_training)

    def _read(self, texts: Sequence[Sequence[str]], types: Sequence[Sequence[str]]) -> list[TextTokens]:
        if self.tokenizer is None:
            given = f"fasttfm.data.load_tokenizer({self.config.model_name!r})"
            raise ValueError(f"GLiNER: tokenizer: expected from_pretrained(..., tokenizer={given}), got none")
        prompts = {tuple(each): self.tokenizer.prompt(each) for each in {tuple(each) for each in types}}
        return self.tokenizer.sequences(texts, [prompts[tuple(each)] for each in types])

    @property
    def device(self) -> torch.device:
        return self.encoder.embeddings.word.weight.device

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        tokenizer: Any = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> Self:
        """Reads a directory or hub model of the gliner package: ``gliner_config.json``, ``model.safetensors`` or
        ``pytorch_model.bin``, and ``tokenizer.json`` if it has one.

        Args:
            tokenizer: What reads texts if the directory has no ``tokenizer.json``: that of the encoder, by
                ``fasttfm.data.load_tokenizer(config.model_name)``.

        Returns:
            The model in evaluation mode. The other arguments are those of ``PretrainedModel.from_pretrained``.
        """
        path = checkpoint_directory(directory, revision=revision, token=token)
        config, reader = GLiNERConfig.from_pretrained(path), CheckpointReader(path)
        if config.encoder_config is None:
            config.encoder_config = DebertaV2Config.from_pretrained(config.model_name)
        if _WORD_TABLE in reader.files:
            config.encoder.vocab_size = reader.shape(_WORD_TABLE)[0]
        try:
            with torch.device("meta"):
                model = cls(config, EntityTokenizer.of_directory(path, config) if tokenizer is None else tokenizer)
        except ValueError as error:
            raise CheckpointError(f"{path / GLINER_CONFIG}: {error}") from error
        model.load_state_dict(model._from_checkpoint(reader), assign=True)
        return model.to(device=device, dtype=dtype).eval()

    def _from_checkpoint(self, reader: CheckpointReader) -> dict[str, Tensor]:
        """The parameters of a checkpoint, whose keys and shapes are checked before any is read."""
        expected = self.checkpoint_tensors(self.state_dict())
        for key, path in reader.files.items():
            inner = f"{self.encoder.names.prefix}.{key.removeprefix(_ENCODER)}"
            if key not in expected and not self.encoder.names.is_ignored(inner):
                raise CheckpointError(
                    f"{path}: {key}: expected only parameters of the model that {GLINER_CONFIG} describes"
                )
        for key, tensor in expected.items():
            if key not in reader.files:
                raise CheckpointError(f"{next(iter(reader.files.values()))}: {key}: missing")
            if reader.shape(key) != tuple(tensor.shape):
                where = f"{reader.files[key]}: {key}"
                raise CheckpointError(f"{where}: expected shape {tuple(tensor.shape)}, got {reader.shape(key)}")
        tensors = {key: reader.tensor(key) for key in expected}
        inside = {key.removeprefix(_ENCODER): tensor for key, tensor in tensors.items() if key.startswith(_ENCODER)}
        found = {f"encoder.{name}": tensor for name, tensor in self.encoder.own_tensors(inside).items()}
        for ours, theirs in _NAMES.items():
            found.update((ours + key.removeprefix(theirs), x) for key, x in tensors.items() if key.startswith(theirs))
        return found

    def checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts tensors with our parameters' names, such as gradients, to the names of checkpoints."""
        inside = {name.removeprefix("encoder."): x for name, x in tensors.items() if name.startswith("encoder.")}
        converted = {_ENCODER + name: x for name, x in self.encoder.checkpoint_tensors(inside).items()}
        for ours, theirs in _NAMES.items():
            converted.update(
                (theirs + name.removeprefix(ours), x) for name, x in tensors.items() if name.startswith(ours)
            )
        return converted

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes a directory that ``from_pretrained``, here and of the gliner package, reads with the same bits."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        tensors = self.checkpoint_tensors(self.state_dict())
        write_tensors(path, tensors, _ONE_FILE, config=self.config.to_dict(), config_name=GLINER_CONFIG)
        if self.tokenizer is not None:
            self.tokenizer.save(path)


def _batches(read: Sequence[TextTokens], tokens: int) -> Iterator[list[int]]:
    """The numbers of texts of similar length, in batches of this many tokens or fewer."""
    batch: list[int] = []
    size = 0
    known = [number for number, text in enumerate(read) if any(text.words)]  # words may have no tokens
    for number in sorted(known, key=lambda number: len(read[number].ids)):
        if batch and size + len(read[number].ids) > tokens:
            yield batch
            batch, size = [], 0
        batch.append(number)
        size += len(read[number].ids)
    if batch:
        yield batch

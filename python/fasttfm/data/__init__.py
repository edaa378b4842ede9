"""From texts to packed batches: documents, tokenizers, memory-mapped shards, examples, masks, batches.

>>> from fasttfm import data
>>> tokenizer = data.train_tokenizer("wordpiece", data.read_documents("books/*.txt"), 8192)
>>> shards = data.prepare("books/*.txt", tokenizer, "books.shards")
>>> for batch in data.BatchStream(shards, data.SequenceFormat("nsp", 128), tokens_per_batch=16384, seed=0): ...
"""

from fasttfm.data.assembly import Batch
from fasttfm.data.batches import BatchStream
from fasttfm.data.examples import SequenceFormat
from fasttfm.data.lines import DataError
from fasttfm.data.masking import Masking
from fasttfm.data.shards import TokenShards, prepare
from fasttfm.data.streaming import ShardStream, StreamedShards
from fasttfm.data.texts import read_documents, shipped_corpus, shipped_task
from fasttfm.data.tokenizer import SpecialIds, Tokenizer
from fasttfm.data.tokenizer_files import load_tokenizer
from fasttfm.data.tokenizer_training import train_tokenizer

__all__ = [
    "Batch",
    "BatchStream",
    "DataError",
    "Masking",
    "SequenceFormat",
    "ShardStream",
    "SpecialIds",
    "StreamedShards",
    "TokenShards",
    "Tokenizer",
    "load_tokenizer",
    "prepare",
    "read_documents",
    "shipped_corpus",
    "shipped_task",
    "train_tokenizer",
]

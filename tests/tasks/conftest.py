from model_fixtures import bert_directory, bpe, gpt_directory, unigram, wordpiece

__all__ = ["bert_directory", "bpe", "gpt_directory", "unigram", "wordpiece"]

from model_fixtures import bert_directory, bpe, gpt_directory, wordpiece

__all__ = ["bert_directory", "bpe", "gpt_directory", "wordpiece"]

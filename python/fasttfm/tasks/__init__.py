"""Fine-tuning, distillation and prompting: what is done with a trained model."""

from fasttfm.inference.opening import open_model
from fasttfm.tasks.distillation_recipes import DistilBertRecipe, TinyBertRecipe
from fasttfm.tasks.distillation_runs import CorpusRun, TaskRun, distilbert_student, save_student, tinybert_student
from fasttfm.tasks.embedding import Embedder, EmbedSettings, embed
from fasttfm.tasks.finetune_run import FinetuneRun, RunOptions
from fasttfm.tasks.finetuning import FinetuneSettings, FineTuning, predict, prepare, save
from fasttfm.tasks.language_models import LanguageModel, load_language_model
from fasttfm.tasks.loading import Predictor, load
from fasttfm.tasks.lora import Lora
from fasttfm.tasks.prompts import Prompt, Shot, read_shots
from fasttfm.tasks.rates import Rates, freeze
from fasttfm.tasks.reading import read_examples

__all__ = [
    "CorpusRun",
    "DistilBertRecipe",
    "EmbedSettings",
    "Embedder",
    "FineTuning",
    "FinetuneRun",
    "FinetuneSettings",
    "LanguageModel",
    "Lora",
    "Predictor",
    "Prompt",
    "Rates",
    "RunOptions",
    "Shot",
    "TaskRun",
    "TinyBertRecipe",
    "distilbert_student",
    "embed",
    "freeze",
    "load",
    "load_language_model",
    "open_model",
    "predict",
    "prepare",
    "read_examples",
    "read_shots",
    "save",
    "save_student",
    "tinybert_student",
]

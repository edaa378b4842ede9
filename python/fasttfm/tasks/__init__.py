"""Fine-tuning, distillation and prompting: what is done with a trained model."""

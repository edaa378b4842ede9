"""The papers' ablations on small data. Each experiment is a file with an ``EXPERIMENT``; ``registry`` lists them."""

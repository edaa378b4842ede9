"""Transformer layers as data: a description (``spec``), a list of steps made from it (``plan``), and what runs them
(``torch_executor``, ``core_executor``)."""

"""The command line: ``main`` parses, one module per command runs it, ``options`` is what they share."""

"""The HTTP server of ``fasttfm serve``: the routes of TEI, OpenAI, Cohere and Jina over sessions."""

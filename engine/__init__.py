"""Batching and fast decoding: the batching engine, pages, the prefix cache, captured
steps."""

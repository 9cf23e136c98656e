"""Many sequences at once, and speed: the batching engine, pages, the prefix cache, captured
steps."""

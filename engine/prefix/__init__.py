"""The prefix cache: a radix tree of token blocks, reused by requests that share a prefix."""

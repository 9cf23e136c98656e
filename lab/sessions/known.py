"""What a prefix cache of unlimited size would have: the bound that a server is measured by."""
import bisect

import numpy as np

from engine.prefix.blocks import common_tokens


class Known:
    """Sequences of tokens whose K and V have been computed."""

    def __init__(self):
        self._sequences = []  # as big-endian bytes, in order: neighbours share the longest prefixes

    def prefix(self, tokens) -> int:
        """Length of the longest prefix of `tokens` that a sequence begins with."""
        key = _key(tokens)
        at = bisect.bisect_left(self._sequences, key)
        return max((common_tokens(key, other) for other in self._sequences[max(0, at - 1):at + 1]),
                   default=0)

    def unavoidable(self, tokens) -> int:
        """How many tokens of a prompt must be computed: those that no sequence has, and at least
        the last one, whose logits are needed."""
        return len(tokens) - min(self.prefix(tokens), len(tokens) - 1)

    def add(self, tokens) -> None:
        bisect.insort(self._sequences, _key(tokens))


def _key(tokens) -> bytes:
    return np.asarray(tokens, dtype='>u4').tobytes()

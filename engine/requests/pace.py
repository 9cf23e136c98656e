"""How many prompt tokens an engine step computes beside decoding rows.

A chunk of a prompt delays the next token of every row that decodes. A fixed chunk is too large on
a slow device and too small on a fast one, so its size follows from the times of earlier steps
(Sarathi-Serve, Agrawal et al. 2024, takes it from a limit in milliseconds).
"""
from collections import deque
from statistics import median

LEAST = 16  # tokens
STEPS = 8   # earlier steps that count
LATER = 24  # steps after which unused room is lost
FIRST, FRESH = 3, 64  # decoding is timed alone: so often at first, and after so many mixed steps


class Pace:
    """Keeps steps with prompt tokens at about `slowdown` times the duration of those without. Each
    further prompt adds as much, since otherwise prompts would queue while few rows decode.

    What the last steps left unused is for prompts that end by it: they delay the others once, not
    in each of many steps.

    most: the limit, and the number as long as there are no times.
    """

    def __init__(self, most: int, slowdown: float):
        self.most, self.slowdown = most, slowdown
        self._unused = deque(maxlen=LATER)  # tokens
        self._per_token, self._decode = deque(maxlen=STEPS), deque(maxlen=STEPS)  # seconds
        self._since = 0  # steps

    def room(self, prompts: int = 1) -> int:
        """Prompt tokens for the next step, in which rows decode and so many compute prompts."""
        if not (self._per_token and self._decode):
            return self.most
        seconds = (self.slowdown - 1) * median(self._decode) * max(1, prompts)
        return min(self.most, max(LEAST, int(seconds / median(self._per_token))))

    @property
    def stale(self) -> bool:
        """Whether the next step should time decoding alone: all of the last had prompts."""
        return len(self._decode) < FIRST or self._since >= FRESH

    @property
    def saved(self) -> int:
        """Prompt tokens beyond `room` that earlier steps left to prompts which end by them."""
        return max(0, sum(self._unused))

    def used(self, n: int, room: int) -> None:
        """Record that a step with this `room`, and decoding rows, computes n prompt tokens."""
        self._unused.append(room - n)

    def mixed(self, n: int, decoding: bool, seconds: float) -> None:
        """Record that a pass computed n prompt tokens, and those of decoding rows, in this time."""
        self._since += decoding
        if not decoding:
            self.prefilled(n, seconds)
        elif self._decode:
            self.prefilled(n, max(0.1 * seconds, seconds - median(self._decode)))

    def prefilled(self, n: int, seconds: float) -> None:
        """Record that a step computed n prompt tokens in this time. Longer chunks than rows that
        decode ever wait for do not count: they take less time per token."""
        if n <= self.most or not self._per_token:
            self._per_token.append(seconds / n)

    def decoded(self, seconds: float) -> None:
        """Record the time of a decode pass."""
        self._decode.append(seconds)
        self._since = 0

"""A conversation as text: turns by a template, and their token ids. No torch here.

    turn = '{name}.\n{text}\n\n'    ROMEO.         a prompt is all turns, then the start of the next
                                    She speaks.    one; what follows {text} ends a reply

                                    JULIET.
"""
import json
import string
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.errors import UserError, shown
from common.files import owner_only, read_json, replacing
from common.removed import COMMIT

VERSION = 2


@dataclass(frozen=True)
class Template:
    """The format of a turn: '{name}', then '{text}', each once, then the end of the turn.
    Raises UserError if it has any other form."""
    turn: str
    end: str = field(init=False)  # the template after the text

    def __post_init__(self):
        try:
            pieces = list(string.Formatter().parse(self.turn))
        except ValueError as e:
            raise UserError(f'turn={self.turn!r}: {e}') from e
        names = [name for _, name, *_ in pieces if name is not None]
        if names != ['name', 'text'] or len(pieces) < 3:
            raise UserError(f'turn={self.turn!r}: must have {{name}} and then {{text}}, each once, '
                            'and end with something that a text does not have in it, as '
                            "'{name}:\\n{text}\\n\\n'")
        literals = [literal for literal, *_ in pieces]
        self.__dict__.update(_literals=literals, end=literals[2])  # the dataclass is frozen

    def head(self, name: str) -> str:
        """The template up to the text."""
        return self._literals[0] + name + self._literals[1]


def speakers(s, dataset: str) -> tuple[str, str]:
    """The names of the user and the model: those of the settings, otherwise of Shakespeare's, if
    the model was trained on a data set of that name."""
    names = ('ROMEO', 'JULIET') if 'shakespeare' in dataset else ('USER', 'MODEL')
    return s.user or names[0], s.reply_as or names[1]


@dataclass
class Turn:
    """A speaker's text, and the token ids of the entire turn, including head and end."""
    name: str
    text: str
    ids: list[int]


@dataclass
class Dialogue:
    """The turns of a conversation."""
    tokenizer: object     # from `data.tokenizer`
    template: Template
    turns: list[Turn] = field(default_factory=list)
    trimmed: int = 0      # how many of the oldest turns are left out of prompts
    strict: bool = False  # reject texts that `say` would fold

    def say(self, name: str, text: str) -> None:
        """Append a turn. If its text would end it early, the text is folded first, unless `strict`:
        blank lines are removed and, if any line break ends a turn, lines are joined by spaces.
        Raises UserError if the text is empty, contains the end of a turn, or has characters that
        are not in the alphabet."""
        head, end = self.template.head(name), self.template.end
        if not text.strip():
            raise UserError('the message is empty')
        text = text.replace('\r\n', '\n')
        if not self.strict and end in (head + text + end)[:-1]:
            lines = [line for line in text.splitlines() if line.strip()]
            text = (' ' if end == '\n' else '\n').join(lines)
        if end in (head + text + end)[:-1]:
            raise UserError(f'a turn ends at {end!r}, and this one has it before its end: '
                            'in its text, or where that begins or ends')
        self.turns.append(Turn(name, text, self._encoded(head + text + end)))

    def narrate(self, text: str) -> None:
        """Append a text that nobody says, such as a system message, ended like a turn. It may have
        the end of a turn in it. Raises UserError if it has characters that are not in the
        alphabet."""
        end = self.template.end
        text = text.replace('\r\n', '\n').removesuffix(end)
        self.turns.append(Turn('', text, self._encoded(text + end)))

    def _encoded(self, text):
        # special tokens in text are not recognized
        return self.tokenizer.encode(text, special=False)

    def prompt(self, name: str) -> list[int]:
        """Token ids of the turns that are not trimmed and of the head of `name`'s next turn."""
        turns = self.turns[self.trimmed:]
        return [i for turn in turns for i in turn.ids] + self._encoded(self.template.head(name))

    def reply(self, name: str, text: str, ids: list[int]) -> None:
        """Append a turn that was generated after `prompt(name)`: its text, without the end of the
        turn, and its token ids. The ids are kept if they decode to the turn, so that the next
        prompt is in the prefix cache; an end-of-text token at their end is left out."""
        if ids and ids[-1] == self.tokenizer.end_of_text:
            ids = ids[:-1]
        end, decoded = self.template.end, self.tokenizer.decode(ids)
        if decoded == text:
            ids = ids + self._encoded(end)
        elif decoded != text + end:
            ids = self._encoded(text + end)
        self.turns.append(Turn(name, text, self._encoded(self.template.head(name)) + ids))

    def untrim(self, room: int) -> None:
        """Include all turns in prompts again if they have at most `room` tokens."""
        if sum(len(turn.ids) for turn in self.turns) <= room:
            self.trimmed = 0

    def trim(self, room: int) -> int:
        """Leave the oldest turns out of prompts until the rest has at most `room` tokens. Returns
        the number of turns left out."""
        total = sum(len(turn.ids) for turn in self.turns[self.trimmed:])
        while total > room:
            total -= len(self.turns[self.trimmed].ids)
            self.trimmed += 1
        return self.trimmed

    def cut(self, n: int) -> None:
        """Drop all turns except the first n."""
        del self.turns[n:]
        if self.trimmed >= n:
            self.trimmed = 0  # there is room for earlier turns again

    def save(self, path: Path) -> None:
        """Write JSON, atomically, for its owner alone. Raises UserError if it cannot be written."""
        document = {'version': VERSION, 'turn': self.template.turn, 'trimmed': self.trimmed,
                    'turns': self.turns}
        try:
            with replacing(path) as temporary:
                with open(temporary, 'x', encoding='utf-8', opener=owner_only) as file:
                    json.dump(document, file, ensure_ascii=False, default=asdict)
        except OSError as e:
            raise UserError(f'{path} cannot be written: {e}') from e

    def load(self, path: Path) -> None:
        """Read what `save` wrote; on an error nothing changes. Raises UserError if the file is of a
        different kind, or has a different template or ids of a different tokenizer."""
        try:
            document = read_json(path)
            if document['version'] == 1:
                raise UserError(f'{path} has branches, which were removed; commit {COMMIT} reads '
                                'it: give another file for the history')
            if document['version'] != VERSION or document['turn'] != self.template.turn:
                raise UserError(f"{path} was written with turn={shown(document['turn'])} "
                                f"(version {shown(document['version'])}): give that, "
                                'or another file for the history')
            turns = [Turn(str(turn['name']), str(turn['text']), [int(i) for i in turn['ids']])
                     for turn in document['turns']]
            for turn in turns:
                whole = self.template.head(turn.name) + turn.text + self.template.end
                in_vocab = all(0 <= i < self.tokenizer.vocab_size for i in turn.ids)
                if not in_vocab or self.tokenizer.decode(turn.ids) != whole:
                    raise UserError(f'{path} is from a model with other tokens, or was changed: '
                                    f'{turn.text[:40]!r}')
            self.turns, self.trimmed = turns, min(max(0, int(document['trimmed'])), len(turns))
        except UserError:
            raise
        except (OSError, ValueError, LookupError, TypeError, OverflowError) as e:
            raise UserError(f'{path} is not a conversation that can be read: '
                            f'{type(e).__name__}: {e}') from e


def longest_context(config) -> int:
    """The default max_seq_len of chat.py and serve.py.

    With RoPE and local layers it is 32 times block_size, up to 8,192: at that length the demo model
    predicts as well as within its block_size (results/demo/contexts.jsonl)."""
    if config.pos_embedding != 'rope' or 'L' not in config.layer_pattern:
        return config.block_size
    return max(config.block_size, min(32 * config.block_size, 8192))

"""Text to token ids and back: characters or a learned BPE (see meta.pkl), or GPT-2's BPE."""
import codecs
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from common.errors import UserError
from data.bpe import END_OF_TEXT, encode_text, gpt2_encoding, learned_encoding
from data.tokenfiles import TokenSplit

BLOCK = 1 << 20  # tokens counted at a time


def load_tokenizer(meta: dict | None) -> 'CharTokenizer | BPETokenizer':
    """Return the tokenizer of a dataset with this meta.pkl (see tokenfiles.read_meta): characters
    if it has stoi and itos, or the BPE that `learn_bpe` made; otherwise GPT-2's BPE, as in nanoGPT.
    Raises UserError if GPT-2's vocabulary is needed but not available."""
    if meta is not None and meta.get('tokenizer') == 'bpe':
        return BPETokenizer(learned_encoding(meta['stoi']))
    if meta is not None and 'stoi' in meta and 'itos' in meta:
        return CharTokenizer(meta['stoi'], meta['itos'], meta.get('vocab_size'))
    return BPETokenizer()


def bytes_per_token(meta: dict | None, tokens: TokenSplit) -> float:
    """Return the mean UTF-8 bytes of the tokens of a split, which turns a loss into bits per byte.
    '<|endoftext|>' has none. 0.0 if meta.pkl does not say what the tokens are."""
    if not meta or 'stoi' not in meta:
        return 0.0
    tokenizer = load_tokenizer(meta)
    sizes = np.zeros(meta['vocab_size'], dtype=np.int64)
    for i in meta['itos']:
        sizes[i] = len(tokenizer.token_bytes(i) or b'')
    if meta.get('tokenizer') == 'bpe':
        sizes[meta['stoi'][END_OF_TEXT]] = 0
    starts = range(0, len(tokens), BLOCK)
    total = sum(sizes[tokens.window(i, min(BLOCK, len(tokens) - i))].sum() for i in starts)
    return float(total) / len(tokens)


def alphabet_meta(characters: Iterable[str]) -> dict:
    """Return nanoGPT's meta.pkl for sorted characters. UserError if there are over 65,536."""
    chars = sorted(set(characters))
    if not 0 < len(chars) <= 65536:
        raise UserError(f'the text has {len(chars):,} different characters; '
                        'allowed are 1 to 65,536 (or --tokenizer=gpt2)')
    itos = dict(enumerate(chars))
    return {'vocab_size': len(chars), 'itos': itos, 'stoi': {c: i for i, c in itos.items()}}


class Tokenizer:
    """Text to ids and back: `encode` and `token_bytes` are the subclasses'."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids; unknown ids and invalid UTF-8 become '\ufffd'."""
        stream = self.stream()
        return ''.join([stream(i) for i in ids]) + stream.end()

    def stream(self) -> 'TextStream':
        """A decoder for one text that arrives id by id."""
        return TextStream(self)


class CharTokenizer(Tokenizer):
    """One id per character. vocab_size may include padding ids (decoded as '\ufffd')."""

    longest = 1  # characters per id
    end_of_text = None  # the id that ends a text: characters have none

    def __init__(self, stoi: dict[str, int], itos: dict[int, str], vocab_size: int | None = None):
        self.stoi, self.itos = stoi, itos
        self.vocab_size = vocab_size or len(stoi)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the characters' ids; a UserError lists unknown ones. `special` has no effect."""
        lacking = [c for c in dict.fromkeys(text) if c not in self.stoi]
        if lacking:
            shown = ', '.join(map(repr, lacking[:10])) + (', ...' if len(lacking) > 10 else '')
            known = ''.join(sorted(self.stoi))
            known = known if len(known) <= 200 else f'{known[:200]}...'
            characters = 'character' if len(lacking) == 1 else 'characters'
            raise UserError(f'prompt has {len(lacking)} {characters} that '
                            f"the model's alphabet lacks: {shown} (known: {known!r})")
        return [self.stoi[c] for c in text]

    def token_bytes(self, token: int) -> bytes | None:
        """Return the UTF-8 bytes of an id; None outside the alphabet."""
        text = self.itos.get(int(token))
        return None if text is None else text.encode(errors='replace')


class BPETokenizer(Tokenizer):
    """A byte pair encoding. encoding: a `tiktoken.Encoding`; None = `gpt2_encoding()`. end_of_text:
    the id of '<|endoftext|>', or None."""

    def __init__(self, encoding: Any = None):
        self.encoding = gpt2_encoding() if encoding is None else encoding
        self.vocab_size: int = self.encoding.n_vocab
        has_end = END_OF_TEXT in self.encoding.special_tokens_set
        self.end_of_text: int | None = self.encoding.eot_token if has_end else None

    @functools.cached_property
    def longest(self) -> int:
        """Return the maximum number of characters per id (GPT-2's: 128 spaces)."""
        encoding = self.encoding
        return max(map(len, [*encoding.token_byte_values(), *encoding.special_tokens_set]))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Encode `text`. special: encode '<|endoftext|>' as the special token, as nanoGPT does."""
        allowed = {END_OF_TEXT} & self.encoding.special_tokens_set if special else set()
        return encode_text(self.encoding, text, allowed).tolist()

    def token_bytes(self, token: int) -> bytes | None:
        """Return an id's bytes, possibly partial characters; None outside the vocabulary."""
        try:
            return self.encoding.decode_single_token_bytes(int(token))
        except (KeyError, OverflowError):  # padding (of GPT-2's 50,257 ids to 50,304), negative
            return None


class TextStream:
    """Decodes ids one at a time. The returned strings, joined, equal `decode` of all the ids."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')

    def __call__(self, token: int) -> str:
        """Return the text that `token` completes; '' in the middle of a multi-byte character."""
        data = self.tokenizer.token_bytes(token)
        return self.end() + '\ufffd' if data is None else self.decoder.decode(data)

    def end(self) -> str:
        """Return what is left at the end: '\ufffd' for an incomplete character, otherwise ''."""
        return self.decoder.decode(b'', final=True)

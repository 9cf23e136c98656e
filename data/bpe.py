"""Byte pair encodings learned from a data set's own text, kept in its meta.pkl.

meta.pkl has nanoGPT's keys. The bytes of a token are the Latin-1 characters of its key in `stoi`,
so that tokens of ASCII text are that text, and nanoGPT's own sample.py can read them. The first 256
ids are the bytes, followed by the merges in order (Sennrich et al. 2016; on bytes, GPT-2's), and by
'<|endoftext|>'. Text is split into words by GPT-2's pattern first.
"""
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from config.errors import UserError, shown
from data.gpt2_bpe import END_OF_TEXT, PATTERN, encode_text, gpt2_encoding, valid_text

FEWEST, MOST = 257, 65536  # bytes and '<|endoftext|>'; uint16 ids
# longer words are cut to learn tokens, which takes time that grows with the square of their length
LONGEST_WORD = 1000
LONG_WORD = re.compile(r'(?:[^\W\d_]{%d}|[\d_]{%d}|[^\w\s]{%d}|\s{%d})' % ((LONGEST_WORD,) * 4))


def learn_bpe(texts: Iterable[str], vocab_size: int) -> dict:
    """Learn at most `vocab_size` tokens, 257 to 65,536 (else UserError), from `texts`, and return
    the contents of meta.pkl. Words are split at the ends of the texts, and after LONGEST_WORD
    characters, with a note."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if not FEWEST <= vocab_size <= MOST:
        raise UserError(f'tokenizer=bpe:{vocab_size}: allowed are {FEWEST} to {MOST:,} tokens')
    letters = byte_letters()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(_cut_long_words(map(valid_text, texts)), trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=list(letters.values()), show_progress=False))
    byte_of = {letter: byte for byte, letter in letters.items()}
    ids = tokenizer.get_vocab()
    tokens = [bytes(map(byte_of.get, text)).decode('latin-1') for text in sorted(ids, key=ids.get)]
    tokens = [*map(chr, range(256)), *(token for token in tokens if len(token) > 1), END_OF_TEXT]
    stoi = {token: i for i, token in enumerate(tokens)}
    return {'vocab_size': len(tokens), 'stoi': stoi, 'itos': dict(enumerate(tokens)),
            'tokenizer': 'bpe'}


def _cut_long_words(texts: Iterable[str]) -> Iterator[str]:
    n_cuts = 0
    for text in texts:
        start = 0
        for match in LONG_WORD.finditer(text):
            yield text[start:match.end()]
            start = match.end()
            n_cuts += 1
        yield text[start:]
    if n_cuts:
        print(f'Note: words of more than {LONGEST_WORD:,} characters were cut to learn tokens, in '
              f'{n_cuts:,} places', file=sys.stderr)


def bpe_of(tokenizer: str, texts: Iterable[str]) -> tuple[dict | None, Any]:
    """Return the contents of meta.pkl and the tiktoken.Encoding of a --tokenizer: 'gpt2', which
    needs no meta.pkl (None), or 'bpe:N', learned from `texts`."""
    if tokenizer == 'gpt2':
        return None, gpt2_encoding()
    meta = learn_bpe(texts, int(tokenizer.removeprefix('bpe:')))
    return meta, learned_encoding(meta['stoi'])


def learned_encoding(stoi: dict[str, int]) -> Any:
    """Return the tiktoken.Encoding of a vocabulary that `learn_bpe` made. Raises UserError if it
    lacks a byte, or '<|endoftext|>', or has characters beyond Latin-1."""
    import tiktoken

    try:
        ranks = {token.encode('latin-1'): i for token, i in stoi.items() if token != END_OF_TEXT}
        special = {END_OF_TEXT: stoi[END_OF_TEXT]}
        lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    except (UnicodeEncodeError, KeyError) as error:
        raise UserError(f'the tokens are no byte pair encoding: '
                        f'{type(error).__name__} for {shown(error.args[0])}') from None
    check_ids(stoi)
    if lacking:
        raise UserError(f'the byte pair encoding lacks {len(lacking)} bytes, e.g. {lacking[0]}')
    return tiktoken.Encoding('learned', pat_str=PATTERN, mergeable_ranks=ranks,
                             special_tokens=special)


def check_ids(stoi: dict[str, int]) -> None:
    """Raise UserError if an id is not an int of 32 bits, or there twice: tiktoken would panic."""
    for token, i in stoi.items():
        if type(i) is not int or not 0 <= i < 2 ** 32:
            raise UserError(f'the token {shown(token)} has the id {shown(i)}; allowed are whole '
                            'numbers from 0 to 2**32-1')
    if len(set(stoi.values())) < len(stoi):
        raise UserError('two tokens have the same id')


def encode_documents(encoding: Any, texts: Iterable[str]) -> np.ndarray:
    """Return the ids of the texts, with '<|endoftext|>' after each: (n,) uint16."""
    end, parts = np.array([encoding.eot_token], np.uint16), [np.zeros(0, np.uint16)]
    for text in texts:
        parts += [encode_text(encoding, text), end]
    return np.concatenate(parts)


def byte_letters() -> dict[int, str]:
    """Return the printable character that stands for each byte in GPT-2's vocab.json and in
    Hugging Face's files: itself if visible, otherwise the next one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + i) for i, byte in enumerate(others)}

"""Our tokenizers in Hugging Face's file format (tokenizer.json and its settings)."""
from pathlib import Path

from common.errors import UserError
from data.bpe import END_OF_TEXT, byte_letters
from data.tokenfiles import meta_problem
from data.tokenizer import BPETokenizer, CharTokenizer, load_tokenizer
from interop.huggingface import read_json


def save_tokenizer(tokenizer: CharTokenizer | BPETokenizer, folder: Path, longest: int) -> None:
    """Write the tokenizer's files. longest: the model's maximum number of tokens; 0 = no limit.
    UserError: if transformers is missing."""
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as e:
        raise UserError("saving a tokenizer needs transformers: pip install -e '.[export]'") from e
    if isinstance(tokenizer, BPETokenizer):
        made = byte_pairs(tokenizer.encoding)
        special = dict.fromkeys(('bos_token', 'eos_token', 'unk_token'), END_OF_TEXT)
    else:
        made, special = characters(tokenizer.stoi), {}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False,
                                   model_max_length=longest or int(1e30), **special)
    fast.save_pretrained(folder)


def tokenizer_in(folder: Path, vocab_size: int) -> CharTokenizer | BPETokenizer | None:
    """Return the tokenizer written by `save_tokenizer`: characters, or a learned BPE; None for any
    other, GPT-2's included. UserError: if the file is damaged, or has ids that are not below
    vocab_size (the model's)."""
    path = folder / 'tokenizer.json'
    document = read_json(path) if path.exists() else {}
    try:
        tokenizer = _tokenizer_of(document)
    except UserError as e:
        raise UserError(f'{path}: {e}') from e
    if tokenizer and tokenizer.vocab_size > vocab_size:
        raise UserError(f'{path} has ids up to {tokenizer.vocab_size - 1}, but the model has '
                        f'{vocab_size} tokens')
    return tokenizer


def _tokenizer_of(document: dict) -> CharTokenizer | BPETokenizer | None:
    model = document.get('model')
    stoi = model.get('vocab') if isinstance(model, dict) else None
    if not isinstance(stoi, dict) or not all(type(i) is int for i in stoi.values()):
        return None
    if model.get('type') == 'WordLevel' and all(len(c) == 1 for c in stoi):
        return _checked({'stoi': stoi})
    letters = {letter: chr(byte) for byte, letter in byte_letters().items()}
    ours = model.get('type') == 'BPE' and letters.keys() >= set(''.join(stoi))
    added = document.get('added_tokens')
    added = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    ends = [each.get('id') for each in added if each.get('content') == END_OF_TEXT]
    if not ours or len(stoi) >= 50256 or not ends:
        return None
    stoi = {''.join(letters[c] for c in token): i for token, i in stoi.items()}
    return _checked({'stoi': stoi | {END_OF_TEXT: ends[-1]}, 'tokenizer': 'bpe'})


def _checked(meta: dict) -> CharTokenizer | BPETokenizer:
    """The tokenizer of a meta.pkl with this `stoi`. UserError: if its ids are not valid."""
    itos = {i: token for token, i in meta['stoi'].items() if type(i) is int}
    meta |= {'itos': itos, 'vocab_size': max(itos, default=0) + 1, 'dtype': 'uint32'}
    if problem := meta_problem(meta):
        raise UserError(problem)
    return load_tokenizer(meta)


def characters(stoi: dict[str, int]):
    """A tokenizers.Tokenizer with an id per character; any other is an error, as in ours."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    # the unknown token must not be in the vocabulary, whose tokens are single characters
    tokenizer = Tokenizer(models.WordLevel(stoi, unk_token='[UNK]'))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), behavior='isolated')
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def byte_pairs(encoding):
    """Convert a tiktoken.Encoding with GPT-2's word splitting to a tokenizers.Tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    letters = byte_letters()
    ranks, special = encoding._mergeable_ranks, encoding._special_tokens

    def text(token: bytes) -> str:
        return ''.join(letters[b] for b in token)

    merges = [tuple(map(text, merge_of(token, ranks)))
              for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    tokenizer = Tokenizer(models.BPE({text(token): i for token, i in ranks.items()}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's pattern
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True)
                                  for name in sorted(special, key=special.get)])
    return tokenizer


def merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that merge into `token`, after earlier merges. UserError: if none do."""
    parts, own = [token[i:i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 2:
        pairs = [a + b for a, b in zip(parts, parts[1:])]
        rank, i = min((ranks.get(pair, own), i) for i, pair in enumerate(pairs))
        if rank >= own:
            raise UserError(f'token {token!r} of the vocabulary is not made by merging two others')
        parts[i:i + 2] = [pairs[i]]
    return parts[0], parts[1]

"""Our tokenizers as the files that Hugging Face reads: tokenizer.json and what says how to load it; and back."""
from pathlib import Path

from config.errors import UserError
from data.gpt2_bpe import END_OF_TEXT
from data.tokenizer import CharTokenizer, GPT2Tokenizer
from interop.huggingface import read_json


def save_tokenizer(tokenizer: CharTokenizer | GPT2Tokenizer, folder: Path, longest: int) -> None:
    """Write the tokenizer's files into `folder`. longest: the most tokens that the model takes; 0 = any number.

    Raises:
        UserError: a package is missing.
    """
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as e:
        raise UserError("the tokenizer's files need transformers: pip install -e '.[export]'") from e
    gpt2 = isinstance(tokenizer, GPT2Tokenizer)
    special = {name: END_OF_TEXT for name in ('bos_token', 'eos_token', 'unk_token')} if gpt2 else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_pairs(tokenizer.encoding) if gpt2 else characters(tokenizer.stoi),
                                   clean_up_tokenization_spaces=False, model_max_length=longest or int(1e30), **special)
    fast.save_pretrained(folder)


def characters(stoi: dict[str, int]):
    """A tokenizers.Tokenizer with an id for each character; others are an error, as with ours."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    tokenizer = Tokenizer(models.WordLevel(stoi, unk_token=_absent(stoi)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), behavior='isolated')
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def tokenizer_in(folder: Path) -> CharTokenizer | None:
    """The characters that `save_tokenizer` wrote, if it did.

    Raises:
        UserError: tokenizer.json cannot be read.
    """
    path = folder / 'tokenizer.json'
    model = read_json(path).get('model') if path.is_file() else None
    stoi = model.get('vocab') if isinstance(model, dict) and model.get('type') == 'WordLevel' else None
    if not isinstance(stoi, dict) or not all(len(c) == 1 and type(i) is int for c, i in stoi.items()):
        return None
    return CharTokenizer(stoi, {i: c for c, i in stoi.items()})


def _absent(stoi) -> str:
    """A name that no token has: what is unknown must not become another character."""
    name = '[UNK]'
    while name in stoi:
        name += '?'
    return name


def byte_pairs(encoding):
    """A tokenizers.Tokenizer of a tiktoken.Encoding of GPT-2's kind (its splitting into words, its special tokens)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    letter = byte_letters()
    ranks = encoding._mergeable_ranks

    def text(token: bytes) -> str:
        return ''.join(letter[b] for b in token)
    merges = [tuple(map(text, merge_of(token, ranks))) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    tokenizer = Tokenizer(models.BPE({text(token): i for token, i in ranks.items()}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # its pattern is GPT-2's
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in sorted(
        encoding._special_tokens, key=encoding._special_tokens.get)])
    return tokenizer


def byte_letters() -> dict[int, str]:
    """The printable character that stands for each byte in the vocabularies of GPT-2 and its kind."""
    plain = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens whose merging makes `token`: what is left of its bytes when all merges before it have been done."""
    parts, own = [token[i:i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 2:
        best, at = min((ranks.get(a + b, own), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))
        if best >= own:
            raise UserError(f'token {token!r} of the vocabulary is not made by merging two others')
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]

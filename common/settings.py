"""Settings that several programs share. A program's own stand at the top of its script:

    @dataclass(frozen=True)
    class Settings(Sampling, Device):
        max_new_tokens: int = key(500, 'tokens to generate per sample')

`configurator.parse` reads them from config files and the command line, and makes `--help` of them.
"""
import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

from common.gpt_config import GPTConfig

STORED_DTYPES = ('float32', 'bfloat16', 'float16', 'int8', 'int4')
KV_DTYPES = ('auto', *STORED_DTYPES)
GPT2_TYPES = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # OpenAI's, on the Hugging Face hub
GPT2_FOLDER = "a Hugging Face GPT-2 (config.json and *.safetensors)"
COMMAND_LINE = 'command line'


def key(default, meaning: str, choices=(), *, folder: str = '', others=()):
    """A setting of its default's type, which is therefore never None.

    meaning: its description in `--help`. choices: the allowed values; () = any. folder: the file
    that a folder must have in it to be accepted as a value, too. others: values that only other
    programs know; in a config file, which programs share, they are ignored.
    """
    metadata = dict(meaning=meaning, choices=choices, folder=folder, others=others)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Base:
    """What all settings have. They are read-only: `dataclasses.replace` makes changed ones.

    given: for each key set by a flag or file, COMMAND_LINE or the name of the file, whichever was
    last. hidden: fields that the program sets by itself.
    """
    given: dict = field(default_factory=dict, repr=False, compare=False)
    hidden: ClassVar[tuple] = ('given',)

    def asked(self, name: str) -> str:
        """A given key and its value as the user wrote them, for messages."""
        value, source = getattr(self, name), self.given[name]
        return f'--{name}={value}' if source == COMMAND_LINE else f'{name}={value!r} in {source}'

    def values(self) -> dict:
        """{key: value}."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)
                if f.name not in self.hidden}


@dataclass(frozen=True)
class Seed(Base):
    seed: int = key(1337, 'seed of every random number generator')


@dataclass(frozen=True)
class OutDir(Seed):
    out_dir: str = key('out', 'folder of the checkpoint (ckpt.pt) and metrics.jsonl')


@dataclass(frozen=True)
class Json(Base):
    json: bool = key(False, 'end with one JSON document on the last line')


@dataclass(frozen=True)
class Device(Base):
    device: str = key('auto', "'cpu', 'cuda', 'cuda:1', 'mps'; 'auto' = CUDA, else MPS, else CPU")
    dtype: str = key('auto', "compute dtype: 'auto' = bfloat16 (else float16) on CUDA, else "
                     "float32. In training on a CPU 'auto' uses C++ kernels, and bfloat16 if the "
                     'processor multiplies it', ('auto', 'float32', 'bfloat16', 'float16'))


@dataclass(frozen=True)
class Attention(Base):
    attention_backend: str = key(
        'auto', "attention over sequences: 'sdpa' (torch), 'flex' (FlexAttention, CUDA), 'varlen' "
        "(torch's FlashAttention, CUDA), 'flash_attn' (its package), 'math' (slow), 'auto' = best",
        ('auto', 'sdpa', 'flex', 'flash_attn', 'varlen', 'math'))


@dataclass(frozen=True)
class Inference(Base):
    kv_dtype: str = key('auto', "dtype of the KV cache; 'auto' = compute dtype", KV_DTYPES)
    weight_dtype: str = key('auto', "weight matrices: 'auto' = dtype, 'int8', 'int4' "
                            '(docs/decoding.md)', ('auto', 'int8', 'int4'))
    int4_group: int = key(32, "with weight_dtype='int4': columns that share a scale")
    native: bool = key(True, 'on a CPU: decode with the C++ extension, compiled on first use')
    captured: bool = key(True, 'on CUDA: run decode steps as CUDA graphs (from 32 tokens on)')


@dataclass(frozen=True)
class Sampling(Base):
    temperature: float = key(0.8, 'divides the logits: below 1 safer, above 1 bolder, 0 = greedy')
    top_k: int = key(200, 'sample only from the k most likely tokens; 0 = all')
    top_p: float = key(1.0, 'sample from the likeliest tokens of this total probability; 1 = all')


@dataclass(frozen=True)
class Data(Base):
    dataset: str = key('openwebtext', 'folder under data/; prepared on first use if possible')
    recall_task: str = key('distances=3,16,47', "with dataset='recall': distances of the answers "
                           '(other fields: data/recall/tasks.py, such as n_tokens=32)')
    lookup_task: str = key('pairs=2,4,8,16', "with dataset='lookup': numbers of facts in a "
                           'sequence (other fields: data/recall/tasks.py, such as gap=32)')


MODEL = tuple(f.name for f in dataclasses.fields(GPTConfig) if f.name != 'vocab_size')
# nanoGPT's train.py turns GPT-2's biases off, GPTConfig has them on
_shape = [(f.name, f.type, key(f.default if f.name != 'bias' else False, f.metadata['meaning'],
                               f.metadata['choices']))
          for f in dataclasses.fields(GPTConfig) if f.name in MODEL]


@dataclass(frozen=True)
class Model(dataclasses.make_dataclass('Shape', _shape, bases=(Base,), frozen=True)):
    """The fields of `GPTConfig`, except vocab_size, which comes from the data set."""

    def config(self, vocab_size: int) -> GPTConfig:
        """The config of a new model. UserError: if settings contradict each other."""
        return GPTConfig(vocab_size=vocab_size, **{name: getattr(self, name) for name in MODEL})

    def given_fields(self) -> dict:
        """The fields of the model that a flag or file has set."""
        return {name: getattr(self, name) for name in MODEL if name in self.given}


@dataclass(frozen=True)
class Running(Device, Inference, Model):
    """Where a trained model runs, and its shape if there is no checkpoint."""
    compile: bool = key(False, 'torch.compile the MLPs')
    dataset: str = key('shakespeare_works', 'whose alphabet to use if no checkpoint names one')


@dataclass(frozen=True)
class Source(OutDir):
    """Which model a program runs."""
    init_from: str = key('resume', "'resume' (from out_dir), 'random' weights, or GPT-2's weights",
                         ('resume', 'random') + GPT2_TYPES, folder=GPT2_FOLDER,
                         others=('scratch',))
    resume_from: str = key('ckpt.pt', "with 'resume': checkpoint in out_dir, as ckpt_best.pt")


@dataclass(frozen=True)
class Talking(Source):
    user: str = key('', "your name (role 'user'); '' = USER, or ROMEO in Shakespeare")
    reply_as: str = key('', "the model's (role 'assistant'); '' = MODEL, or JULIET in Shakespeare")
    turn: str = key('{name}.\n{text}\n\n', 'form of a turn; what follows {text} ends a reply')

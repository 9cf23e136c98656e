"""A ladder: rows that each change one thing, read from a config and checked before anything is trained.

    base = 'config/train_vanilla.py'                       # what the first row trains with
    rows = {                                               # each row builds on the one above it
        'vanilla GPT-2': {},
        '+ RoPE': dict(pos_embedding='rope'),
        '+ int8 KV': dict(kv_dtype='int8'),                # at inference: the weights of the row above
    }
    side_rows = {                                          # alternatives: each names the row that it departs from
        'MQA': ('+ RoPE', dict(n_kv_head=1)),
    }

A row changes keys of train.py, and five of its own:
    kv_dtype       storage of the cache that the row is judged through: 'auto', 'float32', 'bfloat16', 'float16', 'int8'
    weight_dtype   'int8': it is judged, and timed, with weights and activations in int8
    at_inference   model settings that change after training only, such as dict(share_global_kv=True): shows the mismatch
    converted_from name of a row whose trained weights are converted (interop/convert.py) to this one's, to be trained on
    seeds          '1,2,3': this row's, whatever those of the others are (not of rows that build on it)
mlp_hidden='match' widens or narrows the MLPs to as many parameters as the first row has.
"""
import dataclasses
import hashlib
import json
import re
import shlex
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

import configurator
from config.errors import UserError, at_least
from config.gpt_config import GPTConfig
from config.schema import ABLATE, KV_DTYPES, MODEL, TRAIN
from data.datasets import DATA_ROOT
from data.tokenfiles import open_split
from interop.convert import MEMORY, check_conversion
from kv.plan import plan_kv
from lab.benchmarks.setting import MIN_REPEATS, numbers
from model import GPT
from training.batches import RECALL, open_meta
from training.checkpoint import tokens_id

NOT_TRAINED = {'kv_dtype', 'weight_dtype', 'at_inference', 'seeds'}  # what may change without another training
OWN = (*NOT_TRAINED, 'converted_from')  # a row's keys that train.py does not have
# keys of train.py that say where a run is and what it prints, not what it computes
PLACE = ('out_dir', 'resume_from', 'seed', 'data_seed', 'max_skipped', 'chunked_loss', 'recompute', 'checkpoint_blocks',
         'device', 'attention_backend', 'wandb_log', 'wandb_project', 'wandb_run_name', 'tensorboard_log',
         'keep_checkpoints', 'checkpoint_interval', 'log_interval', 'memory_report', 'memory_budget', 'eval_only', 'backend',
         'always_save_checkpoint', 'eval_interval', 'eval_iters')
DATA = ('dataset', 'block_size', 'recall_task')  # what losses are taken over
MATCH = 'match'
WEIGHT_DTYPES = 'auto', 'int8'


@dataclass(frozen=True)
class Row:
    """One row. `above` is the row that it departs from ('' for the first), `changes` what it changes there; `train`,
    `kv_dtype`, `weight_dtype` and `at_inference` add up all changes from the first row on."""
    name: str
    above: str
    side: bool
    changes: dict = field(hash=False)
    train: dict = field(hash=False)
    kv_dtype: str = 'auto'
    weight_dtype: str = 'auto'
    at_inference: dict = field(default_factory=dict, hash=False)
    converted_from: str = ''
    seeds: str = ''

    @property
    def slug(self) -> str:
        """The row's name as a file name: '+ KV shared by 2/3' -> 'kv-shared-by-2-3'."""
        return slug_of(self.name)


def slug_of(name: str) -> str:
    return re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-')


class Ladder:
    """The rows of one config, with what they share.

    Args:
        s: the settings of program 'ablate'.
    Raises:
        UserError: a row that names no row, changes nothing or something that there is not, or makes no model.
    """

    def __init__(self, s):
        self.s = s
        if not s.base or not s.rows:
            raise UserError("a ladder needs base='config/....py' and rows={name: changes}: "
                            'see config/ablate_shakespeare.py')
        mine = {key.name for key in ABLATE}
        self.common = {name: getattr(s, name) for name in sorted(s.given) if name not in mine}
        self.rows: dict[str, Row] = {}
        self._settings, self._vocab_sizes = {}, {}
        above = ''
        for name, changes in s.rows.items():
            self._add(name, above, changes, side=False)
            above = name
        for name, entry in s.side_rows.items():
            if not (isinstance(entry, tuple | list) and len(entry) == 2):
                raise UserError(f'side_rows[{name!r}]={entry!r}: must be (name of the row it departs from, changes)')
            if entry[0] not in self.rows:
                raise UserError(f"side_rows[{name!r}]: there is no row {entry[0]!r} before it; there are "
                                f"{', '.join(map(repr, self.rows))}")
            self._add(name, *entry, side=True)
        self.first = next(iter(self.rows))
        self.baseline = s.baseline or self.first
        if self.baseline not in self.rows:
            raise UserError(f"baseline={s.baseline!r}: there is no such row; there are {', '.join(map(repr, self.rows))}")
        self._check_slugs()

    def _add(self, name, above, changes, side):
        before = self.rows.get(above)
        self._check_changes(name, above, changes)
        train = dict(before.train if before else {}) | {k: v for k, v in changes.items() if k not in OWN}
        stored = {}
        for key, allowed in (('kv_dtype', KV_DTYPES), ('weight_dtype', WEIGHT_DTYPES)):
            stored[key] = changes.get(key, getattr(before, key) if before else 'auto')
            if stored[key] not in allowed:
                raise UserError(f"row {name!r}: {key}={stored[key]!r}: allowed are "
                                f"{', '.join(map(repr, allowed))}")
        at_inference = dict(before.at_inference if before else {}) | changes.get('at_inference', {})
        origin = changes.get('converted_from', before.converted_from if before else '')
        if before and before.converted_from and 'converted_from' not in changes and changes.keys() - NOT_TRAINED:
            raise UserError(f"row {name!r} is to be trained, but {above!r} above it begins with the weights of {origin!r}: say "
                            f"converted_from={origin!r} here too, or converted_from='' for training from scratch")
        if origin and origin not in self.rows:
            raise UserError(f"row {name!r}: converted_from={origin!r}: there is no such row before it; there are "
                            f"{', '.join(map(repr, self.rows))}")
        changes = dict(changes)
        seeds = changes.pop('seeds', '')
        self.rows[name] = Row(name, above, side, changes, train, **stored,
                              at_inference=at_inference, converted_from=origin, seeds=seeds)

    def _check_changes(self, name, above, changes):
        if not isinstance(name, str) or not name.isprintable() or name in self.rows:
            raise UserError(f'row {name!r}: ' + ('is there twice' if name in self.rows else 'a name must be text, in one line'))
        if not isinstance(changes, dict) or not isinstance(changes.get('at_inference', {}), dict):
            raise UserError(f"row {name!r}: {'at_inference' if isinstance(changes, dict) else 'changes'} must be a dict, "
                            f"not {changes.get('at_inference') if isinstance(changes, dict) else changes!r}")
        if not changes and above:
            raise UserError(f'row {name!r} changes nothing against {above!r}')
        for key in changes:
            if key in (*PLACE, *DATA, 'init_from') and key not in ('eval_interval', 'eval_iters', 'recompute'):
                raise UserError(f'row {name!r}: {key} is the same for all rows: set it in the ladder or its base config')
        if not isinstance(changes.get('seeds', ''), str):
            raise UserError(f"row {name!r}: seeds={changes['seeds']!r}: must be text, as '1,2,3'")
        if changes.get('mlp_hidden') == MATCH and not above:
            raise UserError(f"row {name!r}: mlp_hidden='match' matches the first row, which this is")

    def _check_slugs(self):
        seen = {}
        for row in self.rows.values():
            if not row.slug or row.slug in seen:
                raise UserError(f'row {row.name!r}: ' + (f'its file name would be that of {seen[row.slug]!r}' if row.slug
                                                         else 'needs a name with letters (of ASCII) or digits'))
            seen[row.slug] = row.name

    def check(self) -> None:
        """Every row's settings and model, so that a mistake in the last row shows before the first is trained."""
        s = self.s
        at_least(s, jobs=1, eval_windows=0, **({'repeats': MIN_REPEATS} if s.speed else {}))
        numbers('contexts', s.contexts), numbers('batch_sizes', s.batch_sizes)
        for row in self.rows.values():
            self.seeds(row)
            try:
                with warnings.catch_warnings():  # a row may well be there to show what is warned of
                    warnings.simplefilter('ignore')
                    plan_kv(self.trained_config(row))
                    plan_kv(self.config(row, s.shape))
                    plan_kv(self.config(row))
                    if row.at_inference:
                        check_conversion(self.trained_config(row), self.config(row))
                    if row.converted_from:
                        check_conversion(self.trained_config(self.rows[row.converted_from]), self.trained_config(row))
            except (UserError, ValueError, TypeError) as e:
                raise UserError(f'row {row.name!r}: {e}') from e

    def seeds(self, row: Row) -> list[int]:
        """A row's own; those of side rows, if there are any; those of all."""
        if row.seeds:
            return whole_numbers(f'row {row.name!r}: seeds', row.seeds)
        return whole_numbers('side_seeds', self.s.side_seeds) if row.side and self.s.side_seeds else \
            whole_numbers('seeds', self.s.seeds)

    def depth(self, row: Row) -> int:
        """How many conversions its weights have behind them."""
        return 1 + self.depth(self.rows[row.converted_from]) if row.converted_from else 0

    # -- what a row trains ------------------------------------------------------------------------------------------------

    def arguments(self, row: Row, seed: int | None = None) -> list[str]:
        """train.py's command line, without the folder."""
        return self._flags(row, {}) + ([] if seed is None else [f'--seed={seed}', f'--data_seed={seed}'])

    def command(self, row: Row, seed: int) -> str:
        """What trains it, for people."""
        train = shlex.join(['python', 'train.py', *self.arguments(row, seed)])
        if not row.converted_from:
            return train
        memory = {name: getattr(self.trained_config(row), name) for name in MEMORY}
        convert = shlex.join(['python', '-m', 'interop.convert', 'FROM', 'TO', *(f'--{k}={v}' for k, v in memory.items())])
        return f'{convert} && {train} --out_dir=TO --init_from=resume'

    def settings(self, row: Row, shape: dict | None = None):
        """train.py's settings, in another `shape` of the model if one is given; the seed is that of none of its runs."""
        key = row.name, json.dumps(shape or {}, sort_keys=True)
        if key not in self._settings:
            self._settings[key] = configurator.parse('train', self._flags(row, shape or {}), echo=False)
        return self._settings[key]

    def training(self, row: Row) -> str:
        """Rows with the same one are judged on the same weights: a digest of every setting that the weights depend on and that
        is not the default, so that it stays as it is when train.py gets another key."""
        default = {key.name: key.default for key in TRAIN}
        what = {name: value for name, value in self.weighty(row).items() if value != default[name]}
        what['data'] = self._data_id(self.settings(row))
        return digest([what, self.training(self.rows[row.converted_from])] if row.converted_from else what)

    def weighty(self, row: Row) -> dict:
        """The settings that the weights depend on, but for the seed."""
        s = vars(self.settings(row))
        return {name: value for name, value in s.items() if name not in PLACE
                and (name != 'recall_task' or s['dataset'] == RECALL)}

    def fingerprint(self, row: Row) -> str:
        """Of all that a row's figures depend on: results with another one are of another row."""
        return digest([self.training(row), row.kv_dtype, row.at_inference, self.s.eval_windows,
                       *[row.weight_dtype] * (row.weight_dtype != 'auto')])

    def trainer(self, row: Row) -> Row:
        """The first row with the same weights: runs carry its name."""
        return next(other for other in self.rows.values() if self.training(other) == self.training(row))

    def _flags(self, row, shape) -> list[str]:
        changes = self.common | row.train | shape
        if changes.get('mlp_hidden') == MATCH:
            changes['mlp_hidden'] = self._matching_mlp(row, shape)
        return [self.s.base, *(f'--{name}={value}' for name, value in changes.items())]

    def _matching_mlp(self, row, shape) -> int:
        """The multiple of 8 at which the parameters come closest to the first row's (positions not counted)."""
        one, two = (parameters(self.trained_config(row, shape | {'mlp_hidden': width})) for width in (8, 16))
        target = parameters(self.trained_config(self.rows[self.first], shape))
        return 8 * max(1, round((target - one) / (two - one)) + 1)

    def _data_id(self, s) -> str:
        """Which tokens a run sees: prepared anew from other text, a data set is another one."""
        if s.dataset == RECALL:
            return RECALL
        return f"{tokens_id(open_meta(s, DATA_ROOT))}, {len(open_split(DATA_ROOT / s.dataset, 'train')):,} tokens"

    # -- the models -------------------------------------------------------------------------------------------------------

    def trained_config(self, row: Row, shape: dict | None = None) -> GPTConfig:
        """The model that is trained."""
        return self._config_of(self.settings(row, shape))

    def config(self, row: Row, shape: dict | None = None) -> GPTConfig:
        """The model as it is used: without dropout, and with what changes after training."""
        return dataclasses.replace(self.trained_config(row, shape), dropout=0.0, **row.at_inference)

    def _config_of(self, s) -> GPTConfig:
        data = s.dataset, s.recall_task
        if data not in self._vocab_sizes:
            meta = open_meta(s, DATA_ROOT)
            self._vocab_sizes[data] = 50304 if meta is None else meta['vocab_size']
        return GPTConfig(vocab_size=self._vocab_sizes[data], **{key.name: getattr(s, key.name) for key in MODEL})


def digest(what) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def parameters(config: GPTConfig) -> int:
    """Of the model, positions not counted; nothing is allocated."""
    with torch.device('meta'):
        return GPT(config).get_num_params()


def whole_numbers(name: str, text: str) -> list[int]:
    """'1,2,3' -> [1, 2, 3]. Raises UserError for anything else."""
    try:
        return [int(piece) for piece in text.split(',')]
    except ValueError:
        raise UserError(f"{name}={text!r}: must be whole numbers with commas between, as '1,2,3'") from None


def read_ladder(argv: list[str], usage: str = '', echo: bool = True):
    """(settings, ladder) from the command line of ablate.py, checked."""
    s = configurator.parse('ablate', argv, usage=usage, echo=echo)
    s.name = s.name or next((Path(arg).stem for arg in argv if not arg.startswith('-')), '')
    if not re.fullmatch(r'[A-Za-z0-9_.-]+', s.name) or s.name.startswith('.'):
        raise UserError(f'name={s.name!r}: must be letters, digits, - _ and dots, for it names folders')
    ladder = Ladder(s)
    ladder.check()
    return s, ladder


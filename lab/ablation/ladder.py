"""A ladder of models: rows that each change one thing, read from a config and checked before
anything is trained. See docs/ablations.md for the format.
"""
import dataclasses
import hashlib
import json
import re
import shlex
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import configurator
import train
from common.errors import UserError, at_least
from common.gpt_config import GPTConfig
from common.settings import KV_DTYPES, Json, key
from data.datasets import DATA_ROOT
from data.recall.tasks import TASKS
from data.tokenfiles import open_split
from engine.weights.quantize import n_parameters
from training.checkpoint.convert import check_conversion
from kv.plan import plan_kv
from lab.benchmarks.setting import numbers
from training.checkpoint.file import tokens_id
from training.loop.batches import open_meta

OWN = ('kv_dtype', 'weight_dtype', 'at_inference', 'seeds')  # a row's keys that train.py lacks
# keys of train.py that do not change the weights
PLACE = ('out_dir resume_from seed data_seed max_skipped chunked_loss recompute device backend '
         'attention_backend wandb_log wandb_project wandb_run_name tensorboard_log eval_only '
         'log_interval memory_report checkpoint_interval always_save_checkpoint eval_interval '
         'eval_iters').split()
# losses are comparable only where these are equal
DATA = ('dataset', 'block_size', *(f'{name}_task' for name in TASKS))
SAME_FOR_ALL = {*PLACE, *DATA, 'init_from'} - {'eval_interval', 'eval_iters', 'recompute'}
MATCH = 'match'
STORAGE = {'kv_dtype': KV_DTYPES, 'weight_dtype': ('auto', 'int8')}

@dataclass(frozen=True)
class Settings(Json, train.Settings):
    """Those of the ladder; the others are train.py's, for all rows."""
    hidden: ClassVar[tuple] = ('given', 'seed', 'out_dir', 'init_from', 'resume_from', 'eval_only',
                               'backend', 'memory_report')
    name: str = key('', "name of the ladder; '' = that of its config file")
    folder: str = key('', "folder of results, with the models in runs/; '' = results/NAME")
    base: str = key('', 'training config of the first row')
    rows: dict = key({}, 'the ladder: name -> changes against the row above (keys of train.py, '
                     'kv_dtype, weight_dtype or at_inference)')
    side_rows: dict = key({}, 'alternatives: name -> (name of the row before, changes)')
    baseline: str = key('', 'row to compare with, beside the first: best at full memory')
    seeds: str = key('1,2,3', 'training seeds of the rows')
    side_seeds: str = key('', "training seeds of the side rows; '' = seeds")
    only: str = key('', "train only these rows, as 'MQA,+ windows'; a leading '+' may be omitted")
    jobs: int = key(1, 'concurrent runs on each device')
    devices: str = key('', "where to train, as 'cuda:0,cuda:1'; '' = device")
    eval_windows: int = key(0, 'validation windows per model; 0 = all that do not overlap')
    identifiers: bool = key(False, 'the data are Python source: measure the loss of identifiers, '
                            'by the distance to their last use')
    contexts: str = key('256,1024,4096', 'tokens in the cache for KV bytes')
    pictures: bool = key(True, 'draw the plots of the report (needs matplotlib)')
    dry_run: bool = key(False, 'only print what would be trained')
    report_only: bool = key(False, 'make the report of existing results; train and measure nothing')


@dataclass(frozen=True)
class Row:
    """One row. `above` is the row that it is based on ('' for the first), `changes` its own
    changes; `train`, `kv_dtype`, `weight_dtype` and `at_inference` accumulate all changes since the
    first row."""
    name: str
    above: str
    side: bool
    changes: dict = field(hash=False)
    train: dict = field(hash=False)
    kv_dtype: str = 'auto'
    weight_dtype: str = 'auto'
    at_inference: dict = field(default_factory=dict, hash=False)
    seeds: str = ''

    @property
    def slug(self) -> str:
        return slug_of(self.name)


def slug_of(name: str) -> str:
    """Turn a row's name into a file name: '+ KV shared by 2/3' -> 'kv-shared-by-2-3'."""
    return re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-')


class Ladder:
    """The rows of a config, and the training runs they need.

    Raises UserError if a row is based on an unknown row, changes nothing or an unknown key, or
    its model is invalid.
    """

    def __init__(self, s):
        self.s = s
        if not s.base or not s.rows:
            raise UserError("a ladder needs base='config/....py' and rows={name: changes}: "
                            'see config/ablate_prices.py')
        of_train = configurator.keys_of(train.Settings)
        self.common = {name: getattr(s, name) for name in sorted(s.given) if name in of_train}
        self.rows: dict[str, Row] = {}
        self._settings = {}
        for above, name in zip(['', *s.rows], s.rows):
            self._add(name, above, s.rows[name], side=False)
        for name, entry in s.side_rows.items():
            if not (isinstance(entry, tuple | list) and len(entry) == 2):
                raise UserError(f'side_rows[{name!r}]={entry!r}: must be (name of the row it '
                                'departs from, changes)')
            self._check_known(entry[0], f'side_rows[{name!r}]: there is no row {entry[0]!r} before '
                                        'it; there are')
            self._add(name, *entry, side=True)
        self.first = next(iter(self.rows))
        self.baseline = s.baseline or self.first
        self._check_known(self.baseline,
                          f'baseline={s.baseline!r}: there is no such row; there are')

    def _check_known(self, name, message):
        if name not in self.rows:
            raise UserError(f"{message} {', '.join(map(repr, self.rows))}")

    def _add(self, name, above, changes, side):
        self._check_changes(name, above, changes)
        before = self.rows.get(above) or Row('', '', False, {}, {})
        of_train = before.train | {k: v for k, v in changes.items() if k not in OWN}
        stored = {setting: changes.get(setting, getattr(before, setting)) for setting in STORAGE}
        for setting, value in stored.items():
            if value not in STORAGE[setting]:
                allowed = ', '.join(map(repr, STORAGE[setting]))
                raise UserError(f'row {name!r}: {setting}={value!r}: allowed are {allowed}')
        row = Row(name, above, side, {k: v for k, v in changes.items() if k != 'seeds'}, of_train,
                  **stored, seeds=changes.get('seeds', ''),
                  at_inference=before.at_inference | changes.get('at_inference', {}))
        for other in self.rows.values():
            if other.slug == row.slug:
                raise UserError(f'row {name!r}: its file name would be that of {other.name!r}')
        self.rows[name] = row

    def _check_changes(self, name, above, changes):
        def check(ok, message):
            if not ok:
                raise UserError(f'row {name!r}{message}')
        check(name not in self.rows, ': is there twice')
        check(changes or not above, f' changes nothing against {above!r}')
        for changed in changes:
            check(changed not in SAME_FOR_ALL,
                  f': {changed} is the same for all rows: set it in the ladder or its base config')
        check(above or changes.get('mlp_hidden') != MATCH,
              ": mlp_hidden='match' matches the first row, which this is")

    def check(self) -> None:
        """Check every row's settings and model, so that a mistake in the last row is reported
        before the first one is trained."""
        s = self.s
        at_least(s, jobs=1, eval_windows=0)
        numbers('contexts', s.contexts)
        if s.identifiers and self.settings(self.rows[self.first]).dataset in TASKS:
            raise UserError('identifiers=True: the data must be Python source')
        for row in self.rows.values():
            self.seeds(row)
            try:
                with warnings.catch_warnings():  # a row may be there to show that very effect
                    warnings.simplefilter('ignore')
                    trained, config = self.trained_config(row), self.config(row)
                    plan_kv(trained)
                    plan_kv(config)
                    if row.at_inference:
                        check_conversion(trained, config)
            except (UserError, ValueError, TypeError) as e:
                raise UserError(f'row {row.name!r}: {e}') from e

    def seeds(self, row: Row) -> list[int]:
        """The row's own seeds; by default those of side rows for a side row, or of all rows."""
        if row.seeds:
            return numbers(f'row {row.name!r}: seeds', row.seeds, least=0)
        name = 'side_seeds' if row.side and self.s.side_seeds else 'seeds'
        return numbers(name, getattr(self.s, name), least=0)

    def arguments(self, row: Row, seed: int) -> list[str]:
        """train.py's arguments, without out_dir."""
        return [*self._flags(row), f'--seed={seed}', f'--data_seed={seed}']

    def command(self, row: Row, seed: int) -> str:
        """The shell command that trains the row, for the report."""
        return shlex.join(['python', 'train.py', *self.arguments(row, seed)])

    def settings(self, row: Row):
        """train.py's settings, without a seed."""
        if row not in self._settings:
            self._settings[row] = configurator.parse(train.Settings, self._flags(row), echo=False)
        return self._settings[row]

    def training(self, row: Row) -> str:
        """A digest of the settings that determine the weights, equal for rows that share them.
        Defaults are omitted, so that a new key of train.py does not change it."""
        default = train.Settings().values()
        settings = {name: value for name, value in self.weighty(row).items()
                    if value != default[name]}
        s = self.settings(row)
        settings['data'] = s.dataset
        if s.dataset not in TASKS:  # its tokens change if it is prepared from different text
            n_tokens = len(open_split(DATA_ROOT / s.dataset, 'train'))
            settings['data'] = f'{tokens_id(open_meta(s, DATA_ROOT))}, {n_tokens:,} tokens'
        return digest(settings)

    def weighty(self, row: Row) -> dict:
        """The settings that determine the weights, except for the seed."""
        settings = self.settings(row).values()
        others = {f'{name}_task' for name in TASKS if name != settings['dataset']}
        return {name: value for name, value in settings.items() if name not in {*PLACE, *others}}

    def fingerprint(self, row: Row) -> str:
        """Return a digest of everything that a row's results depend on."""
        weights = [row.weight_dtype] if row.weight_dtype != 'auto' else []
        identifiers = ['identifiers'] if self.s.identifiers else []
        return digest([self.training(row), row.kv_dtype, row.at_inference, self.s.eval_windows,
                       *weights, *identifiers])

    def trainer(self, row: Row) -> Row:
        """Return the first row with the same weights; their runs are named after it."""
        training = self.training(row)
        return next(other for other in self.rows.values() if self.training(other) == training)

    def _flags(self, row) -> list[str]:
        changes = self.common | row.train
        if changes.get('mlp_hidden') == MATCH:
            changes['mlp_hidden'] = self._matching_mlp(row)
        return [self.s.base, *(f'--{name}={value}' for name, value in changes.items())]

    def _matching_mlp(self, row) -> int:
        """Return the MLP width, a multiple of 8, that comes closest to the first row's number of
        parameters (without position embeddings)."""
        one, two = (n_parameters(self.trained_config(
            dataclasses.replace(row, train=row.train | {'mlp_hidden': width})), False)
            for width in (8, 16))
        target = n_parameters(self.trained_config(self.rows[self.first]), False)
        return 8 * max(1, round((target - one) / (two - one)) + 1)

    def trained_config(self, row: Row) -> GPTConfig:
        """The config of the model during training."""
        s = self.settings(row)
        meta = open_meta(s, DATA_ROOT)
        return s.config(50304 if meta is None else meta['vocab_size'])

    def config(self, row: Row) -> GPTConfig:
        """The config at inference: without dropout, and with the changes made after training."""
        return dataclasses.replace(self.trained_config(row), dropout=0.0, **row.at_inference)


def digest(what) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def read_ladder(argv: list[str], usage: str = '', echo: bool = True):
    """Return (settings, ladder), checked, from the arguments of ablate.py."""
    s = configurator.parse(Settings, argv, usage=usage, echo=echo)
    name = next((Path(arg).stem for arg in argv if not arg.startswith('-')), '')
    s = dataclasses.replace(s, name=s.name or name)
    if not s.name:
        raise UserError('give the config file of a ladder, as config/ablate_smoke.py')
    if not re.fullmatch(r'[A-Za-z0-9_.-]+', s.name) or s.name.startswith('.'):
        raise UserError(f'name={s.name!r}: must consist of letters, digits, - _ and dots')
    ladder = Ladder(s)
    ladder.check()
    return s, ladder

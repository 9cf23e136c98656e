"""The drawing of a plan."""
from pathlib import Path

import pytest

from config.gpt_config import GPTConfig
from kv.__main__ import main
from kv.plan import plan_kv
from kv.svg import slot_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize('fields, T, held', [
    (dict(layer_pattern='L', window_size=9), 10, 'local: 9 tokens'),
    (dict(kv_tied='all'), 8, 'global: 8 tokens, K = V'),
    (dict(kv_latent=128, rope_fraction_global=0, pos_embedding='rope'), 8,
     'global: 8 tokens, latent of 128')])
def test_what_a_slot_holds(fields, T, held):
    assert slot_text(plan_kv(GPTConfig(**fields)).slots[0], T) == f'slot 0, {held}'


def test_the_committed_drawing_is_what_the_command_makes(tmp_path):
    file = tmp_path / 'plan.svg'
    file.write_text('old')
    main(['config/train_gpt2_mqa_local.py', f'--svg={file}'])
    assert file.read_bytes() == (ROOT / 'results' / 'kv' / 'plan.svg').read_bytes()
    assert '--svg=results/kv/plan.svg' in (ROOT / 'Makefile').read_text()

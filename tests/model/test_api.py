"""The rest of nanoGPT's model API: cropping, and the example of the docstring."""
import re
import textwrap

import pytest
import torch

import model
from config.gpt_config import GPTConfig
from tests.helpers.models import FULL_STACK, VOCAB, full_logits, random_model, tokens

VANILLA = dict(block_size=16, vocab_size=VOCAB, n_layer=2, n_head=4, n_embd=8)


@pytest.mark.parametrize('config', [VANILLA, FULL_STACK], ids=['vanilla', 'full stack'])
def test_cropping_leaves_short_sequences_alone(config):
    model, idx = random_model(GPTConfig(**config)), tokens(2, 6)
    before, size = full_logits(model, idx), model.get_num_params(non_embedding=False)
    model.crop_block_size(6)
    assert torch.equal(full_logits(model, idx), before)
    assert model.config.block_size == 6 and model.config.n_layer == config['n_layer']
    learned = 'layer_pattern' not in config
    assert size - model.get_num_params(non_embedding=False) == (10 * 8 if learned else 0)
    assert not learned or model.state_dict()['transformer.wpe.weight'].shape == (6, 8)
    loss = model.train()(idx, idx)[1]
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_cropping_only_shrinks_and_positions_end_there():
    model = random_model(GPTConfig(**VANILLA))
    for block_size in (0, -1, 17):
        with pytest.raises(ValueError, match=f'block_size={block_size}: .*1 to 16'):
            model.crop_block_size(block_size)
    assert model.config.block_size == 16
    model.crop_block_size(6)
    for call in (lambda: model(tokens(1, 7)), lambda: model.new_cache(1, 7)):
        with pytest.raises(ValueError, match='block_size=6'):
            call()
    # tokens, layers, K and V, width, bytes
    assert model.new_cache(1, 6).nbytes == 6 * 2 * 2 * 8 * 8


def test_the_example_in_the_docstring_runs():
    code = re.search(r'\n\n((?: {4}.*\n)+)', model.__doc__)[1]
    idx = torch.zeros(1, 8, dtype=torch.int64)
    names = vars(model) | {'idx': idx, 'targets': idx}
    exec(textwrap.dedent(code), names)
    assert names['cache'].lengths.tolist() == [8] and names['logits'].shape == (1, 1, 50304)

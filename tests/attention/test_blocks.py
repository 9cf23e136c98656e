"""Means of blocks beyond what the tests of whole models see."""
import pytest
import torch

from attention.blocks import block_attention, running_means
from config.gpt_config import GPTConfig
from model import GPT
from tests.helpers.mechanisms import MECHANISMS
from tests.helpers.models import Largest


@pytest.mark.parametrize('bias', [-500.0, 89.0, 1e30])
def test_means_stay_finite_and_among_their_tokens(bias):
    x, biases = torch.randn(2, 3, 9, 4), torch.zeros(3, 4, 4)
    biases[:, 0] = bias
    means = running_means(x, biases)
    torch.testing.assert_close(means[:, :, ::4], x[:, :, ::4])  # of one token
    rest = x[:, :, 1:4].mean(2) if bias < 0 else x[:, :, 0]     # what outweighs the others
    torch.testing.assert_close(means[:, :, 3], rest)


def test_an_entry_begins_with_the_same_weights_in_all_channels():
    """Entries that mix tokens differently in each channel are learned later."""
    config = dict(MECHANISMS['blocks'], n_kv_head=2)
    [biases] = [p for name, p in GPT(GPTConfig(**config)).named_parameters()
                if name == 'transformer.h.2.attn.block_bias']
    of_places = biases.detach().view(2, config['kv_stride'], -1)
    assert of_places.size(2) > 1 and (of_places == of_places[..., :1]).all()
    assert of_places[..., 0].unique().numel() == 2 * config['kv_stride']


def test_a_long_prompt_has_no_matrix_of_all_tokens():
    q, k = torch.randn(1, 8, 2048, 4), torch.randn(1, 1, 2048, 4)
    with Largest() as largest:
        block_attention(q, k, k, stride=4)
    assert largest.n < 2048 ** 2 / 4

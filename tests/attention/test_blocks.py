"""Means of blocks beyond what the tests of whole models see."""
import pytest
import torch

from attention.blocks import block_attention, running_means
from tests.helpers.models import Largest


@pytest.mark.parametrize('bias', [-500.0, 89.0, 1e30])
def test_means_stay_finite_and_among_their_tokens(bias):
    x, biases = torch.randn(2, 3, 9, 4), torch.zeros(3, 4, 4)
    biases[:, 0] = bias
    means = running_means(x, biases)
    torch.testing.assert_close(means[:, :, ::4], x[:, :, ::4])  # of one token
    rest = x[:, :, 1:4].mean(2) if bias < 0 else x[:, :, 0]     # what outweighs the others
    torch.testing.assert_close(means[:, :, 3], rest)


def test_a_long_prompt_has_no_matrix_of_all_tokens():
    q, k = torch.randn(1, 8, 2048, 4), torch.randn(1, 1, 2048, 4)
    with Largest() as largest:
        block_attention(q, k, k, stride=4)
    assert largest.n < 2048 ** 2 / 4

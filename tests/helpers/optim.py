"""A small model and optimizer steps on it."""
from types import SimpleNamespace

import torch

from model import GPT, GPTConfig

SETTINGS = dict(optimizer='muon', muon_momentum=0.9, weight_decay=0.2, learning_rate=1e-2,
                beta1=0.8, beta2=0.9, dtype='float32')


def settings(**changes):
    return SimpleNamespace(**(SETTINGS | changes))


def model_of(bias=True):
    torch.manual_seed(0)
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=80, block_size=8, bias=bias,
                         n_kv_head=1))


def backward(model, seed):
    idx = torch.randint(80, (2, 9), generator=torch.Generator().manual_seed(seed))
    model(idx[:, :-1], idx[:, 1:])[1].backward()


def step(model, optimizer, seed):
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

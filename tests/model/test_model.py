"""The model: nanoGPT's tensors and names; outputs and gradients equal a dense reference."""
import math
import re
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import model as model_module
from common.gpt_config import NANOGPT_FIELDS
from model import GPT, GPTConfig, model_args
from tests.helpers.models import (
    FULL_STACK, VOCAB, configs, full_logits, max_gap, random_model, tokens)
from tests.helpers.reference import Reference, cross_entropy
from training.memory.recompute import set_recompute

pytestmark = pytest.mark.filterwarnings('ignore:layer_pattern')
VANILLA = dict(block_size=16, vocab_size=VOCAB, n_layer=2, n_head=4, n_embd=8)


# -- names, shapes, initial values -----------------------------------------------------------------

def nanogpt_tensors(V, T, C, n_layer, bias):
    """nanoGPT's state dict, in order."""
    def norm(name):
        return [(f'{name}.weight', (C,))] + [(f'{name}.bias', (C,))] * bias

    def linear(name, rows, columns):
        return [(f'{name}.weight', (rows, columns))] + [(f'{name}.bias', (rows,))] * bias
    tensors = [('transformer.wte.weight', (V, C)), ('transformer.wpe.weight', (T, C))]
    for i in range(n_layer):
        h = f'transformer.h.{i}'
        tensors += norm(f'{h}.ln_1') + linear(f'{h}.attn.c_attn', 3 * C, C)
        tensors += linear(f'{h}.attn.c_proj', C, C) + norm(f'{h}.ln_2')
        tensors += linear(f'{h}.mlp.c_fc', 4 * C, C) + linear(f'{h}.mlp.c_proj', C, 4 * C)
    return tensors + norm('transformer.ln_f') + [('lm_head.weight', (V, C))]


@pytest.mark.parametrize('bias', [True, False])
def test_vanilla_has_exactly_nanogpts_tensors_in_its_order(bias):
    model = GPT(GPTConfig(**VANILLA, bias=bias))
    wanted = nanogpt_tensors(VOCAB, 16, 8, 2, bias)
    assert [(name, tuple(x.shape)) for name, x in model.state_dict().items()] == wanted
    # the optimizer's state is indexed by this order; the tied lm_head counts once
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in wanted[:-1]]
    assert model.lm_head.weight is model.transformer.wte.weight


@settings(max_examples=40)
@given(config=configs())
def test_the_state_dict_holds_parameters_alone_and_loads_strictly(config):
    model = random_model(config)
    full_logits(model, tokens(1, 9))  # creates tables and masks
    model.new_cache(1, 9)
    state = model.state_dict()
    assert set(state) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert not list(model.buffers())
    other = GPT(config).double().eval()
    other.load_state_dict(state)
    assert torch.equal(full_logits(other, tokens(2, 9)), full_logits(model, tokens(2, 9)))
    assert ('transformer.wpe.weight' in state) == (config.pos_embedding == 'learned')


@pytest.mark.parametrize('config', [
    dict(), dict(layer_pattern='LG', kv_share='AB', share_global_kv=True,
    n_kv_head=1, window_size=4, pos_embedding='rope', qk_norm=True)])
def test_initial_values_are_gpt2s(config):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, vocab_size=64, n_layer=6, n_head=4, n_embd=64, **config))
    for name, p in model.named_parameters():
        if name.endswith('bias'):
            assert (p == 0).all()
        elif p.dim() == 1:
            assert (p == 1).all()
        else:
            std = 0.02 / math.sqrt(2 * 6) if name.endswith('c_proj.weight') else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.05)
            assert abs(p.mean().item()) < std / 10


def test_number_of_parameters_leaves_out_position_embeddings_alone():
    model, rope = GPT(GPTConfig(**VANILLA)), GPT(GPTConfig(**FULL_STACK))
    total = sum(x.numel() for x in model.state_dict().values()) - VOCAB * 8  # tied
    assert model.get_num_params(non_embedding=False) == total
    assert model.get_num_params() == total - 16 * 8
    assert rope.get_num_params() == rope.get_num_params(non_embedding=False)


def test_model_args_are_nanogpts_seven_and_what_is_not_vanilla():
    vanilla = dict(VANILLA, bias=True, dropout=0.0)
    assert set(NANOGPT_FIELDS) == vanilla.keys()
    assert model_args(GPTConfig(**VANILLA)) == vanilla
    assert model_args(GPTConfig()) == dict(vanilla, block_size=1024, vocab_size=50304, n_layer=12,
                                           n_head=12, n_embd=768)
    config = GPTConfig(**VANILLA, n_kv_head=1, gelu='tanh', window_size=0)
    assert model_args(config) == dict(vanilla, n_kv_head=1, gelu='tanh')
    assert GPTConfig(**model_args(config)) == config


# -- forward ---------------------------------------------------------------------------------------

def test_loss_leaves_out_targets_of_minus_1():
    model, idx, targets = random_model(GPTConfig(**VANILLA)), tokens(3, 16), tokens(3, 16, seed=1)
    targets[0, :9] = targets[2, 3] = -1
    logits, loss = model(idx, targets)
    assert max_gap(logits, full_logits(model, idx)) < 1e-12
    assert abs((loss - cross_entropy(logits, targets)).item()) < 1e-12
    targets[0, 9:] = -1
    assert abs((model(idx, targets)[1] - cross_entropy(logits, targets)).item()) < 1e-12


def test_casting_the_module_does_not_round_the_rotary_tables():
    """bf16 tables, or angles from bf16 frequencies, would be off by over 1e-2 here."""
    config = GPTConfig(**dict(FULL_STACK, block_size=400))
    model, idx = random_model(config, torch.float32), tokens(1, 400)
    full_logits(model, idx)
    model.to(torch.bfloat16)
    full_logits(model, idx)
    model.to(torch.float32)
    assert max_gap(full_logits(model, idx), Reference(model.state_dict(), config)(idx)) < 1e-4


# -- trimmed prefill -------------------------------------------------------------------------------

@pytest.mark.parametrize('config', [
    FULL_STACK, dict(FULL_STACK, attn_gate=True, n_layer=12),  # readers last
    dict(FULL_STACK, layer_pattern='LG', kv_share='', window_size=3),
    VANILLA | dict(block_size=64)])
@torch.no_grad()
def test_layers_behind_the_last_owner_see_one_token_of_a_row(config):
    """Trimmed prefill: after the last K and V only the last token goes on."""
    model, seen = random_model(GPTConfig(**config)), []
    for block in model.transformer.h:
        block.mlp.register_forward_hook(lambda module, args, y: seen.append(y.size(1)))
    cache, last = model.new_cache(2, 64), model.plan.last_owner
    model(tokens(2, 20), cache=cache)
    assert seen == [20] * last + [1] * (len(seen) - last)
    assert max(layer.index for layer in model.plan.layers if layer.owns) == last
    seen.clear()
    model(tokens(2, 20), cache=cache, all_logits=True)
    assert set(seen) == {20}


# -- gradients -------------------------------------------------------------------------------------

def reference_gradients(model, idx, targets):
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss = cross_entropy(Reference(leaves, model.config)(idx), targets)
    loss.backward()
    return loss, {name: leaf.grad for name, leaf in leaves.items()}


@settings(max_examples=40)
@given(config=configs(), T=st.integers(1, 80), quantised=st.booleans(),
       recompute=st.sampled_from(['none', 'block']))
def test_loss_and_gradients_of_every_parameter_are_the_references(config, T, quantised, recompute):
    config.kv_quant_train = 'int8' if quantised else ''
    model, idx, targets = random_model(config).train(), tokens(2, T), tokens(2, T, seed=1)
    set_recompute(model, recompute)
    loss = model(idx, targets)[1]
    loss.backward()
    expected, wanted = reference_gradients(model, idx, targets)
    assert abs(loss - expected).item() < 1e-9
    for name, p in model.named_parameters():
        assert max_gap(p.grad, wanted[name]) < 1e-9, name


# -- dropout ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('pattern', ['L', 'G'])
def test_attention_dropout_works_in_layers_of_both_kinds(pattern):
    idx = tokens(2, 40)  # longer than the window, which is not the shortcut for all keys
    model = random_model(GPTConfig(**dict(FULL_STACK, layer_pattern=pattern, kv_share='',
                                          dropout=0.3)))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # all but attention's
            module.p = 0.0
    eval_logits = full_logits(model, idx)
    assert max_gap(eval_logits, Reference(model.state_dict(), model.config)(idx)) < 1e-9
    model.train()
    torch.manual_seed(0)
    first, second = full_logits(model, idx), full_logits(model, idx)
    assert max_gap(first, second) > 1e-3 and max_gap(first, eval_logits) > 1e-3
    torch.manual_seed(0)
    assert torch.equal(full_logits(model, idx), first)


# -- cropping, and the example of the docstring ----------------------------------------------------

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
    code = re.search(r'\n\n((?: {4}.*\n)+)', model_module.__doc__)[1]
    idx = torch.zeros(1, 8, dtype=torch.int64)
    names = vars(model_module) | {'idx': idx, 'targets': idx}
    exec(textwrap.dedent(code), names)
    assert names['cache'].lengths.tolist() == [8] and names['logits'].shape == (1, 1, 50304)

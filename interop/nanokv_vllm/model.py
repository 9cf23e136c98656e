"""nanoKV's model in vLLM.

A layer that reads another layer's K and V has that layer as its target and no K/V projection; a
local layer declares its window. vLLM's cache manager does the rest. With tensor parallelism, query
and K/V heads are divided among the ranks; if there are fewer K/V heads, these are replicated. Where
K = V, vLLM stores both; a latent is stored as the only K/V head, and as both.
"""
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from .config import NanoKVConfig
from .shapes import shapes


def padded_head_dim(head_dim: int) -> int:
    """Return the smallest head size from `head_dim` up that vLLM has attention kernels for."""
    if not current_platform.is_cpu():
        return -(-head_dim // 8) * 8
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim > max(sizes):
        raise ValueError(f'heads of width {head_dim}: vLLM has CPU kernels only for {sizes}')
    return min(size for size in sizes if size >= head_dim)


def sharded_parameter(*shape: int) -> nn.Parameter:
    """A parameter whose first dimension is divided among the ranks."""
    p = nn.Parameter(torch.zeros(shape))
    set_weight_attrs(p, {'weight_loader': sharded_weight_loader(0)})
    return p


def make_rotary(config: NanoKVConfig, local: bool, max_model_len: int):
    """Rotary embedding of local or global layers; None if nothing is rotated."""
    D, theta, fraction = config.head_dim, config.field('rope_theta'), 1.0
    if not local:
        theta = config.field('rope_theta_global') or theta
        fraction = config.field('rope_fraction_global')
    n_rotated = 2 * round(fraction * D / 2)
    if config.field('pos_embedding') != 'rope' or n_rotated == 0:
        return None
    longest = max(config.max_position_embeddings, max_model_len)
    parameters = {'rope_type': 'default', 'rope_theta': theta}
    if n_rotated < D:  # of all frequencies the first, as in Gemma 4
        parameters |= {'rope_type': 'proportional', 'rope_dim': n_rotated}
    return get_rope(D, max_position=longest, is_neox_style=True, rope_parameters=parameters)


class NanoKVAttention(nn.Module):
    """An owner projects q, k, v with one matrix (k twice where K = V), a reader only q; latents
    have a matrix of their own, and so have gates. x (tokens, C) -> (tokens, C)."""

    def __init__(self, config: NanoKVConfig, layer: int, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        C, D = config.hidden_size, config.head_dim
        self.latent, self.tied = config.latent(layer), config.tied(layer)
        n_head, n_kv_head = config.num_attention_heads, config.num_key_value_heads
        n_kv_head = 1 if self.latent else n_kv_head
        ranks = get_tensor_model_parallel_world_size()
        if n_head % ranks or max(n_kv_head, ranks) % min(n_kv_head, ranks):
            raise ValueError(f'{n_head} heads with {n_kv_head} for K/V cannot be divided among '
                             f'{ranks} ranks')
        owner = config.kv_owners[layer]
        self.owns, self.head_dim, self.q_rows = owner == layer, D, n_head * D
        self.width = self.latent or D  # of what is stored
        self.padded_dim = padded_head_dim(self.width)
        self.n_head, self.n_kv_head = n_head // ranks, max(1, n_kv_head // ranks)
        settings = dict(bias=config.field('bias'), quant_config=vllm_config.quant_config)
        make, sizes = linear.ColumnParallelLinear, (C, n_head * D)
        if self.owns and not self.latent:
            make, sizes = linear.QKVParallelLinear, (C, D, n_head, n_kv_head)
        self.c_attn = make(*sizes, prefix=f'{prefix}.c_attn', **settings)
        self.c_latent = None
        if self.owns and self.latent:
            self.c_latent = linear.ReplicatedLinear(C, self.latent, prefix=f'{prefix}.c_latent',
                                                    **settings)
        if self.latent:
            self.k_up = sharded_parameter(self.n_head * D, self.latent)
            self.v_up = sharded_parameter(self.n_head * D, self.latent)
        self.c_proj = linear.RowParallelLinear(n_head * D, C, prefix=f'{prefix}.c_proj', **settings)
        self.gate = None if not config.field('attn_gate') else linear.ColumnParallelLinear(
            C, n_head, prefix=f'{prefix}.gate', **settings | {'bias': True})
        qk_norm = config.field('qk_norm')
        self.q_norm = nn.RMSNorm(D, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.width, eps=1e-6) if qk_norm and self.owns else None
        local = config.is_local(layer)
        self.rotary = make_rotary(config, local, vllm_config.model_config.max_model_len)
        self.sink = sharded_parameter(self.n_head) if config.field('attn_sink') else None
        layers = prefix.removesuffix(f'{layer}.attn')  # prefix is '...h.LAYER.attn'
        target = None if self.owns else f'{layers}{owner}.attn.attn'
        sinks = {} if self.sink is None else {'sinks': self.sink}
        self.attn = Attention(self.n_head, self.padded_dim, scale=D ** -0.5,
                              num_kv_heads=self.n_kv_head, cache_config=vllm_config.cache_config,
                              quant_config=vllm_config.quant_config,
                              per_layer_sliding_window=config.sliding_window if local else None,
                              kv_sharing_target_layer_name=target, prefix=f'{prefix}.attn', **sinks)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.projected(x)
        q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if self.rotary is not None:
            q, k = self.rotary(positions, q, k)
        if self.latent:  # (q k_up) c = q (k_up c): multi-query attention to the latents
            k_up, v_up = (up.unflatten(0, (self.n_head, -1)) for up in (self.k_up, self.v_up))
            q = torch.einsum('thd,hdc->thc', q.unflatten(-1, (self.n_head, -1)), k_up).flatten(-2)
        v = k if self.tied else v
        y = self.attn(*(self._padded(x) for x in (q, k, v)))
        y = y.unflatten(-1, (-1, self.padded_dim))[..., :self.width]  # (tokens, H, D)
        if self.latent:
            y = torch.einsum('thc,hdc->thd', y, v_up)
        elif self.tied and self.rotary is not None:
            y = self._rotated_back(positions, y)
        if self.gate is not None:
            y = y * self.gate(x)[0].sigmoid()[..., None]
        return self.c_proj(y.flatten(-2))[0]

    def projected(self, x):
        """q, k, v, each (tokens, heads * width); None for those of another layer."""
        rows, _ = self.c_attn(x)
        if self.c_latent is not None:
            return rows, self.c_latent(x)[0], None
        if not self.owns:
            return rows, None, None
        sizes = [n * self.head_dim for n in (self.n_head, self.n_kv_head, self.n_kv_head)]
        return rows.split(sizes, dim=-1)

    def rows_of_c_attn(self, name: str, x: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The folder's c_attn (rows q | k | v, q | k or q | latent) as the modules here have it."""
        if self.c_latent is not None:
            q, latent = x.tensor_split([self.q_rows])
            return [(name, q), (name.replace('c_attn', 'c_latent'), latent)]
        if self.owns and self.tied:
            x = torch.cat([x, x[self.q_rows:]])
        return [(name, x)]

    def _rotated_back(self, positions, y):
        """V was rotated by its position: rotate y (tokens, H, D) back by the query's."""
        cos, sin = self.rotary.cos_sin_cache[positions][:, None].to(y.dtype).chunk(2, dim=-1)
        a, b = y.chunk(2, dim=-1)
        return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)

    def _padded(self, x):
        """Zero-pad the heads, which changes neither q @ k nor the other dimensions of v."""
        if x is None or self.padded_dim == self.width:
            return x
        heads = x.unflatten(-1, (-1, self.width))
        return functional.pad(heads, (0, self.padded_dim - self.width)).flatten(-2)

    def _normed(self, x, norm):
        if x is None or norm is None:
            return x
        return norm(x.unflatten(-1, (-1, *norm.normalized_shape))).flatten(-2)


class NanoKVMLP(nn.Module):
    def __init__(self, config: NanoKVConfig, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        width, hidden = config.hidden_size, config.intermediate_size
        settings = dict(bias=config.field('bias'), quant_config=vllm_config.quant_config)
        self.c_fc = linear.ColumnParallelLinear(width, hidden, prefix=f'{prefix}.c_fc', **settings)
        self.gelu = nn.GELU(approximate='tanh' if config.field('gelu') == 'tanh' else 'none')
        self.relu2 = config.field('gelu') == 'relu2'
        self.c_proj = linear.RowParallelLinear(hidden, width, prefix=f'{prefix}.c_proj', **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.c_fc(x)
        x = functional.relu(x).square() if self.relu2 else self.gelu(x)
        return self.c_proj(x)[0]


class NanoKVBlock(nn.Module):
    def __init__(self, config: NanoKVConfig, layer: int, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        width, bias = config.hidden_size, config.field('bias')
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=bias) for _ in range(2))
        self.attn = NanoKVAttention(config, layer, vllm_config, f'{prefix}.attn')
        self.mlp = NanoKVMLP(config, vllm_config, f'{prefix}.mlp')

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(positions, self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@support_torch_compile
class NanoKVModel(nn.Module):
    """Embeddings, blocks, last norm: token ids (tokens,) -> (tokens, C)."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ''):
        super().__init__()
        config = vllm_config.model_config.hf_config
        C = config.hidden_size
        self.wte = vocab_parallel_embedding.VocabParallelEmbedding(config.vocab_size, C,
                                                                   prefix=f'{prefix}.wte')
        self.wpe = None
        if config.field('pos_embedding') == 'learned':
            self.wpe = nn.Embedding(config.max_position_embeddings, C)
        self.h = nn.ModuleList(NanoKVBlock(config, i, vllm_config, f'{prefix}.h.{i}')
                               for i in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(C, bias=config.field('bias'))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.wte(input_ids)

    def forward(self, input_ids: torch.Tensor | None, positions: torch.Tensor,
                intermediate_tensors=None,
                inputs_embeds: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        if self.wpe is not None:
            x = x + self.wpe(positions)
        for block in self.h:
            x = block(positions, x)
        return self.ln_f(x)


class NanoKVForCausalLM(nn.Module):
    """The model that vLLM runs. Tensors have nanoKV's names."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ''):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config, self.quant_config = config, vllm_config.quant_config
        self.shapes = shapes(config)
        self.transformer = NanoKVModel(vllm_config=vllm_config,
                                       prefix=maybe_prefix(prefix, 'transformer'))
        lm_head = vocab_parallel_embedding.ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, 'lm_head'))
        self.lm_head = lm_head.tie_weights(self.transformer.wte)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.transformer.embed_input_ids(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return self.transformer(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Raises ValueError if a tensor is unknown or has the wrong shape."""
        def checked():
            for name, x in weights:
                if name.startswith('lm_head.'):  # tied
                    continue
                expected = self.shapes.get(name, 'nothing of it')
                if tuple(x.shape) != expected:
                    raise ValueError(f'{name} is {tuple(x.shape)}, config.json says {expected}')
                if '.attn.c_attn.' in name:
                    attn = self.transformer.h[int(name.split('.')[2])].attn
                    yield from attn.rows_of_c_attn(name, x)
                else:
                    yield name, x

        return AutoWeightsLoader(self).load_weights(checked())

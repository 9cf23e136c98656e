"""nanoKV's model in vLLM's parts.

Layers that read another layer's K and V name it as their target, and have no K/V projections; local layers have a sliding
window of their own; vLLM's cache manager does the rest: no pages for the former, and of the latter's only those in the window
are kept. With tensor parallelism query heads are shared out; K/V heads too, or each rank has a copy where they are fewer.
"""
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.platforms import current_platform

from .config import NanoKVConfig


def kept_size(head_dim: int) -> int:
    """The size of a head that vLLM's attention has kernels for, and that K and V are therefore kept in: the next larger one.

    Raises:
        ValueError: heads larger than any.
    """
    if not current_platform.is_cpu():
        return -(-head_dim // 8) * 8
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    sizes = [size for size in CPUAttentionBackend.get_supported_head_sizes() if size >= head_dim]
    if not sizes:
        raise ValueError(f'heads of {head_dim} are larger than any that vLLM has kernels for on a CPU')
    return min(sizes)


class NanoKVAttention(nn.Module):
    """Of one layer. An owner projects q, k and v by one matrix, a reader only q. x (tokens, C) -> (tokens, C)."""

    def __init__(self, config: NanoKVConfig, layer: int, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        C, D, ranks = config.hidden_size, config.head_dim, get_tensor_model_parallel_world_size()
        n_head, n_kv_head = config.num_attention_heads, config.num_key_value_heads
        if n_head % ranks or max(n_kv_head, ranks) % min(n_kv_head, ranks):
            raise ValueError(f'{n_head} heads with {n_kv_head} for K/V cannot be shared out over {ranks} ranks')
        owner, bias, quant = config.kv_owners[layer], config.field('bias', True), vllm_config.quant_config
        self.owns, self.head_dim, self.kept = owner == layer, D, kept_size(D)
        self.n_head, self.n_kv_head = n_head // ranks, max(1, n_kv_head // ranks)
        if self.owns:
            self.c_attn = QKVParallelLinear(C, D, n_head, n_kv_head, bias=bias, quant_config=quant, prefix=f'{prefix}.c_attn')
        else:
            self.c_attn = ColumnParallelLinear(C, n_head * D, bias=bias, quant_config=quant, prefix=f'{prefix}.c_attn')
        self.c_proj = RowParallelLinear(n_head * D, C, bias=bias, quant_config=quant, prefix=f'{prefix}.c_proj')
        qk_norm = config.field('qk_norm', False)
        self.q_norm = nn.RMSNorm(D, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(D, eps=1e-6) if qk_norm and self.owns else None
        local = config.layer_types[layer] == 'sliding_attention'
        self.rotary = None
        if config.field('pos_embedding', 'learned') == 'rope':
            theta = config.field('rope_theta', 10000.0)
            theta = theta if local else config.field('rope_theta_global', 0.0) or theta
            longest = max(config.max_position_embeddings, vllm_config.model_config.max_model_len)
            self.rotary = get_rope(D, max_position=longest, is_neox_style=True,
                                   rope_parameters={'rope_type': 'default', 'rope_theta': theta})
        # prefix is '...h.LAYER.attn'
        before = prefix.removesuffix(f'{layer}.attn')
        self.attn = Attention(self.n_head, self.kept, scale=D ** -0.5, num_kv_heads=self.n_kv_head,
                              cache_config=vllm_config.cache_config, quant_config=quant,
                              per_layer_sliding_window=config.sliding_window if local else None,
                              kv_sharing_target_layer_name=None if self.owns else f'{before}{owner}.attn.attn',
                              prefix=f'{prefix}.attn')

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows, _ = self.c_attn(x)
        sizes = [self.n_head * self.head_dim] + [self.n_kv_head * self.head_dim] * 2 * self.owns
        q, *kv = rows.split(sizes, dim=-1)
        k, v = kv if self.owns else (None, None)
        q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if self.rotary is not None:
            q, k = self.rotary(positions, q, k)
        y = self.attn(self._padded(q), self._padded(k), self._padded(v))
        y, _ = self.c_proj(y.unflatten(-1, (-1, self.kept))[..., :self.head_dim].flatten(-2))
        return y

    def _padded(self, x):
        """With heads of the size that is kept: zeros add nothing to the products of q and k, and only zeros to those with v."""
        if x is None or self.kept == self.head_dim:
            return x
        return functional.pad(x.unflatten(-1, (-1, self.head_dim)), (0, self.kept - self.head_dim)).flatten(-2)

    def _normed(self, x, norm):
        if x is None or norm is None:
            return x
        return norm(x.unflatten(-1, (-1, self.head_dim))).flatten(-2)


class NanoKVMLP(nn.Module):

    def __init__(self, config: NanoKVConfig, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        settings = dict(bias=config.field('bias', True), quant_config=vllm_config.quant_config)
        self.c_fc = ColumnParallelLinear(config.hidden_size, config.intermediate_size, prefix=f'{prefix}.c_fc', **settings)
        self.gelu = nn.GELU(approximate='tanh' if config.field('gelu', 'exact') == 'tanh' else 'none')
        self.c_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, prefix=f'{prefix}.c_proj', **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.c_fc(x)
        x, _ = self.c_proj(self.gelu(x))
        return x


class NanoKVBlock(nn.Module):

    def __init__(self, config: NanoKVConfig, layer: int, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        bias = config.field('bias', True)
        self.ln_1, self.ln_2 = (nn.LayerNorm(config.hidden_size, eps=1e-5, bias=bias) for _ in range(2))
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
        self.wte = VocabParallelEmbedding(config.vocab_size, config.hidden_size, prefix=f'{prefix}.wte')
        learned = config.field('pos_embedding', 'learned') == 'learned'
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.h = nn.ModuleList(NanoKVBlock(config, i, vllm_config, f'{prefix}.h.{i}') for i in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=1e-5, bias=config.field('bias', True))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.wte(input_ids)

    def forward(self, input_ids: torch.Tensor | None, positions: torch.Tensor, intermediate_tensors=None,
                inputs_embeds: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        if self.wpe is not None:
            x = x + self.wpe(positions)
        for block in self.h:
            x = block(positions, x)
        return self.ln_f(x)


class NanoKVForCausalLM(nn.Module):
    """What vLLM runs: nanoKV's weights, under their names."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ''):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config, self.quant_config = config, vllm_config.quant_config
        self.transformer = NanoKVModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, 'transformer'))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, 'lm_head'))
        self.lm_head = self.lm_head.tie_weights(self.transformer.wte)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.transformer.embed_input_ids(input_ids)

    def forward(self, input_ids: torch.Tensor | None, positions: torch.Tensor, intermediate_tensors=None,
                inputs_embeds: torch.Tensor | None = None) -> torch.Tensor:
        return self.transformer(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Raises ValueError for a tensor that the model does not have, or has in another shape (of which vLLM would take as
        much as it needs)."""
        shapes = self.config.shapes()

        def checked():
            for name, x in weights:
                if name.startswith('lm_head.'):  # tied
                    continue
                if tuple(x.shape) != shapes.get(name):
                    raise ValueError(f'{name} is {tuple(x.shape)}, config.json says {shapes.get(name, "nothing of it")}')
                yield name, x
        return AutoWeightsLoader(self).load_weights(checked())

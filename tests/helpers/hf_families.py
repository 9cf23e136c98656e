"""Tiny configs of transformers' families (the name before a comma), one for each way to remember.
Sizes differ from each other, so that a formula with the wrong one gives another number."""

_HEADS = dict(vocab_size=99, hidden_size=48, intermediate_size=40, num_hidden_layers=6,
              num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
              eos_token_id=2)
_GQA = _HEADS | dict(num_key_value_heads=2)
_WIDE = _GQA | dict(head_dim=20)
_WINDOW = _WIDE | dict(sliding_window=7)
_EXPERTS = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
                topk_group=1, first_k_dense_replace=1)
_MLA = _HEADS | dict(num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=14, qk_rope_head_dim=6,
                     qk_nope_head_dim=10, v_head_dim=11)
_INDEXED = dict(index_n_heads=2, index_head_dim=8, index_topk=4)
_DELTA = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=10,
              linear_value_head_dim=12, linear_conv_kernel_dim=4)
_KDA = dict(linear_num_heads=4, linear_head_dim=9, linear_conv_kernel_dim=4, num_experts=4)
_MAMBA = dict(mamba_d_state=5, mamba_d_conv=4)
_MAMBA2 = _MAMBA | dict(mamba_expand=2, mamba_n_heads=8, mamba_d_head=12, mamba_n_groups=2,
                        mamba_chunk_size=8)
_OLD_MAMBA = dict(vocab_size=99, hidden_size=48, num_hidden_layers=3, state_size=5, conv_kernel=4)
_OLD = dict(vocab_size=99, n_embd=48, n_layer=3, n_head=4, n_positions=64)
_SHARED = _WINDOW | dict(num_kv_shared_layers=2, hidden_size_per_layer_input=8,
                         vocab_size_per_layer_input=99,
                         layer_types=['sliding_attention', 'sliding_attention',
                                      'full_attention'] * 2)

FAMILIES = {
    # every position, or the same window in every layer
    'gpt2': _OLD, 'gpt_bigcode': _OLD,  # multi-query
    'falcon': dict(vocab_size=99, hidden_size=48, num_hidden_layers=3, num_attention_heads=4),
    'llama': _WIDE, 'mistral': _WINDOW,
    # windows in some layers
    'qwen2': _GQA | dict(use_sliding_window=True, sliding_window=7, max_window_layers=2),
    'gemma3_text': _WINDOW, 'gpt_oss': _WINDOW | dict(num_local_experts=4),
    'llama4_text': _WIDE | dict(attention_chunk_size=7, no_rope_layer_interval=3,
                                num_local_experts=2, intermediate_size_mlp=40),
    'gpt_neo': _HEADS | dict(attention_types=[[['global', 'local'], 3]], window_size=7),
    'modernbert-decoder': _HEADS | dict(sliding_window=7, local_attention=7),
    'mimo_v2_flash': _WINDOW | dict(v_head_dim=11),
    # shared by layers
    'gemma3n_text': _SHARED | dict(laurel_rank=4, intermediate_size=[40] * 6,
                                   activation_sparsity_pattern=[0.0] * 6),
    'gemma4_text': _SHARED | dict(num_kv_shared_layers=0, attention_k_eq_v=True,
                                  num_global_key_value_heads=1, global_head_dim=24),
    # latents
    'deepseek_v3': _MLA | _EXPERTS, 'deepseek_v32': _MLA | _EXPERTS | _INDEXED,
    'glm_moe_dsa, shared': _MLA | _EXPERTS | _INDEXED | dict(indexer_types=['full', 'shared'] * 3),
    'longcat_flash': _MLA | dict(num_layers=3, head_dim=6, ffn_hidden_size=40,
                                 expert_ffn_hidden_size=16, n_routed_experts=4, moe_topk=2),
    # a window, and entries of blocks
    'deepseek_v4': _WIDE | _INDEXED | dict(
        num_key_value_heads=1, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        q_lora_rank=8, o_groups=2, o_lora_rank=8, sliding_window=6, num_hidden_layers=3,
        qk_rope_head_dim=4, partial_rotary_factor=0.2, layer_types=[
            'sliding_attention', 'heavily_compressed_attention', 'compressed_sparse_attention'],
        compress_rates={'compressed_sparse_attention': 4, 'heavily_compressed_attention': 8}),
    # recurrent states, beside attention in other layers or in the same
    'qwen3_next': _WIDE | _DELTA | dict(moe_intermediate_size=16, num_experts=4,
                                        shared_expert_intermediate_size=16, num_experts_per_tok=2),
    'kimi_linear': _MLA | _EXPERTS | _KDA, 'minimax': _WIDE | dict(num_local_experts=2),
    'jamba': _GQA | _MAMBA | dict(attn_layer_period=3, attn_layer_offset=1, num_experts=2,
                                  use_mamba_kernels=False),
    'falcon_h1': _GQA | _MAMBA2 | dict(mamba_d_ssm=96),
    'zamba2': _HEADS | _MAMBA | dict(
        num_key_value_heads=4, mamba_expand=2, n_mamba_heads=8, mamba_headdim=12, mamba_ngroups=2,
        chunk_size=8, layers_block_type=['mamba', 'mamba', 'hybrid'] * 2),
    'lfm2': _GQA | dict(conv_L_cache=3, layer_types=['conv', 'conv', 'full_attention'] * 2),
    # states alone
    'mamba': _OLD_MAMBA,
    'mamba2': _OLD_MAMBA | dict(num_heads=8, head_dim=12, n_groups=2, chunk_size=8),
}

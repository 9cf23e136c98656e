"""Random configs for tests of the KV plan."""
from hypothesis import strategies as st

from config.gpt_config import GPTConfig


@st.composite
def plan_configs(draw, max_layers=20):
    pattern = draw(st.text('GL', min_size=1, max_size=7))
    share = ''.join(draw(st.sampled_from('ABC' if kind == 'L' else 'XY')) for kind in pattern)
    n_head = draw(st.sampled_from([1, 2, 6, 12]))
    n_kv_heads = [0, *(n for n in range(1, n_head + 1) if n_head % n == 0)]
    return GPTConfig(n_layer=draw(st.integers(1, max_layers)), n_head=n_head, n_embd=n_head * 8,
                     layer_pattern=pattern, n_kv_head=draw(st.sampled_from(n_kv_heads)),
                     window_size=draw(st.integers(1, 40)),
                     kv_share=draw(st.sampled_from(['', share])),
                     share_global_kv=draw(st.booleans()))

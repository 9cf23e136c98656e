# To measure servers with (lab/sessions), with random weights: GPT-2's vocabulary and layers,
# half of its width, the full stack. Fast enough for two CPU cores.
block_size = 4096
n_layer = 12
n_head = 6
n_embd = 384

n_kv_head = 1
layer_pattern = 'LLLLLG'
window_size = 256
kv_share = 'AABBBC'
share_global_kv = True
pos_embedding = 'rope'
qk_norm = True
gelu = 'tanh'

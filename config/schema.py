"""Every key that a program takes: its name, default and one-line meaning. `--help` and the checks are made from this."""
import dataclasses
from dataclasses import dataclass

from config.gpt_config import GPTConfig


@dataclass(frozen=True)
class Key:
    """One setting. Its type is the type of its default, so a default is never None."""
    name: str
    default: bool | int | float | str | dict
    meaning: str
    choices: tuple = ()
    folder: str = ''  # what an existing folder, given in place of one of the choices, must be


def _keys(*rows):
    return tuple(Key(*row) for row in rows)


def _model_keys(**defaults):
    """GPTConfig's fields as keys; `vocab_size` is left out, because the data set says it."""
    return tuple(Key(f.name, defaults.get(f.name, f.default), f.metadata['meaning'], f.metadata['choices'])
                 for f in dataclasses.fields(GPTConfig) if f.name != 'vocab_size')


KV_DTYPES = ('auto', 'float32', 'bfloat16', 'float16', 'int8')
GPT2_TYPES = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # OpenAI's weights on the Hugging Face hub
GPT2_FOLDER = "a Hugging Face GPT-2 (config.json and *.safetensors)"

WEIGHTS = _keys(
    ('weight_dtype', 'auto', "the matrices: 'auto' = dtype, 'int8' (activations too), 'int4' (groups; activations int8): docs/decoding.md",
     ('auto', 'int8', 'int4')),
    ('int4_group', 32, "with weight_dtype='int4': columns of a weight that share a scale"),
    ('native', True, 'on a CPU: decode steps and int8 matmuls by the C++ extension, compiled on first use; False = plain torch'),
    ('captured', True, 'on CUDA: decode steps (of 32 tokens and more) are captured as CUDA graphs and replayed'),
)
RUN = _keys(
    ('out_dir', 'out', 'folder of the checkpoint (ckpt.pt) and metrics.jsonl'),
    ('seed', 1337, 'seed of every random number'),
)
DEVICE = _keys(
    ('device', 'auto', "where to run: 'auto' (CUDA, else MPS, else CPU), 'cpu', 'cuda', 'cuda:1', 'mps'"),
    ('dtype', 'auto', "arithmetic: 'auto' is bfloat16 on CUDA that has it (else float16), float32 elsewhere",
     ('auto', 'float32', 'bfloat16', 'float16')),
)
ATTENTION = _keys(
    ('attention_backend', 'auto', "attention over whole sequences: 'sdpa' (torch's, in blocks where there is a window), 'flex' "
     "(FlexAttention, on CUDA), 'flash_attn' (the package), 'math' (slow, to compare with), 'auto' = of flash_attn, flex and "
     'sdpa the first that can (docs/gpu.md)', ('auto', 'sdpa', 'flex', 'flash_attn', 'math')),
)
# GPT-2's biases are off by default in nanoGPT's train.py, while GPTConfig has them on
MODEL = _model_keys(bias=False)

TRAIN = RUN + _keys(
    ('eval_interval', 2000, 'iterations between evaluations (and checkpoints)'),
    ('log_interval', 1, 'iterations between log lines'),
    ('eval_iters', 200, 'batches per split in one evaluation; always the same windows'),
    ('eval_only', False, 'evaluate once and stop'),
    ('always_save_checkpoint', True, 'save after every evaluation, not only when the validation loss improved'),
    ('checkpoint_interval', 0, 'also save every so many iterations; 0 = at evaluations only'),
    ('keep_checkpoints', 1, 'how many of the latest checkpoints stay: ckpt.pt, then ckpt_ITERATION.pt'),
    ('init_from', 'scratch', "'scratch', 'resume' from out_dir, or the weights of GPT-2 to finetune",
     ('scratch', 'resume') + GPT2_TYPES, GPT2_FOLDER),
    ('resume_from', 'ckpt.pt', "with init_from='resume': which checkpoint in out_dir"),
    ('wandb_log', False, 'log to Weights & Biases'),
    ('wandb_project', 'owt', 'its project'),
    ('wandb_run_name', 'gpt2', 'its run name'),
    ('tensorboard_log', False, 'log to TensorBoard, in out_dir/tensorboard'),
    ('dataset', 'openwebtext', 'folder under data/; prepared on first use where its prepare.py can'),
    ('recall_task', 'distances=3,16,47', "dataset='recall': how far back answers stand, a marker for each, and other fields of "
     'data/recall/lags.py, as n_tokens=32'),
    ('gradient_accumulation_steps', 5 * 8, 'micro-batches per iteration, all processes together'),
    ('batch_size', 12, 'sequences in a micro-batch'),
) + MODEL + _keys(
    ('learning_rate', 6e-4, 'highest learning rate'),
    ('max_iters', 600000, 'iterations to train'),
    ('optimizer', 'adamw', "'adamw', 'muon' (torch's, for the matrices of blocks, AdamW for the others), 'adamw8bit' "
     "(torchao's, a quarter of its memory)", ('adamw', 'muon', 'adamw8bit')),
    ('offload_optimizer', False, "with optimizer='adamw': state and steps in host memory; spares the device 8 bytes a "
     'parameter, and takes longer'),
    ('muon_momentum', 0.95, "with optimizer='muon': share of the former average in the new one"),
    ('weight_decay', 1e-1, 'weight decay, on matrices only'),
    ('beta1', 0.9, 'AdamW beta1'),
    ('beta2', 0.95, 'AdamW beta2'),
    ('grad_clip', 1.0, 'clip the gradient norm at this; 0 = never'),
    ('max_skipped', 20, 'stop after so many iterations in a row with a loss or gradients that are not finite (skipped)'),
    ('data_seed', -1, 'seed of the order of training batches alone; -1 = seed, after the weights are drawn, as in nanoGPT'),
    ('data_order', 'random', "order of the training windows: 'random' (drawn, as in nanoGPT), 'sequential', 'shuffled' (each "
     'once an epoch)', ('random', 'sequential', 'shuffled')),
    ('data_prefetch', 2, 'batches that a thread makes ahead; 0 = none'),
    ('decay_lr', True, 'warm up and decay the learning rate'),
    ('lr_schedule', 'cosine', "how it decays: 'cosine', or 'wsd': not before the last cooldown_iters, and then in a line",
     ('cosine', 'wsd')),
    ('cooldown_iters', 0, "with lr_schedule='wsd': iterations of the decay; 0 = a fifth of lr_decay_iters"),
    ('warmup_iters', 2000, 'iterations of linear warm-up'),
    ('lr_decay_iters', 600000, 'iteration at which min_lr is reached'),
    ('min_lr', 6e-5, 'lowest learning rate'),
    ('recompute', 'none', "activations that the backward pass computes again: 'none', 'selective', 'mlp', 'block', 'every:K' "
     "blocks, 'sqrt', 'offload' (moved to host memory), 'auto' (the fastest of them that fits)"),
    ('checkpoint_blocks', False, "the same as recompute='block'"),
    ('chunked_loss', True, 'large logits are computed a chunk at a time, forward and backward, and never held whole'),
    ('memory_budget', '', "with recompute='auto': memory to fit in, as '8GB'; '' = what is free now"),
    ('memory_report', False, 'before training: what parameters, gradients, optimizer and activations take'),
    ('parallel', 'ddp', "under torchrun: 'ddp' (each process has all), 'fsdp' (FSDP2: parameters, gradients and optimizer "
     'state are shared out)', ('ddp', 'fsdp')),
    ('backend', 'nccl', "torch.distributed backend under torchrun: 'nccl' (CUDA) or 'gloo' (CPU)", ('nccl', 'gloo')),
) + DEVICE + ATTENTION + _keys(
    ('tf32', True, 'on CUDA, float32 products in TF32, as in nanoGPT'),
    ('int8_training', False, "products of the blocks' matrices in int8, forward and backward (torchao's; made for CUDA)"),
    ('compile', True, 'torch.compile the model'),
)

MEMORY = _keys(
    ('budget', '', "memory of the device, as '24GB'; '' = what is free now"),
    ('json', False, 'end with one JSON document on the last line'),
) + TRAIN

# of the programs that run a trained model: what it is run on, and what it is made of where no checkpoint says that
RUNNING = DEVICE + WEIGHTS + _keys(
    ('compile', False, 'torch.compile the MLPs'),
    ('dataset', 'shakespeare_works', "where no checkpoint says it: data set whose alphabet is used"),
) + MODEL
SAMPLE = _keys(
    ('init_from', 'resume', "'resume' (the checkpoint in out_dir), 'random' weights from a config, or GPT-2's",
     ('resume', 'random') + GPT2_TYPES, GPT2_FOLDER),
    ('resume_from', 'ckpt.pt', "with init_from='resume': which checkpoint in out_dir, as ckpt_best.pt"),
) + RUN + _keys(
    ('start', '\n', "prompt, or 'FILE:path' of a text file to use as one"),
    ('prompts', '', "file with many prompts in place of start: one a line, or in a .jsonl file one JSON string or object a "
     'line ({"prompt": "To be", "id": 7, "temperature": 0.5}); the answers are JSON lines on stdout'),
    ('num_samples', 10, 'samples to draw of each prompt (of many prompts 1, if not given)'),
    ('parallel', 1, 'samples decoded together in one batch (of many prompts up to 16, if not given); each draws random '
     'numbers of its own'),
    ('max_new_tokens', 500, 'tokens to generate per sample'),
    ('stop', '', "end a sample where this text, or one of a list, comes up (it is not printed): "
     "\"['\\n\\n', '<|endoftext|>']\""),
    ('temperature', 0.8, 'divides the logits: below 1 likelier, above 1 wilder, 0 = greedy'),
    ('top_k', 200, 'draw only from the k likeliest tokens; 0 = all'),
    ('top_p', 1.0, 'draw only from the likeliest tokens that together have this probability; 1 = all'),
    ('min_p', 0.0, 'with prompts: draw only from tokens with this share of the likeliest one\'s probability; 0 = all'),
    ('repetition_penalty', 1.0, 'with prompts: above 1, tokens already in prompt or text get less likely'),
    ('logprobs', -1, "with prompts: 0 = give each token's log-probability, k = also those of the k likeliest; -1 = none"),
    ('kv_dtype', 'auto', "storage of the KV cache; 'auto' = the compute dtype",
     KV_DTYPES),
    ('kv_budget', '', "with prompts: KV memory for all, as '1GB'; '' = enough for every row at its longest, but at most "
     "half of the machine's"),
    ('prefix_budget', '', "with prompts: host memory for what they begin with alike, which is computed once, as '1GB'; '' = "
     'none'),
    ('report', True, 'print the KV-cache report after the samples'),
    ('json', False, 'end with one JSON document on the last line'),
) + RUNNING

TALKING = tuple(key for key in SAMPLE if key.name in ('init_from', 'resume_from')) + RUN + _keys(
    ('user', 'ROMEO', "in conversations, the name under which you speak (role 'user')"),
    ('reply_as', 'JULIET', "the name under which the model replies (role 'assistant')"),
    ('turn', '{name}.\n{text}\n\n', 'how a turn is written; a reply ends where what follows its text comes up'),
)
CHAT = TALKING + _keys(
    ('history', '', "file that the conversation is kept in; '' = chat.json in out_dir"),
    ('max_new_tokens', 300, 'longest reply, in tokens; at most half of max_seq_len'),
    ('temperature', 0.8, 'divides the logits: below 1 likelier, above 1 wilder, 0 = greedy'),
    ('top_k', 200, 'draw only from the k likeliest tokens; 0 = all'),
    ('top_p', 1.0, 'draw only from the likeliest tokens that together have this probability; 1 = all'),
    ('max_seq_len', 0, 'most tokens of a conversation that the model is given; older turns are left out; 0 = block_size, '
     'or 32 times that, up to 8,192, for models with RoPE and local layers'),
    ('kv_dtype', 'auto', "storage of the KV cache; 'auto' = the compute dtype", KV_DTYPES),
    ('prefix_budget', '256MB', 'host memory for what was computed in earlier turns'),
    ('prefix_folder', '', "folder in which that is kept, too, for the next time; '' = computed anew then"),
) + RUNNING

SERVE = TALKING + _keys(
    ('host', '127.0.0.1', "address to listen at: '127.0.0.1' = this machine alone, '0.0.0.0' = whoever can reach it"),
    ('port', 8000, 'its port; 0 = a free one, which is printed'),
    ('api_key_file', '', "file with the keys that clients may give, one a line; '' = the environment's NANOKV_API_KEY, else "
     'none is needed'),
    ('model_name', '', "what clients call the model; '' = the name of the folder out_dir"),
    ('strict_messages', False, 'refuse a message that would end its turn early (by default: with '
     'a blank line in it); False: its blank lines are left out'),
    ('max_new_tokens', 256, 'longest answer, in tokens, where a request does not say'),
    ('parallel', 16, 'requests that run at once'),
    ('max_seq_len', 0, 'longest prompt and answer together, in tokens; 0 = block_size, or 32 times that, up to 8,192, for '
     'models with RoPE and local layers'),
    ('max_waiting', 64, 'requests that may wait beside them; more are told to come again (429)'),
    ('max_body', '1MB', 'largest request'),
    ('timeout', 300.0, 'seconds after which a request is cancelled (504)'),
    ('log_requests', True, 'print a line for each finished request'),
    ('grace', 10.0, 'seconds that running requests have to end, on Ctrl-C or SIGTERM'),
    ('kv_dtype', 'auto', "storage of the KV cache; 'auto' = the compute dtype", KV_DTYPES),
    ('kv_budget', '', "KV memory for all, as '1GB'; '' = enough for every row at its longest, but at most half of the "
     "machine's"),
    ('prefix_budget', '256MB', "host memory for what earlier requests have computed; '' = each computes its whole prompt"),
    ('prefix_folder', '', "folder in which that is kept, too, for the next start; '' = computed anew then"),
) + RUNNING

EVALUATE = TALKING[:2] + RUN + _keys(
    ('text', '', 'the text file to judge'),
    ('context', 0, 'tokens that a prediction sees at most; 0 = block_size'),
    ('stride', 0, 'tokens by which the window moves on: the smaller, the more each prediction sees; 0 = half of context'),
    ('batch_size', 8, 'windows at a time'),
    ('kv_dtype', '', "'' = by the forward pass; else through a cache that stores this ('auto' = the compute dtype)",
     ('',) + KV_DTYPES),
    ('json', False, 'end with one JSON document on the last line'),
) + RUNNING

KV = _keys(
    ('max_seq_len', 0, 'sequence length to budget for; 0 = block_size'),
    ('batch', 1, 'sequences held at once'),
    ('kv_dtype', 'bfloat16', 'storage that the slots are listed in; the comparison has all of them',
     ('float32', 'bfloat16', 'float16', 'int8')),
    ('budget', '', "KV memory, as '1GB' (or '1G', 10^9 bytes) or '512MiB' (2^29): "
     'also say how many sequences fit'),
    ('json', False, 'end with one JSON document on the last line'),
) + MODEL

CAPACITY = _keys(
    ('context', 4096, 'tokens of a conversation before the request'),
    ('message_tokens', 50, 'tokens that a request brings'),
    ('new_tokens', 150, 'tokens of its answer'),
    ('hit_rate', 0.95, 'share of the context that need not be computed again (the prefix store: results/cpu/chat.json)'),
    ('requests_per_second', 1.0, 'that the service has to answer'),
    ('away', 60.0, 'seconds until a user sends the next message, for which the conversation is kept'),
    ('memory', '80GB', 'of a GPU'),
    ('bandwidth', '3.35TB', 'of its memory, bytes a second'),
    ('flops', '400e12', 'that it does a second, in products of matrices'),
    ('price', 2.5, 'of a GPU for an hour'),
    ('tpot', 0.0, 'longest time for a token of an answer, in ms; 0 = as long as the memory holds sequences'),
    ('utilization', 0.6, 'share of bandwidth and FLOPs that is reached'),
    ('vocab_size', 50304, 'tokens'),
    ('kv_dtype', 'bfloat16', 'storage of K and V', ('float32', 'bfloat16', 'float16', 'int8')),
    ('weight_dtype', 'bfloat16', 'storage of the weights', ('float32', 'bfloat16', 'int8')),
    ('json', False, 'end with one JSON document on the last line'),
) + MODEL

BENCH = _keys(
    ('mode', 'train', "what to time: 'train' (forward, backward, update), 'decode' (tokens out of a filled cache), 'prefill' "
     "(a prompt's first token), 'serve' (many requests, continuous batching against static), 'recompute' (training steps by "
     "policy: time and memory), 'lengths' (training steps by length), 'kernels' (on CUDA: attention and the K/V write alone), "
     "'chat' (conversations whose past is kept)",
     ('train', 'decode', 'prefill', 'serve', 'recompute', 'lengths', 'kernels', 'chat')),
    ('against', '', "mode decode: also time, interleaved, 'vanilla' (GPT-2's memory in the same shape, in our code; modes "
     "prefill, recompute and lengths too), 'vanilla_float32' (the same with weights and K/V in float32), 'float32_kv' (the "
     "same model with K/V in float32), or with the same vanilla weights 'hf' (transformers' generate), 'nanogpt' (its "
     "generate), 'llama.cpp' (f32, f16, q8_0) or 'ctranslate2' (float32, int8); mode train: 'nanogpt'; mode "
     "prefill: 'untrimmed' (every token in every layer); modes serve and prefill: 'vllm' (the same model, exported)",
     ('', 'vanilla', 'vanilla_float32', 'float32_kv', 'untrimmed', 'hf', 'nanogpt', 'llama.cpp', 'ctranslate2', 'vllm')),
    ('batch_sizes', '1', "all modes but train: sequences at once, a list as '1,4,16'"),
    ('contexts', '512', "all modes but train: tokens held when the first timed token is made, as '1024,4096'; "
     'of the prompt, with modes prefill and serve or against other programs; length of the whole sequences, with modes '
     'recompute and lengths, or a budget'),
    ('steps', 16, 'mode decode: tokens timed in a round'),
    ('repeats', 5, 'all modes but train and kernels: timed rounds, at least 5, after one to warm up; figures are medians'),
    ('kv_dtype', 'auto', "modes decode, prefill and serve: storage of the KV cache; 'auto' = the compute dtype",
     KV_DTYPES),
    ('prefill_chunk', 0, "mode prefill: tokens appended at a time; 0 = the whole prompt (mode serve: the engine's default)"),
    ('requests', 64, 'mode serve: requests, all there from the start; contexts are their prompts, batch_sizes the rows; mode '
     'chat: requests that are counted'),
    ('dialogues', 64, 'mode chat: how many go on at any time, each of up to the longest of contexts'),
    ('message', 20, 'mode chat, and prefill against vllm: tokens of the message whose first token is timed'),
    ('shares', '100,50,25', 'mode chat: sizes of the store, in percent of what all dialogues take'),
    ('page_sizes', '64', 'mode chat: positions of a page, which is a block of the store'),
    ('output_lengths', '16,256', 'mode serve: shortest and longest of the new tokens of a request, log-uniform between'),
    ('budget', '', "mode decode: KV memory, as '1GB'; in place of batch_sizes, as many sequences as fit"),
    ('policies', 'none,selective,mlp,block,sqrt', 'mode recompute: the policies to compare, after none'),
    ('recompute', 'none', 'mode lengths: the policy, as in train.py'),
    ('chunked_loss', True, 'modes lengths and train (there if given): the loss a chunk at a time'),
    ('tune', False, 'mode kernels: other layouts of the decode kernel too'),
    ('nanogpt', '', 'modes decode and train against nanogpt: folder of a nanoGPT checkout'),
    ('save', '', 'also write the JSON document to this file'),
    ('batch_size', 12, 'mode train: sequences in a step'),
    ('real_data', True, 'mode train: windows of the data set; False: one fixed random batch'),
    ('dataset', 'openwebtext', 'folder under data/ with its token files, which say the vocabulary (50304 without)'),
    ('seed', 1337, 'seed of every random number'),
) + DEVICE + ATTENTION + WEIGHTS + _keys(
    ('compile', True, 'torch.compile: in mode train the model, in others its MLPs, and only if given'),
    ('profile', False, 'mode train: run the torch profiler in place of the clock; writes a trace to bench_log/'),
    ('json', False, 'end with one JSON document on the last line'),
) + MODEL

ABLATE = _keys(
    ('name', '', 'of the ladder; by default that of its config file'),
    ('folder', '', "where results go, and what is trained in its folder runs/; '' = results/NAME"),
    ('base', '', 'training config that the first row starts from'),
    ('rows', {}, 'the ladder: name -> what changes against the row above, keys of train.py, kv_dtype, weight_dtype or '
     'at_inference'),
    ('side_rows', {}, 'alternatives: name -> (name of the row it departs from, what changes)'),
    ('baseline', '', "the row that all are compared with, beside the first and the one above: the best with all of the memory"),
    ('seeds', '1,2,3', 'seeds that each row of the ladder is trained with'),
    ('side_seeds', '', "those of side rows; '' = the same"),
    ('only', '', "train no other rows than these: names with commas between; a '+' in front may be left out"),
    ('jobs', 1, 'runs that train at the same time, on each device'),
    ('devices', '', "where to train, as 'cuda:0,cuda:1'; '' = device"),
    ('eval_windows', 0, 'windows of the validation split that the trained models are judged on; 0 = all that do not overlap'),
    ('recall', '', "another ladder of the same rows, trained to recall: its folder, beside this one's"),
    ('speed', True, 'measure decoding, prefill and training speed of every row, when all are trained'),
    ('contexts', '256,1024,4096', 'tokens held when decoding is timed, and lengths that KV bytes are given for'),
    ('batch_sizes', '1,16', 'sequences at once when decoding is timed'),
    ('shape', {}, "settings of the model whose speed is measured, where the trained one's is not meant, as dict(n_layer=12)"),
    ('repeats', 5, 'timed rounds, at least 5, after one to warm up'),
    ('pictures', True, 'draw the pictures of the report, for which matplotlib is needed'),
    ('also_as', '', 'also write them in this format, for papers', ('', 'svg', 'pdf')),
    ('dry_run', False, 'only say what would be trained'),
    ('report_only', False, 'train and measure nothing, make the report from the results that there are'),
    ('json', False, 'end with one JSON document on the last line'),
)
# what a ladder's config and command line may set for all rows
ABLATE_ALL = ABLATE + tuple(key for key in TRAIN if key.name not in (
    'seed', 'out_dir', 'init_from', 'resume_from', 'eval_only', 'backend', 'memory_report'))

# program -> its keys, in the order of its --help
PROGRAMS = {'train': TRAIN, 'sample': SAMPLE, 'bench': BENCH, 'chat': CHAT, 'serve': SERVE, 'kv': KV, 'memory': MEMORY,
            'ablate': ABLATE_ALL, 'convert': MODEL, 'evaluate': EVALUATE, 'capacity': CAPACITY}

# config files are shared: a key of any program may stand in one, and the others pass over it
ALL_KEYS = {key.name: key for keys in reversed(PROGRAMS.values()) for key in keys}

"""All keys of the programs: names, defaults and one-line descriptions. `--help` and the checks are
generated from these."""
import dataclasses
from dataclasses import dataclass

from config.gpt_config import GPTConfig


@dataclass(frozen=True)
class Key:
    """A setting. Its type is that of its default, so the default is never None."""
    name: str
    default: bool | int | float | str | dict
    meaning: str
    choices: tuple = ()
    folder: str = ''  # file that a folder must contain to be accepted instead of a choice


def _keys(*rows):
    return tuple(Key(*row) for row in rows)


STORED_DTYPES = ('float32', 'bfloat16', 'float16', 'int8', 'int4')
KV_DTYPES = ('auto', *STORED_DTYPES)
GPT2_TYPES = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # OpenAI's, on the Hugging Face hub
GPT2_FOLDER = "a Hugging Face GPT-2 (config.json and *.safetensors)"

# keys that several programs share
SEED = _keys(('seed', 1337, 'seed of every random number generator'))
RUN = _keys(('out_dir', 'out', 'folder of the checkpoint (ckpt.pt) and metrics.jsonl')) + SEED
DEVICE = _keys(
    ('device', 'auto', "'cpu', 'cuda', 'cuda:1', 'mps', or 'auto' = CUDA, else MPS, else CPU"),
    ('dtype', 'auto', "compute dtype: 'auto' = bfloat16 (else float16) on CUDA, else float32. In "
     "training on a CPU 'auto' uses C++ kernels, and bfloat16 if the processor multiplies it",
     ('auto', 'float32', 'bfloat16', 'float16')),
)
WEIGHTS = _keys(
    ('weight_dtype', 'auto', "weight matrices: 'auto' = dtype, 'int8', 'int4' (docs/decoding.md)",
     ('auto', 'int8', 'int4')),
    ('int4_group', 32, "with weight_dtype='int4': columns that share a scale"),
    ('native', True, 'on a CPU: decode with the C++ extension, compiled on first use'),
    ('captured', True, 'on CUDA: run decode steps as CUDA graphs (from 32 tokens on)'),
)
ATTENTION = _keys(
    ('attention_backend', 'auto', "attention over whole sequences: 'sdpa' (torch), 'flex' "
     "(FlexAttention, CUDA), 'flash_attn' (the package), 'varlen' (torch's FlashAttention, CUDA), "
     "'math' (slow reference), 'auto' = the fastest available (docs/gpu.md)",
     ('auto', 'sdpa', 'flex', 'flash_attn', 'varlen', 'math')),
)
SAMPLER = _keys(
    ('temperature', 0.8, 'divides the logits: below 1 safer, above 1 more varied, 0 = greedy'),
    ('top_k', 200, 'sample only from the k most likely tokens; 0 = all'),
    ('top_p', 1.0, 'sample only from the most likely tokens with this total probability; 1 = all'),
)
KV_DTYPE = _keys(('kv_dtype', 'auto', "dtype of the KV cache; 'auto' = compute dtype", KV_DTYPES))
JSON = _keys(('json', False, 'end with one JSON document on the last line'))
# GPTConfig's fields, except vocab_size, which comes from the data set; nanoGPT's train.py turns
# GPT-2's biases off, GPTConfig has them on
MODEL = tuple(Key(f.name, f.default if f.name != 'bias' else False, f.metadata['meaning'],
                  f.metadata['choices'])
              for f in dataclasses.fields(GPTConfig) if f.name != 'vocab_size')

TRAIN = RUN + _keys(
    ('eval_interval', 2000, 'iterations between evaluations (and checkpoints)'),
    ('log_interval', 1, 'iterations between log lines'),
    ('eval_iters', 200, 'batches per split in one evaluation; always the same windows'),
    ('eval_only', False, 'evaluate once and stop'),
    ('always_save_checkpoint', True, 'save after every evaluation, not only improved ones'),
    ('checkpoint_interval', 0, 'also save every so many iterations; 0 = at evaluations only'),
    ('init_from', 'scratch', "'scratch', 'resume' from out_dir, or GPT-2's weights to finetune",
     ('scratch', 'resume') + GPT2_TYPES, GPT2_FOLDER),
    ('resume_from', 'ckpt.pt', "with init_from='resume': checkpoint in out_dir"),
    ('wandb_log', False, 'log to Weights & Biases'),
    ('wandb_project', 'owt', 'Weights & Biases project'),
    ('wandb_run_name', 'gpt2', 'Weights & Biases run name'),
    ('tensorboard_log', False, 'log to TensorBoard, in out_dir/tensorboard'),
    ('dataset', 'openwebtext', 'folder under data/; prepared on first use if possible'),
    ('recall_task', 'distances=3,16,47', "with dataset='recall': distances of the answers, and "
     'other fields of data/recall/tasks.py, such as n_tokens=32'),
    ('lookup_task', 'pairs=2,4,8,16', "with dataset='lookup': numbers of facts in a sequence, and "
     'other fields of data/recall/tasks.py, such as gap=32'),
    ('gradient_accumulation_steps', 5 * 8, 'micro-batches per iteration, over all processes'),
    ('batch_size', 12, 'sequences in a micro-batch'),
) + MODEL + _keys(
    ('learning_rate', 6e-4, 'peak learning rate'),
    ('max_iters', 600000, 'iterations to train'),
    ('optimizer', 'adamw', "'adamw', 'muon' (matrices of blocks; AdamW for the rest)",
     ('adamw', 'muon')),
    ('muon_momentum', 0.95, "with optimizer='muon': momentum"),
    ('weight_decay', 1e-1, 'weight decay, on matrices only'),
    ('beta1', 0.9, 'AdamW beta1'),
    ('beta2', 0.95, 'AdamW beta2'),
    ('grad_clip', 1.0, 'largest gradient norm; 0 = no clipping'),
    ('max_skipped', 20, 'stop after so many non-finite iterations in a row (each is skipped)'),
    ('data_seed', -1, 'seed of the batch order; -1 = seed, after initialization, as in nanoGPT'),
    ('data_order', 'random', "training windows: 'random' (with replacement, as in nanoGPT), "
     "'sequential', 'shuffled' (each once an epoch)", ('random', 'sequential', 'shuffled')),
    ('data_prefetch', 2, 'batches that a thread prepares ahead; 0 = none'),
    ('decay_lr', True, 'warm up and decay the learning rate'),
    ('lr_schedule', 'cosine', "'cosine', or 'wsd' (constant, then linear for cooldown_iters)",
     ('cosine', 'wsd')),
    ('cooldown_iters', 0, "with lr_schedule='wsd': decay iterations; 0 = lr_decay_iters / 5"),
    ('warmup_iters', 2000, 'iterations of linear warm-up'),
    ('lr_decay_iters', 600000, 'iteration at which min_lr is reached'),
    ('min_lr', 6e-5, 'lowest learning rate'),
    ('recompute', 'none', "activations to recompute in the backward pass: 'none', 'selective', "
     "'mlp', 'block', 'every:K' blocks, 'sqrt', 'offload' (to host memory instead)"),
    ('checkpoint_blocks', False, "the same as recompute='block'"),
    ('chunked_loss', True, 'compute large logits and their gradients in chunks, to save memory'),
    ('memory_report', False, 'before training, report the memory it will take'),
    ('parallel', 'ddp', "under torchrun: 'ddp' (replicas), or 'fsdp' (FSDP2: sharded parameters, "
     'gradients and optimizer state)', ('ddp', 'fsdp')),
    ('backend', 'nccl', "torch.distributed backend: 'nccl' (CUDA) or 'gloo' (CPU)",
     ('nccl', 'gloo')),
) + DEVICE + ATTENTION + _keys(
    ('tf32', True, 'on CUDA: float32 matmuls in TF32, as in nanoGPT'),
    ('compile', True, 'torch.compile the model'),
)

MEMORY = JSON + TRAIN

# programs that run a trained model: where it runs, and its shape if there is no checkpoint
RUNNING = DEVICE + WEIGHTS + _keys(
    ('compile', False, 'torch.compile the MLPs'),
    ('dataset', 'shakespeare_works', 'data set whose alphabet to use if no checkpoint names one'),
) + MODEL
SOURCE = _keys(
    ('init_from', 'resume', "'resume' (from out_dir), 'random' weights, or GPT-2's weights",
     ('resume', 'random') + GPT2_TYPES, GPT2_FOLDER),
    ('resume_from', 'ckpt.pt', "with init_from='resume': checkpoint in out_dir, as ckpt_best.pt"),
) + RUN
SAMPLE = SOURCE + _keys(
    ('start', '\n', "prompt, or 'FILE:path' of a text file that holds it"),
    ('prompts', '', 'file of prompts: one a line, or in a .jsonl file one JSON string or object '
     '({"prompt": "To be"}) a line; answers are JSON lines on stdout'),
    ('num_samples', 10, 'samples per prompt (with prompts: 1, if not given)'),
    ('parallel', 1, 'samples decoded in one batch (with prompts: up to 16, if not given)'),
    ('max_new_tokens', 500, 'tokens to generate per sample'),
    ('stop', '', "text, or a list of texts, that ends a sample (not printed): "
     "\"['\\n\\n', '<|endoftext|>']\""),
) + SAMPLER + _keys(
    ('min_p', 0.0, "with prompts: least probability relative to the most likely token's; 0 = any"),
    ('repetition_penalty', 1.0, 'with prompts: above 1, tokens that have occurred are less likely'),
    ('logprobs', -1, 'with prompts: log-probability of tokens and the k most likely; -1 = none'),
    ('ignore_eos', False, 'with prompts: go on after <|endoftext|>, which else ends the text'),
) + KV_DTYPE + _keys(
    ('kv_budget', '', "with prompts: KV memory, as '1GB'; '' = all rows at full length, but at "
     "most half of the machine's memory"),
    ('prefix_budget', '', "with prompts: host memory for shared prefixes, as '1GB'; '' = none"),
    ('watch', False, "draw the KV cache in the terminal while a sample of 'start' is written"),
    ('watch_speed', 100.0, 'with watch: tokens per second at most; 0 = no limit'),
    ('report', True, 'print the KV-cache report after the samples'),
) + JSON + RUNNING

TALKING = SOURCE + _keys(
    ('user', '', "your name in conversations (role 'user'); '' = USER, or ROMEO in Shakespeare"),
    ('reply_as', '', "the model's name (role 'assistant'); '' = MODEL, or JULIET in Shakespeare"),
    ('turn', '{name}.\n{text}\n\n', 'template of a turn; what follows {text} ends a reply'),
)
CHAT = TALKING + _keys(
    ('history', '', "file of the conversation; '' = chat.json in out_dir"),
    ('max_new_tokens', 300, 'longest reply, in tokens; at most half of max_seq_len'),
) + SAMPLER + _keys(
    ('max_seq_len', 0, 'tokens of conversation to keep, dropping the oldest turns; 0 = block_size, '
     'or up to 32 times that (at most 8,192) with RoPE and local layers'),
) + KV_DTYPE + _keys(
    ('prefix_budget', '256MB', 'host memory for the K/V of earlier turns'),
) + RUNNING

SERVE = TALKING + _keys(
    ('host', '127.0.0.1', "address to listen on; '127.0.0.1' = this machine, '0.0.0.0' = any"),
    ('port', 8000, 'port to listen on; 0 = a free one, which is printed'),
    ('api_key_file', '', "file of API keys, one a line; '' = NANOKV_API_KEY, else none needed"),
    ('cors', '', "origin whose web pages may use the server, as 'http://localhost:3000'; '*' = "
     "any; '' = none but its own"),
    ('model_name', '', "name of the model in the API; '' = the name of the folder out_dir"),
    ('strict_messages', False, 'reject messages that contain the end of a turn (by default, a '
     'blank line); False = remove their blank lines'),
    ('max_new_tokens', 256, 'longest answer, in tokens, unless the request sets it'),
    ('parallel', 16, 'requests that run at once'),
    ('max_seq_len', 0, 'longest prompt plus answer, in tokens; 0 = block_size, or up to 32 times '
     'that (at most 8,192) with RoPE and local layers'),
    ('max_waiting', 64, 'requests that may wait; further ones are rejected (429)'),
    ('max_body', '1MB', 'largest request body'),
    ('timeout', 300.0, 'seconds after which a request is cancelled (504)'),
    ('page', True, 'serve a page to chat at /, and what it shows of the KV cache at /nanokv/'),
    ('log_requests', True, 'print a line for each finished request'),
    ('grace', 10.0, 'seconds to finish running requests on Ctrl-C or SIGTERM'),
) + KV_DTYPE + _keys(
    ('kv_budget', '', "KV memory, as '1GB'; '' = all rows at full length, but at most half of the "
     "machine's memory"),
    ('prefix_budget', '256MB', "host memory for the prefix cache; '' = no prefix cache"),
    ('shared_prefix', False, "with API keys: requests of different keys reuse each other's "
     'prompts, and can find out what these are'),
) + RUNNING

EVALUATE = SOURCE + _keys(
    ('text', '', 'text file to evaluate'),
    ('context', 0, 'most tokens of context for a prediction; 0 = block_size'),
    ('stride', 0, 'tokens between windows: smaller = more context, slower; 0 = context / 2'),
    ('batch_size', 8, 'windows in a batch'),
    ('kv_dtype', '', "'' = forward passes without a cache; else the dtype of a KV cache",
     ('',) + KV_DTYPES),
) + JSON + RUNNING

DATASET = tuple(key for key in TRAIN if key.name in ('dataset', 'recall_task', 'lookup_task'))

KV = _keys(
    ('max_seq_len', 0,
     'sequence length to plan for; 0 = block_size (models of Hugging Face: 4,096)'),
    ('batch', 1, 'sequences in the cache'),
    ('kv_dtype', 'bfloat16', 'dtype of the slot table (the comparison has all)', STORED_DTYPES),
    ('budget', '', "KV memory, as '1GB' or '512MiB': also report how many sequences fit"),
    ('svg', '', 'also draw the plan of one sequence, to this .svg file'),
    ('like', '', "models of Hugging Face: 'nanokv' = also their shape with nanoKV's plan",
     ('', 'nanokv')),
    ('page_size', 16, "models of Hugging Face: positions in a page of vLLM (its block_size)"),
    ('step_tokens', 8192, "models of Hugging Face: vLLM's max_num_batched_tokens"),
) + DATASET + JSON + MODEL

BENCH = _keys(
    ('mode', 'train', "what to time: 'train' (whole steps), 'decode' (tokens from a filled cache), "
     "'prefill' (time to first token), 'serve' (continuous against static batching), 'recompute' "
     "(training steps by policy), 'kernels' (attention and K/V write, CUDA)",
     ('train', 'decode', 'prefill', 'serve', 'recompute', 'kernels')),
    ('against', '', "baseline, timed interleaved: 'vanilla' (GPT-2's KV cache, our code; decode, "
     "prefill, recompute); in mode decode also 'vanilla_float32', 'float32_kv' (same model, "
     "float32 cache); in train 'nanogpt'; in prefill 'untrimmed' (all tokens in all layers); in "
     "prefill and serve 'vllm'",
     ('', 'vanilla', 'vanilla_float32', 'float32_kv', 'untrimmed', 'nanogpt', 'vllm')),
    ('batch_sizes', '1', "all modes but train: batch sizes, as '1,4,16'"),
    ('contexts', '512', "all modes but train: tokens in the cache, as '1024,4096'; tokens of the "
     'prompt in prefill and serve; of the sequence in recompute or with a budget'),
    ('steps', 16, 'mode decode: tokens timed in a round'),
    ('repeats', 5, 'all modes but train and kernels: timed rounds, at least 5, after a warm-up'),
) + KV_DTYPE + _keys(
    ('prefill_chunk', 0, "mode prefill: tokens per chunk; 0 = one chunk (serve: the engine's)"),
    ('requests', 64, 'mode serve: number of requests'),
    ('message', 20, 'prefill against vllm: tokens of the timed message'),
    ('output_lengths', '16,256', 'mode serve: shortest and longest output (log-uniform)'),
    ('budget', '', "mode decode: KV memory to fill, as '1GB'; replaces batch_sizes"),
    ('policies', 'none,selective,mlp,block,sqrt', 'mode recompute: policies to compare'),
    ('chunked_loss', True, 'mode train (not against nanoGPT): loss in chunks'),
    ('nanogpt', '', 'with against=nanogpt: folder of a nanoGPT checkout'),
    ('save', '', 'also write the JSON document to this file'),
    ('batch_size', 12, 'mode train: sequences in a step'),
    ('real_data', True, 'mode train: windows of the data set; False = one fixed random batch'),
    ('dataset', 'openwebtext', 'folder under data/ of the tokens and vocabulary (50304 if absent)'),
) + SEED + DEVICE + ATTENTION + WEIGHTS + _keys(
    ('compile', True, 'torch.compile the model (mode train) or its MLPs (others, only if given)'),
    ('profile', False, 'mode train: write a profiler trace to bench_log/ instead of timing'),
) + JSON + MODEL

ABLATE = _keys(
    ('name', '', "name of the ladder; '' = that of its config file"),
    ('folder', '', "folder of the results, with the trained models in runs/; '' = results/NAME"),
    ('base', '', 'training config of the first row'),
    ('rows', {}, 'the ladder: name -> changes against the row above (keys of train.py, kv_dtype, '
     'weight_dtype or at_inference)'),
    ('side_rows', {}, 'alternatives: name -> (name of the row they depart from, changes)'),
    ('baseline', '', 'row to compare with, besides the first and previous: best at full memory'),
    ('seeds', '1,2,3', 'training seeds of the rows'),
    ('side_seeds', '', "training seeds of the side rows; '' = seeds"),
    ('only', '', "train only these rows, separated by commas; a leading '+' may be omitted"),
    ('jobs', 1, 'concurrent runs on each device'),
    ('devices', '', "where to train, as 'cuda:0,cuda:1'; '' = device"),
    ('eval_windows', 0, 'validation windows per model; 0 = all that do not overlap'),
    ('identifiers', False, 'the data are Python source: measure the loss of identifiers, by the '
     'distance to their last use'),
    ('contexts', '256,1024,4096', 'tokens in the cache for KV bytes'),
    ('pictures', True, 'draw the plots of the report (needs matplotlib)'),
    ('dry_run', False, 'only print what would be trained'),
    ('report_only', False, 'make the report from existing results; train and measure nothing'),
) + JSON
# keys of train.py that a ladder may set for all of its rows: all except those set per run
PER_RUN = ('seed', 'out_dir', 'init_from', 'resume_from', 'eval_only', 'backend', 'memory_report')
ABLATE_ALL = ABLATE + tuple(key for key in TRAIN if key.name not in PER_RUN)

CONFORM = _keys(
    ('random', 0, 'check so many random configs in place of one'),
    ('as_given', False, 'check the config itself, not a small one with the same form of plan'),
) + SEED

# program -> its keys, in the order of its --help
PROGRAMS = {'train': TRAIN, 'sample': SAMPLE, 'bench': BENCH, 'chat': CHAT, 'serve': SERVE,
            'kv': KV, 'memory': MEMORY, 'ablate': ABLATE_ALL, 'convert': MODEL,
            'conform': MODEL + CONFORM, 'evaluate': EVALUATE}

# Config files are shared: they may set keys of any program, and the other programs ignore them.
ALL_KEYS = {key.name: key for keys in reversed(PROGRAMS.values()) for key in keys}

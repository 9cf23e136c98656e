"""llama.cpp, called through llama-cpp-python's C API; every row is a sequence in one context."""
import contextlib
import ctypes
import functools
import json
from pathlib import Path

import numpy as np
import torch

from config.errors import UserError
from data.tokenizer import BPETokenizer
from interop.tokenizer_files import byte_pairs
from lab.benchmarks.engines import Generated, timed

PIECE = 512   # prompt tokens that llama.cpp gets per call
CELLS = 256   # the size of its contexts is a multiple of this


class LlamaCpp:
    """The weights of `ours` in llama.cpp: as f32, f16 and q8_0."""
    install = 'CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python gguf'
    # its GELU is a float16 table: GPT-2 124M's logits are off by 1e-3
    exact, tolerance = ('llama.cpp f32',), 5e-3

    def __init__(self, ours, folder, stack):
        import gguf
        import llama_cpp as lib
        self.lib, self.config, self.models = lib, ours.config, {}
        silence(lib)
        lib.llama_backend_init()
        how = lib.llama_model_default_params()
        if getattr(torch.cpu, '_is_amx_tile_supported', bool)():  # its kernels crash there
            how.use_extra_bufts = False
        path = Path(folder, 'f32')
        write_gguf(gguf, ours, path)
        for name, kind in (('f32', None), ('f16', lib.LLAMA_FTYPE_MOSTLY_F16),
                           ('q8_0', lib.LLAMA_FTYPE_MOSTLY_Q8_0)):
            options = lib.llama_model_quantize_default_params()
            options.ftype, options.nthread = kind or 0, torch.get_num_threads()
            file = str(path.with_name(name)).encode()
            if kind:
                lib.llama_model_quantize(str(path).encode(), file, ctypes.byref(options))
            model = lib.llama_model_load_from_file(file, how)
            if not model:
                raise UserError(f"against='llama.cpp': it cannot load this model as {name}")
            stack.callback(lib.llama_model_free, model)
            self.models[f'llama.cpp {name}'] = model

    def facts(self) -> dict:
        return {'llama.cpp': f'(llama-cpp-python) {self.lib.__version__}',
                'llama.cpp K/V': 'float16',
                'llama.cpp processor': self.lib.llama_print_system_info().decode().strip(' |')}

    def logits(self, idx):
        with contextlib.ExitStack() as stack:
            one = LlamaRound(self, self.models[self.exact[0]], idx, 1, stack,
                             self.lib.GGML_TYPE_F32)
            return torch.from_numpy(one.append(idx.numpy(), 0, 0, range(idx.size(1))).copy())[None]

    def sides(self, prompt, steps: int, stack) -> dict:
        return {name: LlamaRound(self, model, prompt, steps, stack)
                for name, model in self.models.items()}


class LlamaRound:
    """Greedy generation in its own context, with one sequence per row."""

    def __init__(self, peer: LlamaCpp, model, prompt, steps: int, stack, kv_type=None):
        self.lib, self.vocab_size = peer.lib, peer.config.vocab_size
        self.prompt, self.steps = prompt.numpy(), steps
        lib, (B, T) = peer.lib, prompt.shape
        cells = -(-(T + steps) // CELLS) * CELLS
        p = lib.llama_context_default_params()
        p.n_ctx, p.n_seq_max, p.kv_unified = B * cells, B, False
        p.n_batch, p.n_ubatch = max(PIECE, B), PIECE
        p.n_threads = p.n_threads_batch = torch.get_num_threads()
        if kv_type is not None:
            p.type_k = p.type_v = kv_type
        self.context = lib.llama_init_from_model(model, p)
        if not self.context:
            raise UserError(f"against='llama.cpp': it has no context for {B} x {T + steps} tokens")
        stack.callback(lib.llama_free, self.context)
        self.batch = lib.llama_batch_init(p.n_batch, 0, 1)
        stack.callback(lib.llama_batch_free, self.batch)
        self.kv_bytes = (2 * peer.config.n_layer * peer.config.n_embd * 2  # in float16
                         * lib.llama_n_ctx(self.context))

    def append(self, ids: np.ndarray, row: int, start: int, wanted) -> np.ndarray:
        """Append ids (n, t) from position `start` to sequences `row`, ... Returns the logits at the
        positions `wanted` of each, (n * wanted, V), valid until the next call."""
        batch, (n, t) = self.batch, ids.shape
        batch.n_tokens = n * t
        for i, token in enumerate(ids.ravel().tolist()):
            j = i % t
            batch.token[i], batch.pos[i], batch.logits[i] = token, start + j, j in wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row + i // t
        if self.lib.llama_decode(self.context, batch):
            raise UserError(f"against='llama.cpp': it cannot decode {n} x {t} tokens")
        self.lib.llama_synchronize(self.context)
        shape = (n * len(wanted), self.vocab_size)
        return np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), shape)

    def prefill(self) -> np.ndarray:
        """Return the first tokens (B,). Short prompts share a call, and long ones are split."""
        B, T = self.prompt.shape
        together, first = max(1, PIECE // T), []
        for row in range(0, B, together):
            for start in range(0, T, PIECE):
                ids = self.prompt[row:row + together, start:start + PIECE]
                logits = self.append(ids, row, start, (ids.shape[1] - 1,))
            first.append(logits.argmax(1))
        return np.concatenate(first)

    def __call__(self) -> Generated:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)
        return timed(self.generate)

    def generate(self, stamp) -> torch.Tensor:
        tokens = [self.prefill()]
        stamp()
        for position in range(self.prompt.shape[1], self.prompt.shape[1] + self.steps - 1):
            tokens.append(self.append(tokens[-1][:, None], 0, position, (0,)).argmax(1))
        stamp()
        return torch.from_numpy(np.stack(tokens, 1))


@functools.cache  # the callback must live as long as the library
def silence(lib):
    callback = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(callback, ctypes.c_void_p(0))
    return callback


def write_gguf(gguf, ours, path: Path, tokenizer: BPETokenizer | None = None) -> None:
    """Write the model in llama.cpp's format, in float32."""
    c = ours.config
    writer = gguf.GGUFWriter(path, 'gpt2')
    for name, value in dict(
            file_type=gguf.LlamaFileType.ALL_F32, layer_norm_eps=1e-5,
            tokenizer_model='gpt2' if tokenizer else 'none',
            vocab_size=c.vocab_size, context_length=c.block_size, block_count=c.n_layer,
            head_count=c.n_head, embedding_length=c.n_embd,
            feed_forward_length=c.resolved_mlp_hidden).items():
        getattr(writer, f'add_{name}')(value)
    if tokenizer:
        made = json.loads(byte_pairs(tokenizer.encoding).to_str())
        known = {i: token for token, i in made['model']['vocab'].items()}
        known |= {each['id']: each['content'] for each in made['added_tokens']}
        writer.add_tokenizer_pre('gpt-2')
        writer.add_token_list([known.get(i, f'[PAD{i}]') for i in range(c.vocab_size)])
        writer.add_token_merges([' '.join(pair) for pair in made['model']['merges']])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, c.n_layer)
    for name, x in ours.transformer.state_dict(prefix='transformer.').items():
        writer.add_tensor(names.get_name(name, ('.weight', '.bias')), x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

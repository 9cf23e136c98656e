"""KV bytes of ten well-known models: what transformers allocates, what we say, and what two public
calculators say.

    pip install --no-deps hf-mem==0.5.6 hf-vram-calc==1.0.9 accelerate
    python lab/scripts/kv_calculators.py --save=results/accounting/calculators.json

The models' configs are in kv_calculators.json, with the keys that say something about memory.
Each model is built in full on torch's meta device, where tensors have shapes but no data, and reads
the tokens; the bytes of its cache's tensors are what is true. Mixtures of experts are built dense:
which expert a token goes to cannot be computed there, and experts store nothing.
"""
import argparse
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config.errors import UserError  # noqa: E402
from configurator import run_program  # noqa: E402
from kv import account  # noqa: E402
from lab.ablation.results import write_json  # noqa: E402

MODELS = Path(__file__).with_suffix('.json')
DENSE = {'DeepSeek V3': dict(first_k_dense_replace=61),
         'Qwen3-Next 80B': dict(mlp_only_layers=list(range(48)))}
LENGTHS = 4096, 32768


@torch.inference_mode()
def allocated(name: str, config: dict, tokens: int) -> int:
    """Bytes of the tensors in transformers' DynamicCache after `tokens` tokens, in bfloat16."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
    settings = CONFIG_MAPPING[config['model_type']].from_dict(config).get_text_config(decoder=True)
    for key, value in DENSE.get(name, {}).items():
        setattr(settings, key, value)
    settings.max_position_embeddings = max(settings.max_position_embeddings, tokens)
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()
        idx = torch.zeros(1, tokens, dtype=torch.long)
    cache = DynamicCache(config=settings)
    for some in idx.split([tokens - 1, 1], dim=1):
        model(some, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache_nbytes(cache)


def cache_nbytes(cache) -> int:
    """Bytes of all tensors with more than one dimension in the layers of a cache."""
    values = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [x for value in values for x in (value.values() if isinstance(value, dict)
                                               else [value])]
    return sum(x.nbytes for x in tensors if torch.is_tensor(x) and x.dim() > 1)


def hf_mem(config: dict, tokens: int) -> int | None:
    """hf-mem's estimate (`--experimental`); None where it gives none."""
    from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size
    text = config.get('text_config', config)
    if not {'hidden_size', 'num_hidden_layers', 'num_attention_heads'} <= text.keys():
        return None
    return compute_safetensors_kv_cache_size(config=text, cache_dtype='BF16', max_model_len=tokens)


def hf_vram_calc(config: dict, tokens: int) -> int | None:
    """hf-vram-calc's estimate; None where it fails."""
    from hf_vram_calc import ConfigManager, ConfigParser, VRAMCalculator
    with tempfile.NamedTemporaryFile('w', suffix='.json') as file:
        json.dump(config, file)
        file.flush()
        try:
            parsed = ConfigParser.parse_config(file.name, 'model')
            found = VRAMCalculator(ConfigManager()).calculate_kv_cache_memory(
                parsed, 'bf16', 1, tokens)
        except Exception as e:  # whatever it raises for a config that it cannot read
            print(f'hf-vram-calc: {e}', file=sys.stderr)
            return None
    return round(found * 2 ** 30)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--save', default='', help='also write the JSON to this file')
    args = parser.parse_args(argv)
    packages = 'transformers', 'hf-mem', 'hf-vram-calc'
    try:
        versions = {name: importlib.metadata.version(name) for name in packages}
    except importlib.metadata.PackageNotFoundError as e:
        raise UserError(f'{e.name} is not installed: the docstring has the command') from e
    rows = []
    for name, config in json.loads(MODELS.read_text(encoding='utf-8')).items():
        for tokens in LENGTHS:
            ours = account(config, max_seq_len=tokens)['engines']['transformers, dynamic']
            row = {'model': name, 'tokens': tokens, 'allocated': allocated(name, config, tokens),
                   'nanokv': ours, 'hf-mem': hf_mem(config, tokens),
                   'hf-vram-calc': hf_vram_calc(config, tokens)}
            print(' '.join(f'{key}={value}' for key, value in row.items()), flush=True)
            rows.append(row)
    document = {'dtype': 'bfloat16', 'batch': 1, 'versions': versions, 'rows': rows}
    if args.save:
        write_json(Path(args.save), document)
    print(json.dumps(document))


if __name__ == '__main__':
    run_program(main)

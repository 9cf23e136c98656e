"""The compiled decode step, as far as it can be tested without a GPU: Dynamo traces it with the
real kernels, Inductor's passes decide which of their arguments to copy, and the resulting graph
runs with the kernels interpreted."""
import pytest

from tests.helpers.without_gpu import run_alone

PROGRAM = '''
from tests.helpers.without_gpu import pretend
pretend()
import importlib.util, json, sys
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V
from attention.backends import triton_enabled
from common.gpt_config import GPTConfig
from engine.pages.cache import PagedKVCache
from engine.steps.fused import fuse
from engine.steps.static import StaticCache
from tests.helpers.models import SHORT_STACK, max_gap, random_model, tokens

kv_dtype, layout = sys.argv[1:]
model = random_model(GPTConfig(**SHORT_STACK), torch.float32)
fuse(model)
shared, copied, find_spec = [], [], importlib.util.find_spec


def not_while_tracing(*args):
    assert not torch.compiler.is_dynamo_compiling(), 'torch 2.11 cannot trace find_spec'
    return find_spec(*args)


def new_cache():
    pages = dict(cache_class=PagedKVCache, n_pages=30, page_size=4) if layout == 'paged' else {}
    cache = model.new_cache(2, 40, kv_dtype, **pages)
    with triton_enabled(False):
        model(tokens(2, 11), cache=cache, lens=[11, 5])
    for row, length in enumerate([12, 6] if layout == 'paged' else []):
        cache.reserve(row, length)
    static = StaticCache(cache, 2)
    static.set([11, 5])
    return cache, static


def lowered(graph, inputs):
    """The graph as Inductor has it before it generates code. Adds to `shared` what a kernel writes
    and is given twice, and to `copied` the copies in the graph."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.triton_kernel_wrapper_functional:
            written, given = node.kwargs['tensors_to_clone'], node.kwargs['kwargs']
            values = list(given.values())
            shared.extend(arg for arg in written if values.count(given[arg]) > 1)
    with V.set_fake_mode(detect_fake_mode(inputs)):
        post_grad_passes(graph, is_inference=True)
    graph.recompile()
    copied.extend(str(node) for node in graph.graph.nodes
                  if 'clone' in str(node.target) or 'copy' in str(node.target))
    return graph


backend = aot_autograd(fw_compiler=lowered, decompositions=select_decomp_table,
                       keep_inference_input_mutations=True)
importlib.util.find_spec = not_while_tracing
with torch.inference_mode():
    ids = torch.tensor([[3], [4]])
    (cache, static), (usual, usual_static) = new_cache(), new_cache()
    step = torch.compile(lambda ids: model(ids, cache=static)[0], fullgraph=True, dynamic=False,
                         backend=backend)
    # before any kernel is interpreted: the interpreter patches triton.language, which the analysis
    # of a kernel's arguments compiles
    logits = step(ids)
    with triton_enabled(False):
        expected = model(ids, cache=usual_static)[0]
stored = max(max_gap(a, b) for store, other in zip(cache.stores, usual.stores)
             for a, b in zip(store.tensors, other.tensors))
print(json.dumps({'gap': max_gap(logits, expected), 'stored': stored, 'shared': shared,
                  'copied': copied}))
'''


@pytest.mark.parametrize('kv_dtype, layout', [
    ('int8', 'paged'), pytest.param('float32', 'contiguous', marks=pytest.mark.slow)])
def test_gives_what_plain_torch_gives_and_copies_no_cache(kv_dtype, layout):
    found = run_alone(PROGRAM, kv_dtype, layout)
    # one tensor passed as two arguments would become two tensors if the kernel writes one of them
    assert found['shared'] == []
    assert found['copied'] == []  # kernels write in place
    assert found['gap'] < 1e-5 and found['stored'] < 1e-5

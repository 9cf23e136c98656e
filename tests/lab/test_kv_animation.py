"""The animated picture of a cache."""
import xml.etree.ElementTree as ET

from config.gpt_config import GPTConfig
from config.sizes import nice_bytes
from kv.plan import plan_kv
from lab.kv_animation import PROMPT, TOKENS, animation, captions

PLAN = plan_kv(GPTConfig(n_layer=4, n_head=2, n_embd=8, layer_pattern='LG', window_size=30,
                         kv_share='AB', share_global_kv=True, n_kv_head=1))


def test_every_token_has_a_cell_in_each_slot_and_bytes_are_those_of_the_plan():
    svg = ET.fromstring(animation(PLAN))
    kinds = [each.get('class') for each in svg.findall('.//{*}rect')]
    n = len(PLAN.slots)
    assert kinds.count('prompt') == n * PROMPT
    for length in range(PROMPT + 1, TOKENS + 1):
        assert kinds.count(f'made t{length}') == n
    assert kinds.count('free') == sum(slot.capacity(TOKENS) for slot in PLAN.slots)
    words = [each.text for each in svg.findall('.//{*}text')]
    for plan in (PLAN, PLAN.vanilla()):
        assert nice_bytes(plan.nbytes(1, TOKENS, 'float32')) in words
    assert captions(PLAN)[31] == 'The rings are full: a new token overwrites the oldest of 30.'
    assert captions(PLAN)[31] in words

"""The settings of every program, by its name."""
import bench
import chat
import kv.__main__
import sample
import serve
import train
from common.settings import Model
from interop import evaluate
from lab import conform
from lab.ablation import ladder
from training.memory import __main__ as memory

SETTINGS = {'train': train.Settings, 'sample': sample.Settings, 'bench': bench.Settings,
            'chat': chat.Settings, 'serve': serve.Settings, 'kv': kv.__main__.Settings,
            'memory': memory.Settings, 'ablate': ladder.Settings, 'convert': Model,
            'conform': conform.Settings, 'evaluate': evaluate.Settings}

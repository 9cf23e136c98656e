"""nanoGPT's own model, from a checkout of it."""
import contextlib
import importlib.util
import sys
from pathlib import Path

from common.errors import UserError
from common.gpt_config import NANOGPT_FIELDS, GPTConfig, model_args


def check_vanilla(config: GPTConfig) -> None:
    """Raise UserError if nanoGPT does not support the model."""
    wrong = [f'{name}={value!r}' for name, value in model_args(config).items()
             if name not in NANOGPT_FIELDS]
    if wrong:
        raise UserError("against='nanogpt' runs both with the same weights, so the model must be "
                        f"vanilla GPT-2, without {', '.join(wrong)}")


def nanogpt(ours, folder: str):
    """Return nanoGPT's own GPT, from the checkout in `folder`, with our weights, in eval mode.
    UserError: if there is no checkout."""
    path = Path(folder) / 'model.py'
    if not folder or not path.is_file():
        raise UserError(f"nanogpt={folder!r}: against='nanogpt' needs the folder of a nanoGPT "
                        'checkout, with its model.py')
    spec = importlib.util.spec_from_file_location('nanogpt_model', path)
    module = importlib.util.module_from_spec(spec)
    sys.modules['nanogpt_model'] = module  # needed by dataclasses
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(sys.stderr):  # it prints its size
        fields = {name: getattr(ours.config, name) for name in NANOGPT_FIELDS}
        model = module.GPT(module.GPTConfig(**fields))
    model.load_state_dict(ours.state_dict(), strict=False)  # its own may contain causal masks
    return model.eval()

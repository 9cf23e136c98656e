"""Optional trackers of a run's metrics: Weights & Biases, TensorBoard."""
import importlib
from pathlib import Path

from config.errors import UserError


def check_packages(s) -> None:
    """Raise UserError if a package that the settings require is not installed."""
    for wanted, module, package in ((s.wandb_log, 'wandb', 'wandb'),
                                    (s.tensorboard_log, 'torch.utils.tensorboard', 'tensorboard')):
        try:
            wanted and importlib.import_module(module)
        except ImportError as e:
            raise UserError(f'{package}_log=True needs the {package} package: '
                            f'pip install {package}') from e


def open_trackers(s, out_dir: Path, start_iter: int) -> list:
    """Open the trackers in the settings. TensorBoard's events from `start_iter` on are replaced,
    unless the run only evaluates. Raises UserError if Weights & Biases cannot start, or the folder
    of TensorBoard's events is a link."""
    trackers = [WandB(s)] if s.wandb_log else []
    if s.tensorboard_log:
        folder = out_dir / 'tensorboard'
        if folder.is_symlink():  # the events would be written elsewhere
            raise UserError(f'{folder} is a link: delete it')
        trackers.append(TensorBoard(folder, None if s.eval_only else start_iter))
    return trackers


class WandB:
    """Logs a row at each evaluation, as nanoGPT does: iter, train/loss, val/loss, lr and mfu."""

    def __init__(self, s):
        import wandb
        try:
            self.run = wandb.init(project=s.wandb_project, name=s.wandb_run_name, config=vars(s))
        except Exception as e:  # noqa: BLE001  its errors have no common base
            reason = ' '.join(str(e).split())[:300]
            raise UserError(f'wandb_log=True, but Weights & Biases cannot start: {reason}; '
                            '`wandb login`, or set WANDB_MODE=offline') from e

    def evaluated(self, iter_num: int, row: dict) -> None:
        self.run.log({'iter': iter_num, **row})

    def stepped(self, iter_num: int, row: dict) -> None:
        pass

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Logs evaluations under nanoGPT's names, and the metrics of each logged step under step/. To
    view them: `tensorboard --logdir OUT_DIR`."""

    def __init__(self, folder: Path, purge_from: int | None):
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(folder, purge_step=purge_from)

    def evaluated(self, iter_num: int, row: dict) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, iter_num)

    def stepped(self, iter_num: int, row: dict) -> None:
        for name, value in row.items():
            self.writer.add_scalar(f'step/{name}', value, iter_num)

    def close(self) -> None:
        self.writer.close()

"""Where else a run's figures go: Weights & Biases, TensorBoard. Both optional."""
from pathlib import Path

from config.errors import UserError


def open_trackers(s, out_dir: Path, start_iter: int) -> list:
    """The trackers that the settings ask for. On resume what TensorBoard has from `start_iter` on is replaced.

    Raises:
        UserError: a package that is not installed.
    """
    trackers = []
    if s.wandb_log:
        trackers.append(WandB(s))
    if s.tensorboard_log:
        trackers.append(TensorBoard(out_dir / 'tensorboard', start_iter))
    return trackers


class WandB:
    """As nanoGPT does it: one row at each evaluation, with iter, train/loss, val/loss, lr and mfu."""

    def __init__(self, s):
        try:
            import wandb
        except ImportError as e:
            raise UserError('wandb_log=True needs the wandb package: pip install wandb') from e
        self.run = wandb.init(project=s.wandb_project, name=s.wandb_run_name, config=vars(s))

    def evaluated(self, iter_num: int, row: dict) -> None:
        self.run.log({'iter': iter_num, **row})

    def stepped(self, iter_num: int, row: dict) -> None:
        pass

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Evaluations under the same names, and loss, lr and tokens_per_second at each logged step, under step/.

    See them with `tensorboard --logdir OUT_DIR`.
    """

    def __init__(self, folder: Path, start_iter: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise UserError('tensorboard_log=True needs the tensorboard package: pip install tensorboard') from e
        self.writer = SummaryWriter(folder, purge_step=start_iter or None)

    def evaluated(self, iter_num: int, row: dict) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, iter_num)

    def stepped(self, iter_num: int, row: dict) -> None:
        for name in ('loss', 'lr', 'tokens_per_second'):
            self.writer.add_scalar(f'step/{name}', row[name], iter_num)

    def close(self) -> None:
        self.writer.close()

"""Train a ladder of models, each one change from the one above, and report loss and cost of each.

    python ablate.py config/ablate_smoke.py                    # two minutes, tiny models
    python ablate.py config/ablate_prices.py --dry_run=True    # list the runs
    python ablate.py config/ablate_prices.py --jobs=2          # two runs at a time
    python ablate.py config/ablate_prices.py --only='MQA' --seeds=1
    python ablate.py config/ablate_gpu.py --devices=cuda:0,cuda:1
    python ablate.py config/ablate_prices.py --report_only=True
    python ablate.py --help

Writes results/NAME: report.md, pictures, results.json, and runs.jsonl with a line for each row and
seed. Finished runs are not repeated. To combine two machines' runs, `cat` their runs.jsonl.
On Ctrl-C, running training jobs save a checkpoint; the same command resumes them.
How to write your own ladder: docs/ablations.md
"""
import json
import sys
import warnings

import configurator
from common.errors import UserError
from common.folder_lock import only_writer
from lab.ablation.jobs import Job, run_jobs
from lab.ablation.ladder import Ladder, read_ladder, slug_of
from lab.ablation.report import show, write_report
from lab.ablation.results import ROOT, Results
from lab.ablation.summary import summarize
from training.device import pick_device
from training.plot.figures import pyplot


def jobs_of(ladder: Ladder, results: Results, argv: list[str], only: set) -> dict[tuple, Job]:
    """Return (row, seed) -> job, for each training run that some row still needs."""
    wanted = [(row, seed) for row in ladder.rows.values() for seed in ladder.seeds(row)
              if not results.read(row, seed) and (not only or row.name in only)]
    # the whole ladder with one seed first
    wanted.sort(key=lambda run: (run[0].side, ladder.seeds(run[0]).index(run[1])))
    runs = dict.fromkeys((ladder.trainer(row), seed) for row, seed in wanted)
    return {run: job(ladder, results, *run, argv) for run in runs}


def job(ladder, results, row, seed, argv) -> Job:
    """Train, then measure. row: the row that the training run is named after."""
    out_dir = results.out_dir(row, seed)
    train = [str(ROOT / 'train.py'), *ladder.arguments(row, seed), f'--out_dir={out_dir}',
             '--always_save_checkpoint=True']
    commands = [train, ['-m', 'lab.ablation.measure', row.name, str(seed), *argv]]
    if (out_dir / 'ckpt.pt').is_file():
        train.append('--init_from=resume')
    return Job(f'{row.name}, seed {seed}', commands, out_dir)


def chosen(ladder) -> set:
    """Return the rows selected by `only`."""
    slugs, only = {row.slug: row.name for row in ladder.rows.values()}, ladder.s.only
    if slug_of(only) in slugs:  # names may have commas in them
        return {slugs[slug_of(only)]}
    wanted = only.split(',') if only else []
    for name in wanted:
        if slug_of(name) not in slugs:
            there = ', '.join(map(repr, ladder.rows))
            raise UserError(f'only={only!r}: there is no row {name.strip()!r}; there are {there}')
    return {slugs[slug_of(name)] for name in wanted}


def list_runs(ladder, results, argv, only) -> None:
    """Print the finished and the missing runs."""
    runs = jobs_of(ladder, results, argv, only)
    for row in ladder.rows.values():
        done = [seed for seed in results.seeds(row) if results.read(row, seed)]
        trainer = ladder.trainer(row)
        todo = sorted(seed for trained, seed in runs if trained is trainer and seed not in done
                      and (row is trainer or seed in ladder.seeds(row)))
        how = (f'weights of {trainer.name!r}' if trainer is not row
               else f'{ladder.settings(row).max_iters:,} iterations')
        print(f"{row.name}: seeds done {done or '-'}, to do {todo or '-'} ({how})")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    s, ladder = read_ladder(argv, usage=__doc__)
    warnings.filterwarnings('ignore', 'layer_pattern=')  # train.py warns about it
    results, only = Results(ladder), chosen(ladder)
    if s.pictures:
        pyplot(' (or give --pictures=False)')  # fails now rather than after training
    if line := results.other_core():
        print(line)
    if s.dry_run:
        list_runs(ladder, results, argv, only)
        return
    errors = {}
    if not s.report_only:
        with only_writer(results.folder, 'Wait until it has ended, or give another --folder'):
            devices = [name.strip() for name in (s.devices or s.device).split(',')]
            for name in devices:
                pick_device(name)
            if jobs := list(jobs_of(ladder, results, argv, only).values()):
                errors = run_jobs(jobs, devices, s.jobs)
            results.compact()
    summary = summarize(ladder, results)
    write_report(summary, results.folder)
    show(summary)
    print(f'\nreport: {results.folder / "report.md"}')
    if s.json:
        print(json.dumps(summary))
    if errors:
        raise SystemExit(1)


if __name__ == '__main__':
    configurator.run_program(main)

"""results.json, report.md, report.html and the pictures, made from what was measured; and the terminal's table."""
import json

from rich.console import Console

from lab.ablation import tables
from lab.ablation.page import page, title
from lab.ablation.pictures import TITLES, not_drawn, write_all
from lab.ablation.results import write_whole


def write_report(summary: dict, folder, also_as: str = '') -> None:
    """All files. also_as: a further format of the pictures, 'svg' or 'pdf'.

    Raises:
        UserError: matplotlib is missing, or a file cannot be written.
    """
    write_whole(folder / 'results.json', json.dumps(summary, indent=1) + '\n')
    write_whole(folder / 'report.md', markdown(summary, write_all(summary, folder, also_as)))
    write_whole(folder / 'report.html', page(summary))
    main = tables.grids(summary)[0]  # for papers
    write_whole(folder / 'table.csv', tables.as_csv(summary))
    write_whole(folder / 'table.tex', main.latex())


def markdown(summary: dict, pictures: list[str]) -> str:
    """report.md. pictures: names of those that lie beside it."""
    lines = [f'# {title(summary)}', '', ' '.join(tables.in_short(summary)), '']
    missing = [f'- {line}' for line in tables.shortcomings(summary) + not_drawn(summary)]
    lines += [*missing, ''] if missing else []
    for name in pictures:
        lines += [f'![{TITLES[name]}]({name}.png)', '', f'{TITLES[name]}.', '']
    for grid in tables.grids(summary):
        lines += [grid.title + '.', '', grid.markdown(), '']
    for line in (tables.facts_line(summary), tables.explanation(summary), *tables.caveats(summary)):
        lines += [line, '']
    lines += ['## Rows', '']
    lines += [f"- **{row['name']}**: {tables.changed(row)}  \n  `{row['command']}`" for row in summary['rows']]
    return '\n'.join(lines) + '\n'


def show(summary: dict) -> None:
    """The same tables on the terminal."""
    console = Console()
    console = console if console.is_terminal else Console(width=150)
    console.print(tables.facts_line(summary), highlight=False, markup=False, soft_wrap=True)
    for line in tables.in_short(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in tables.shortcomings(summary) + not_drawn(summary):
        console.print(line, style='red', highlight=False, markup=False, soft_wrap=True)
    for grid in tables.grids(summary):
        grid.print(console)

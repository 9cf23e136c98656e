"""report.html: one file that needs nothing beside it, with tables that sort; light and dark, readable on a phone."""
import base64
import html

from lab.ablation import tables
from lab.ablation.pictures import TITLES, draw_all, not_drawn

STYLE = '''
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --soft: #57606a; --line: #d0d7de; --band: #f6f8fa;
        --link: #0969da; --bad: #cf222e }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9da7b1; --line: #30363d;
        --band: #161b22; --link: #58a6ff; --bad: #ff7b72 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 82rem; padding: 1.5rem 1rem 4rem; color: var(--ink); background: var(--paper);
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
h1 { font-size: 1.6rem; margin: 0 0 .5rem } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem }
p, li { color: var(--soft) } p.bad { color: var(--bad) } p.lead { color: var(--ink) } code { font-size: .875em }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; outline-offset: 2px }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .4rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
tr:last-child td { border-bottom: 0 } tbody tr:nth-child(even) { background: var(--band) }
th.word, td.word { text-align: left } th { background: var(--band) }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--paper); white-space: normal; min-width: 8.5rem }
tbody tr:nth-child(even) td:first-child, th:first-child { background: var(--band) }
th button { all: unset; cursor: pointer; font-weight: 600 } th button:focus-visible { outline: 2px solid var(--link) }
th[aria-sort=ascending] button::after { content: " \\2191" } th[aria-sort=descending] button::after { content: " \\2193" }
figure { margin: 0 } figure img { max-width: 100%; height: auto; display: block }
@media (max-width: 40rem) { body { padding: 1rem .75rem 3rem } figure { overflow-x: auto }
        figure img { max-width: none; width: 42rem }
        td:first-child, th:first-child { min-width: 6.5rem; max-width: 9rem } }
'''
# numbers are read from the start of a cell: '1.7718 (0.0029)', '+0.01 ±0.02', '48.0x', '1,572,864', '32.8 kB'
SCRIPT = '''
const scale = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
function value(cell) {
  const text = cell.textContent.trim().replaceAll(",", "");
  const found = text.match(/^([+-]?[0-9.]+)x?(?: ([kMGT]?B)\\b)?/);
  return found ? parseFloat(found[1]) * (scale[found[2]] || 1) : null;
}
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0], column = head.cellIndex;
  const up = head.getAttribute("aria-sort") !== "ascending", words = head.classList.contains("word");
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...body.rows].map(row => [words ? row.cells[column].textContent : value(row.cells[column]), row]);
  rows.sort(([a], [b]) => a === null ? 1 : b === null ? -1 : (a < b ? -1 : a > b ? 1 : 0) * (up ? 1 : -1));
  body.append(...rows.map(([, row]) => row));
});
'''


def page(summary: dict) -> str:
    """The whole document."""
    light, dark = draw_all(summary), draw_all(summary, dark=True)
    parts = [f'<h1>{html.escape(title(summary))}</h1>',
             f"<p class=\"lead\">{html.escape(' '.join(tables.in_short(summary)))}</p>",
             shortcomings(summary), *(picture(name, light[name], dark[name]) for name in TITLES if name in light),
             *(table(grid) for grid in tables.grids(summary)),
             *(f'<p>{html.escape(line)}</p>' for line in (tables.facts_line(summary), tables.explanation(summary),
                                                          *tables.caveats(summary)))]
    parts.append(rows_explained(summary))
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{html.escape(title(summary))}</title><style>{STYLE}</style></head>\n<body>\n' + '\n'.join(parts) +
            f'\n<script>{SCRIPT}</script>\n</body></html>\n')


def title(summary: dict) -> str:
    return f"{summary['name']}: what each saving costs and buys"


def shortcomings(summary: dict) -> str:
    """Rows that failed or were not trained."""
    return ''.join(f'<p class="bad">{html.escape(line)}</p>' for line in tables.shortcomings(summary) + not_drawn(summary))


def table(grid) -> str:
    def cell(tag, column, text):
        word = ' class="word"' if column in grid.left else ''
        inside = html.escape(text)
        return f'<{tag}{word}>' + (f'<button>{inside}</button>' if tag == 'th' else inside) + f'</{tag}>'
    head = ''.join(cell('th', column, column) for column in grid.columns)
    body = '\n'.join('<tr>' + ''.join(cell('td', column, text) for column, text in zip(grid.columns, row)) + '</tr>'
                     for row in grid.rows)
    name, _, rest = grid.title.partition(':')
    return (f'<h2>{html.escape(name)}</h2><p>{html.escape(rest.strip())}</p><div class="wide" tabindex="0"><table>'
            f'<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>')


def picture(name: str, light: bytes, dark: bytes) -> str:
    def data(png):
        return 'data:image/png;base64,' + base64.b64encode(png).decode()
    text = html.escape(TITLES[name])
    return (f'<h2>{text}</h2><figure><picture><source media="(prefers-color-scheme: dark)" srcset="{data(dark)}">'
            f'<img alt="{text}" src="{data(light)}"></picture></figure>')


def rows_explained(summary: dict) -> str:
    """What each row changes, and the command that trains it."""
    items = ''.join(f"<li><b>{html.escape(row['name'])}</b>: {html.escape(tables.changed(row))}<br>"
                    f"<code>{html.escape(row['command'])}</code></li>" for row in summary['rows'])
    return f'<h2>Rows</h2><ul>{items}</ul>'

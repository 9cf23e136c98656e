"""report.html: a single file with sortable tables, for light and dark screens and phones."""
import base64
import html

from lab.ablation import tables
from lab.ablation.pictures import TITLES, draw_all, not_drawn

STYLE = '''
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --soft: #57606a; --line: #d0d7de;
        --band: #f6f8fa; --link: #0969da; --bad: #cf222e }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9da7b1; --line: #30363d;
          --band: #161b22; --link: #58a6ff; --bad: #ff7b72 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 82rem; padding: 1.5rem 1rem 4rem; color: var(--ink);
       background: var(--paper);
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
h1 { font-size: 1.6rem; margin: 0 0 .5rem } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem }
p, li { color: var(--soft) } p.bad { color: var(--bad) } p.lead { color: var(--ink) }
code { font-size: .875em }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; outline-offset: 2px }
table { border-collapse: collapse; width: 100%; font-size: .85rem;
        font-variant-numeric: tabular-nums }
th, td { padding: .4rem .6rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid var(--line) }
tr:last-child td { border-bottom: 0 } tbody tr:nth-child(even) { background: var(--band) }
th.word, td.word { text-align: left } th { background: var(--band) }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--paper);
                                 white-space: normal; min-width: 8.5rem }
tbody tr:nth-child(even) td:first-child, th:first-child { background: var(--band) }
th button { all: unset; cursor: pointer; font-weight: 600 }
th button:focus-visible { outline: 2px solid var(--link) }
th[aria-sort=ascending] button::after { content: " \\2191" }
th[aria-sort=descending] button::after { content: " \\2193" }
figure { margin: 0 } figure img { max-width: 100%; height: auto; display: block }
@media (max-width: 40rem) {
  body { padding: 1rem .75rem 3rem } figure { overflow-x: auto }
  figure img { max-width: none; width: 42rem }
  td:first-child, th:first-child { min-width: 6.5rem; max-width: 9rem } }
'''
# sorts by the number that a cell begins with: '1.77 (0.003)', '+0.01 ±0.02', '48.0x', '32.8 kB'
SCRIPT = '''
const scale = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
function value(cell) {
  const text = cell.textContent.trim().replaceAll(",", "");
  const found = text.match(/^([+-]?[0-9.]+)x?(?: ([kMGT]?B)\\b)?/);
  return found ? parseFloat(found[1]) * (scale[found[2]] || 1) : null;
}
function sort(head) {
  const body = head.closest("table").tBodies[0];
  const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const key = head.classList.contains("word") ? cell => cell.textContent : value;
  const rows = [...body.rows].map(row => [key(row.cells[head.cellIndex]), row]);
  rows.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return a < b ? -sign : a > b ? sign : 0;
  });
  head.parentNode.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  body.append(...rows.map(([, row]) => row));
}
for (const button of document.querySelectorAll("th button"))
  button.addEventListener("click", () => sort(button.closest("th")));
'''


def page(summary: dict) -> str:
    """Return the complete document."""
    text = html.escape
    light, dark = draw_all(summary), draw_all(summary, dark=True)
    heading = text(tables.title(summary))
    lead = text(' '.join(tables.in_short(summary)))
    body = [f'<h1>{heading}</h1>', f'<p class="lead">{lead}</p>',
            f"<p>{text(' '.join(tables.caveats(summary)))}</p>",
            ''.join(f'<p class="bad">{text(line)}</p>'
                    for line in tables.shortcomings(summary) + not_drawn(summary)),
            *(picture(TITLES[name], light[name], dark[name]) for name in light),
            *(table.html() for table in tables.grids(summary)),
            *(f'<p>{text(line)}</p>' for line in tables.notes(summary))]
    items = ''.join(f"<li><b>{text(row['name'])}</b>: {text(tables.changed(row))}<br>"
                    f"<code>{text(row['command'])}</code></li>" for row in summary['rows'])
    body.append(f'<h2>Rows</h2><ul>{items}</ul>')
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{heading}</title><style>{STYLE}</style></head>\n<body>\n' + '\n'.join(body) +
            f'\n<script>{SCRIPT}</script>\n</body></html>\n')


def picture(title: str, light: bytes, dark: bytes) -> str:
    """A figure with both PNG files; the browser shows the one that matches its color scheme."""
    light, dark = (f'data:image/png;base64,{base64.b64encode(png).decode()}'
                   for png in (light, dark))
    title = html.escape(title)
    return (f'<h2>{title}</h2><figure><picture>'
            f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
            f'<img alt="{title}" src="{light}"></picture></figure>')

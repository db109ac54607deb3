"""The lines `Ours:` in the header of every figure's script: what came out, in which time, on what.

tables.py writes them from the rows of its table, so they are as true as that.
"""

import re
import textwrap
from pathlib import Path

from wording import NOT_RUN

HERE = Path(__file__).resolve().parent
SCRIPTS = [
    HERE / f"{name}.py"
    for name in (
        "figure1",
        "figure1_signs",
        "figure1_decay",
        "figure1_bf16",
        "figure2",
        "figure3",
        "figure4",
        "appendix_b",
        "appendix_f",
    )
]
ONE_OF_MANY = {"figure2.py": "Figure 2"}  # the table has a long row for each of its settings
_OURS = re.compile(r"^Ours:.*\n(?: {4}.*\n)*", re.M)


def rendered(path: Path, rows: list[list[str]]) -> str:
    """A script with its lines `Ours:` made anew, before the line `Paper:`."""
    text = _OURS.sub("", path.read_text(), count=1)
    head, line, rest = text.partition("\nPaper:")
    assert line, f"{path.name} has no line `Paper:` in its header"
    return f"{head}\n{ours(path.name, rows)}{line[1:]}{rest}"


def ours(script: str, rows: list[list[str]]) -> str:
    """What the rows of a script's results say, in lines that fit."""
    own = [row for row in rows if re.search(rf"experiments/{re.escape(script)}\b", row[4])]
    own = [row for row in own if row[0] == ONE_OF_MANY.get(script, row[0])]
    text = "Ours:\n"
    for name, what, _, found, _, took, where in own:
        known = f"{_plain(found)}; {took}, {where}" if found != NOT_RUN else NOT_RUN
        data = name.partition(", ")[2] if script in ("figure1.py", "figure3.py") else ""
        line = f"{data}{', ' * bool(data)}{_plain(what)}: {known}"
        text += (
            textwrap.fill(line, 120, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False) + "\n"
        )
    return text


def _plain(text: str) -> str:
    """Without marks of Markdown, the entrant's name, and regret, which is the figure's."""
    text = re.sub(r" \(`[^`]*`\)|, regret [^;]*", "", text)
    return text.replace("`", "")

"""The picture of the tables (``docs/images/database.svg``), drawn from the metadata of SQLAlchemy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from sqlalchemy import MetaData, Table

BOX, GAP, LINE, PAD = 190, 26, 15, 8
"""Width of a box, space between boxes, height of a line, space inside of a box; in pixels."""
ROOT_HEIGHT = 86
"""Space for the table on top."""
COLOURS = {"frame": "#f1f5f9", "edge": "#94a3b8", "title": "#0f172a", "text": "#475569", "key": "#0369a1"}


@dataclass(frozen=True)
class Box:
    """The place of one table."""

    table: Table
    left: int
    top: int
    lines: Sequence[tuple[str, bool]]
    """Text of each line, and True for a column of the primary key."""

    @property
    def height(self) -> int:
        """Height of the box."""
        return PAD * 2 + LINE * (len(self.lines) + 1) + 4


def draw(metadata: MetaData, groups: Mapping[str, Sequence[str]], root: str) -> str:
    """Draw tables in a column for each group, below the table that all others refer to.

    Args:
        groups: Title of each column, and its tables from top to bottom.
        root: The table on top.

    Returns:
        A page of SVG, the same for the same tables.
    """
    tops = ROOT_HEIGHT + 70
    boxes: dict[str, Box] = {}
    for column, names in enumerate(groups.values()):
        top = tops + 34
        for name in names:
            box = Box(metadata.tables[name], GAP + column * (BOX + GAP), top, _lines(metadata.tables[name]))
            boxes[name] = box
            top += box.height + GAP
    width = GAP + len(groups) * (BOX + GAP)
    height = max(box.top + box.height for box in boxes.values()) + GAP + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{COLOURS["edge"]}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for column, (title, names) in enumerate(groups.items()):
        parts += _frame(title, [boxes[name] for name in names], column, tops, root)
    middle = Box(metadata.tables[root], (width - BOX) // 2, 16, [("run_id", True), _others(metadata.tables[root], 1)])
    parts += [*_box(middle), *_trunk(middle, len(groups), tops)]
    for box in boxes.values():
        parts += _box(box)
        parts += _references(box, boxes)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lines(table: Table) -> list[tuple[str, bool]]:
    lines = [(column.name, True) for column in table.primary_key]
    rest = [column.name for column in table.columns if not column.primary_key]
    if len(rest) <= 2:
        return [*lines, *((name, False) for name in rest)]
    return [*lines, _others(table, len(lines))]


def _others(table: Table, num_shown: int) -> tuple[str, bool]:
    return f"and {len(table.columns) - num_shown} columns", False


def _frame(title: str, boxes: Sequence[Box], column: int, top: int, root: str) -> Iterator[str]:
    """The ground of a group, and the arrow from it to the root where its tables refer to that."""
    left = GAP // 2 + column * (BOX + GAP)
    bottom = boxes[-1].top + boxes[-1].height
    width = BOX + GAP - 6
    yield _rectangle(left + 3, top, width, bottom - top + 12, f'rx="8" fill="{COLOURS["frame"]}"')
    yield _text(left + GAP // 2, top + 20, title, COLOURS["title"], bold=True)
    if any(reference.column.table.name == root for box in boxes for reference in box.table.foreign_keys):
        centre = left + 3 + width // 2
        yield f'<path d="M{centre} {top} V{top - 24}" fill="none" stroke="{COLOURS["edge"]}"/>'


def _trunk(root: Box, num_columns: int, top: int) -> Iterator[str]:
    """The line that the groups hang on, and the arrow from it to the root."""
    first, last = (GAP // 2 + 3 + column * (BOX + GAP) + (BOX + GAP - 6) // 2 for column in (0, num_columns - 1))
    across, centre = top - 24, root.left + BOX // 2
    yield f'<path d="M{first} {across} H{last}" fill="none" stroke="{COLOURS["edge"]}"/>'
    up = f"M{centre} {across} V{root.top + root.height}"
    yield f'<path d="{up}" fill="none" stroke="{COLOURS["edge"]}" marker-end="url(#arrow)"/>'


def _box(box: Box) -> Iterator[str]:
    edge = f'stroke="{COLOURS["edge"]}"'
    yield _rectangle(box.left, box.top, BOX, box.height, f'rx="4" fill="#ffffff" {edge}')
    top = box.top + PAD + 11
    yield _text(box.left + PAD, top, box.table.name, COLOURS["title"], bold=True)
    yield f'<path d="M{box.left} {top + 7} h{BOX}" {edge}/>'
    for number, (text, is_key) in enumerate(box.lines, start=1):
        yield _text(box.left + PAD, top + 6 + number * LINE, text, COLOURS["key" if is_key else "text"])


def _references(box: Box, boxes: Mapping[str, Box]) -> Iterator[str]:
    """An arrow to each other table of the same column that a foreign key leads to."""
    for name in sorted({reference.column.table.name for reference in box.table.foreign_keys} & boxes.keys()):
        other = boxes[name]
        start, end = box.top + 20, other.top + 20
        out = box.left - 9
        path = f"M{box.left} {start} H{out} V{end} H{other.left}"
        yield f'<path d="{path}" fill="none" stroke="{COLOURS["edge"]}" marker-end="url(#arrow)"/>'


def _rectangle(left: int, top: int, width: int, height: int, look: str) -> str:
    return f'<rect x="{left}" y="{top}" width="{width}" height="{height}" {look}/>'


def _text(left: int, top: int, text: str, colour: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{left}" y="{top}" fill="{colour}"{weight}>{escape(text)}</text>'

"""Parts of all generated pages."""

import ast
import inspect
import textwrap

GENERATED = "<!-- Made by docs/generate.py (make docs). Change the code, not this page. -->\n"


def strings_under_names(described: type) -> dict[str, str]:
    """Names in the body of a class with the string that stands under each."""
    (tree,) = ast.parse(inspect.getsource(described)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for line, text in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
            continue
        targets = (
            line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name):
                found[target.id] = " ".join(str(text.value.value).split())
    return found


def prose(text: str) -> str:
    """Paragraphs of a docstring, wrapped."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(paragraph.split()), 118) for paragraph in paragraphs)


def code(text: str) -> str:
    """Format a text as code in a cell of a table."""
    return f"`{cell(text)}`"


def cell(text: str) -> str:
    """Escape a text for a cell of a table."""
    return text.replace("``", "`").replace("|", "\\|")

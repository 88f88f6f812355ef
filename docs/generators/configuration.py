"""``docs/configuration.md``: every setting of a run, and the settings of a site."""

from collections.abc import Iterable, Iterator

from generators.shared import GENERATED, cell, code
from rlhf_core.config import fields as config_fields
from rlhf_core.config import site as site_config
from rlhf_core.presets import PRESETS
from rlhf_core.schemas.base import strings_under_names

CONFIGURATION = """\
# Configuration

You configure a run with one TOML file. Only `name`, the model, the data and, for each loop, the number of steps, the
algorithm and the learning rate have no default; write down whatever else you want to change. You can override any
setting on the command line with `--set section.field=value`. The value is TOML, and a bare word counts as text. An
unknown key is an error, and the message suggests the closest valid one.

Each preset is a commented example that you can run, for instance with `rlhf run quickstart`. These are the presets:
{presets}.

`rlhf config show CONFIG` prints every setting of a config or preset, with your overrides and the defaults filled in;
with `--changed` only those that differ from the defaults. `spec.json` in the run directory records what was run.

A run has one or two training loops: `[loops.main]`, and optionally `[loops.warm_start]`. Each has its own algorithm and
optimizer. The name of the algorithm determines which settings its section has; if you override the name, the file's
settings of the previous algorithm are dropped. Your other overrides stay, in whatever order you give them. Likewise,
`--set model.path=FOLDER` takes the place of the model that the file builds from `[model.config]`.

Relative paths of a config, such as `data.train`, start at the folder in which you call `rlhf`. If one leads
nowhere from there, but to a file beside the config, the error says what to write.

This version still reads configs of rlhf-flows 0.1, with `[sft]`, `[train]` and `[grpo]`. It warns you and names the
new settings; the next version will refuse such configs. `rlhf config migrate FILE` rewrites one and keeps its comments.
"""


WARM_START = """
`[loops.warm_start.algorithm]` and `[loops.warm_start.optimizer]` have the settings of
[`[loops.main.algorithm]`](#loopsmainalgorithm) and [`[loops.main.optimizer]`](#loopsmainoptimizer).
"""

SITE = """
## Site settings

The locations of things on a machine do not belong in the config of a run. Set them with environment variables, or in
`rlhf.toml` in `RLHF_HOME` with the keys in the second column; environment variables take precedence. A relative path in
that file starts at its folder, also in `sqlite:///history.db`; one in a variable starts at the current folder of the
command, also for the services and jobs that it starts. The tables of that file follow below.
"""


def configuration() -> str:
    """Every setting of a run, and the settings of a site."""
    named = ", ".join(f"`{name}`" for name in PRESETS)
    parts = [GENERATED, CONFIGURATION.format(presets=named), "## Top level\n", *_settings("")]
    for section, about in config_fields.describe_sections().items():
        if section.startswith("loops.warm_start."):
            continue
        parts += [f"\n## `[{section}]`\n", f"{about}\n", *_settings(section)]
        if section == "loops.warm_start":
            parts.append(WARM_START)
        for name, (what, fields) in config_fields.describe_named_tables().items():
            if name.startswith(f"{section}.") and name.count(".") == section.count(".") + 2:
                parts += [f"\n### `[{name}]`\n", f"{what}\n", *_table(fields)]
    parts += [SITE, "| variable | key | meaning |", "|---|---|---|"]
    keys = {variable: key for key, variable in site_config.SITE_KEYS.items()}
    for variable, meaning in _site_settings():
        if variable.startswith("["):
            parts.append(f"| | `{variable}` | {cell(meaning)} |")
            continue
        parts.append(f"| `{variable}` | {code(keys[variable]) if variable in keys else ''} | {cell(meaning)} |")
    for name, (about, fields) in config_fields.describe_site_tables().items():
        parts += [f"\n### `[{name}]` of `rlhf.toml`\n", f"{about[:1].upper()}{about[1:]}\n", *_table(fields)]
    return "\n".join(parts) + "\n"


def _settings(section: str) -> Iterator[str]:
    return _table(field for field in config_fields.describe_fields() if field.name.rpartition(".")[0] == section)


def _table(fields: Iterable[config_fields.FieldHelp]) -> Iterator[str]:
    yield "| setting | type | default | meaning |"
    yield "|---|---|---|---|"
    for field in fields:
        default = "required" if field.required else code(field.default)
        yield f"| `{field.name}` | {code(field.type)} | {default} | {cell(field.meaning)} |"


def _site_settings() -> Iterator[tuple[str, str]]:
    """Variable and meaning, from the strings under the fields of ``Site``."""
    for text in strings_under_names(site_config.Site).values():
        variable, _, meaning = text.partition(": ")
        yield variable.strip("`"), meaning

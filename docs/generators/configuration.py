"""``docs/configuration.md``: every setting of a run, and the settings of a site."""

from collections.abc import Iterable, Iterator

from generators.shared import GENERATED, cell, code, strings_under_names
from rlhf_core import config_fields, site_config
from rlhf_core.presets import PRESETS

CONFIGURATION = """\
# Configuration

A run is asked for with one TOML file. Only `name`, the model, the data and, of each loop, the steps, the algorithm and
the learning rate have no default; a file says what differs. Any setting can be overridden on the command line with
`--set section.field=value`, where the value is TOML and a bare word is taken as text. An unknown key is an error, and
the message names the nearest right one. The shipped presets, {presets}, are commented examples: `rlhf run quickstart`.

What ran is kept, with every default filled in, in `spec.json` of the run directory.

A run has one or two training loops: `[loops.warm_start]`, which may be left out, and `[loops.main]`. Each has an
algorithm and an optimizer of its own. The name of the algorithm decides which settings its section has; an override of
the name drops the settings of the algorithm before it.

Configs of rlhf-flows 0.1, with `[sft]`, `[train]` and `[grpo]`, are read by this version with a warning that names the
new settings, and refused by the next. `rlhf config migrate FILE` rewrites one and keeps its comments.
"""


SITE = """
## Site settings

Where things are on a machine does not belong into the config of a run. It comes from environment variables, or from
`rlhf.toml` in `RLHF_HOME` with the keys in the second column; the environment wins. Tables of that file follow below.
"""


def configuration() -> str:
    """Every setting of a run, and the settings of a site."""
    named = ", ".join(f"`{name}`" for name in PRESETS)
    parts = [GENERATED, CONFIGURATION.format(presets=named), "## Top level\n", *_settings("")]
    for section, about in config_fields.describe_sections().items():
        parts += [f"\n## `[{section}]`\n", f"{about}\n", *_settings(section)]
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

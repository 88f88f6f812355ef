"""Install packages with uv, in a fraction of pip's time, from the indexes that pip is configured for.

    python infra/install_packages.py ARGUMENT...    arguments that `pip install` and `uv pip install` share

uv reads neither pip's files nor its variables, so they are translated. pip installs instead where it is configured in a
way that is not translated here, where uv cannot be installed, and where uv fails.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

INDEXES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "no-index": "UV_NO_INDEX",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
"""Setting of pip -> variable of uv. Variables, not arguments: an address may carry a password."""
WITHOUT_EFFECT = frozenset(
    {
        "break-system-packages",
        "cache-dir",
        "disable-pip-version-check",
        "no-cache-dir",
        "no-color",
        "no-compile",
        "no-input",
        "no-python-version-warning",
        "progress-bar",
        "quiet",
        "require-virtualenv",
        "retries",
        "root-user-action",
        "verbose",
    }
)
"""Settings that change nothing about the packages that are installed."""


def pip_settings(listing: str) -> dict[str, str]:
    """Settings of `pip install` in the output of `pip config list`; variables win over files, as in pip."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section in found:
            found[section][key] = str(ast.literal_eval(value))
    return found["global"] | found["install"] | found[":env:"]


def translated(settings: Mapping[str, str]) -> "tuple[dict[str, str], list[str]] | None":
    """Variables and arguments of uv that mean the same as these settings of pip; None if one is not known here."""
    if settings.keys() - INDEXES.keys() - WITHOUT_EFFECT - {"constraint"}:
        return None
    # pip takes the best version of all indexes; uv would take the first index that has the package.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for key in INDEXES.keys() & settings.keys():
        separator = "," if key == "find-links" else " "
        variables[INDEXES[key]] = separator.join(settings[key].split())
    # An argument, since another `--constraint` would hide the variable.
    return variables, [f"--constraint={path}" for path in settings.get("constraint", "").split()]


def run(module: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> bool:
    """Run a module with this Python; True if it succeeds. Variables that are set already keep their values."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env={**(variables or {}), **os.environ}, check=False).returncode == 0


def install_with_uv(arguments: Sequence[str]) -> bool:
    """Install with uv, and install uv before if it is not there; True if it succeeds."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    found = translated(pip_settings(listing.stdout)) if listing.returncode == 0 else None
    if found is None:
        return False
    variables, constraints = found
    return run("pip", ["--disable-pip-version-check", "-q", "install", "-c", "constraints.txt", "uv"]) and run(
        "uv", ["pip", "install", "-q", "--python", sys.executable, *constraints, *arguments], variables
    )


def main(arguments: Sequence[str]) -> int:
    """Install; returns the exit status."""
    if install_with_uv(arguments):
        return 0
    print("not installed by uv: pip installs, which takes some minutes", file=sys.stderr)
    return not run("pip", ["--disable-pip-version-check", "-q", "install", "--no-compile", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

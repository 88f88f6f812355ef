"""Detection and masking of secrets: names of variables that hold one, and values that contain one. Pure.

Everything stored (rows, run directories, Prefect, logs) has more readers than the user who requested the run. A value
detected here is never printed in any message or finding.
"""

import hashlib
import hmac
import re
from collections.abc import Iterator

MASK = "***"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SECRET_WORDS = _words(
    """
    APIKEY AUTH AUTHORIZATION BEARER CONNECTIONSTRING COOKIE COOKIES CRED CREDENTIAL CREDENTIALS CREDS DSN JWT KEY
    PASS PASSCODE PASSPHRASE PASSWD PASSWORD PAT PGPASSWORD PRIVATE PW PWD SALT SECRET SECRETS TOKEN WEBHOOK
    """
)
"""A name with one of these words between its underscores holds a secret."""
_JOINED = ("APIKEY", "PASSWORD", "PASSWD", "SECRET", "CREDENTIAL")
"""These are detected within a word too: ``MYSQLPASSWORD``."""
_NO_SECRET_ENDS = _words("DIR DIRECTORY FILE ID NAME PATH SOCK SOCKET TYPE")
"""Suffixes of names that only refer to a secret: ``HF_TOKEN_PATH``, ``SSH_AUTH_SOCK``."""
_NOT_MEANT = frozenset({"PWD", "OLDPWD"})

_REFERENCE = re.compile(r"[/~.${<]")
"""The beginning of a value that only refers to a secret: a path, another variable, a placeholder in a template."""
_QUOTES = ("'", '"')
_SWITCH = re.compile(r"[+-]?[\d.]*|true|false|yes|no|on|off|none|null|auto|default", re.IGNORECASE)
"""Values that are not secret unless the name is that of a password."""

_TOKEN = re.compile(
    r"""
    \b(?: hf_[A-Za-z0-9]{16,}                                     # Hugging Face
        | sk-[A-Za-z0-9_-]{16,}                                   # OpenAI, Anthropic
        | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{16,}         # GitHub
        | glpat-[\w-]{16,}                                        # GitLab
        | xox[abeoprs]-[\w-]{10,}                                 # Slack
        | (?:AKIA|ASIA)[0-9A-Z]{16}                               # AWS
        | AIza[\w-]{30,} | ya29\.[\w-]{16,}                       # Google
        | nvapi-[\w-]{16,} | pypi-[\w-]{16,} | r8_[A-Za-z0-9]{16,} | gsk_[A-Za-z0-9]{16,}
        | eyJ[\w-]{8,2000}+\.[\w-]{8,}+\.[\w-]*                   # JSON web token
    )
    """,
    re.VERBOSE,
)
_USER_INFO = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]{0,30}+://)(?P<info>[^/?\#\s@]+(?:@[^/?\#\s@]+)*)@", re.IGNORECASE
)
_WEBHOOK = re.compile(
    r"(https://(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|[\w.-]{1,100}\.webhook\.office\.com)/)\S+"
)
_WEB = frozenset({"http", "https", "ws", "wss", "ftp", "ftps"})
_HEADER = re.compile(
    r"(\bBearer\s+|\bAuthorization[\"']?\s*[:=]\s*[\"']?(?:(?:Basic|Bearer|Token)\s+)?"
    r"|\bX-(?:[A-Za-z]+-){0,4}(?:Key|Token|Secret)[\"']?\s*[:=]\s*[\"']?)[\w.~+/=-]{8,}",
    re.IGNORECASE,
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_ASSIGNED_NAME = re.compile(r"""(?<![\w.])(?<![\w.]-)(?P<name>[A-Za-z_][\w.-]*+)(?:\s?=\s?|["']\s*:\s*(?=["']))""")
"""The beginning of ``name=value``, or of ``"name": "value"``. A name must begin at a word boundary: otherwise the time
would grow quadratically with the length of a line."""
_OPTION = re.compile(
    r"""(?<![\w-])--(?P<name>[A-Za-z][\w-]*+)(?:["']?,)?\s++(?P<value>"[^"\n]*"|'[^'\n]*'|[^\s"',\]-][^\s"',\]]*)"""
)
"""``--name value``, also as two items of a list."""
_YAML_LINE = re.compile(
    r"""^[ \t]*+(?:-\ )?(?P<name>[\w.-]++):[ \t]++(?P<value>"[^"\n]*"|'[^'\n]*'|[^\s"']\S*)(?=\s*(?:\#|$))""",
    re.MULTILINE,
)
"""A line ``name: value`` and nothing else."""
_UNMISTAKABLE = re.compile(
    r"(?:^token|(?:^|[_.-])(?:pass(?:word|wd|phrase)|secret|credentials?|api[_-]?key"
    r"|(?:access|account|admin|api|auth|bearer|hf|hub|huggingface|refresh|session|private|secret|wandb)[_-](?:key|token)))$",
    re.IGNORECASE,
)
"""Names that hold a secret in text too, where ``eos_token`` and ``key`` are other things."""
_ASSIGNED_VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s,;&]+""")

NAMED_BY_USERS = ("slurm.environment", "data.generator_args")
"""Tables whose keys are names of variables and arguments. Those of a model configuration are not: ``eos_token``."""


def is_secret_name(name: str) -> bool:
    """True if a variable of this name usually holds a secret."""
    words = [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word]
    if not words or words[-1] in _NO_SECRET_ENDS or name in _NOT_MEANT:
        return False
    return any(word in _SECRET_WORDS or any(part in word for part in _JOINED) for word in words)


def carries_secret(value: str) -> bool:
    """True if a text contains a password, a token or a private key, whatever its name."""
    return masked(value) != value


def masked(value: str) -> str:
    """Replace the secrets in a text: user names and passwords in URLs, tokens, keys, ``password=...``."""
    value = _PRIVATE_KEY.sub(MASK, value)
    value = _USER_INFO.sub(_without_user_info, value)
    value = _WEBHOOK.sub(rf"\1{MASK}", value)
    value = _HEADER.sub(rf"\1{MASK}", value)
    value = _TOKEN.sub(MASK, value)
    for form in (_OPTION, _YAML_LINE):
        value = form.sub(_without_value, value)
    return _without_assigned(value)


def _without_value(match: "re.Match[str]") -> str:
    if not _is_secret_option(match["name"], match["value"]):
        return match[0]
    return match[0].removesuffix(match["value"]) + MASK


def _is_secret_option(name: str, value: str) -> bool:
    value = value.strip("\"'")
    is_placeholder = value.replace("_", "-").upper() == name.replace("_", "-").upper()  # in the help of a program
    is_value = not value.startswith("-") and value != MASK and not is_placeholder
    return is_value and _UNMISTAKABLE.search(name) is not None and _is_named_secret(name, value)


def _without_user_info(match: "re.Match[str]") -> str:
    scheme, info = match["scheme"], match["info"]
    user, colon, password = info.partition(":")
    is_web = scheme.lower().removesuffix("://") in _WEB
    # `postgresql://anna@host` names a user; in a web address, that part is a token (GitHub, Sentry).
    if (colon and password and password != MASK) or (is_web and user and user != MASK):
        return f"{scheme}{MASK}@"
    return match[0]


def _without_assigned(text: str) -> str:
    """Replace the values of secret names. The values of other names may contain such assignments: they are read too."""
    parts, kept_from, position = [], 0, 0
    while found := _ASSIGNED_NAME.search(text, position):
        position = found.end()
        # Nothing is read that is not masked or skipped afterwards, or the time would grow quadratically.
        if not is_secret_name(found["name"]) or _REFERENCE.match(text, position + text.startswith(_QUOTES, position)):
            continue
        value = _ASSIGNED_VALUE.match(text, position)
        if value is None:
            continue
        position = value.end()
        if _is_named_secret(found["name"], value[0].strip("\"'")) and MASK not in value[0]:
            parts += [text[kept_from : value.start()], MASK]
            kept_from = position
    return "".join([*parts, text[kept_from:]])


def _is_named_secret(name: str, value: str) -> bool:
    if not value or not is_secret_name(name) or _REFERENCE.match(value):
        return False
    return "PASS" in name.upper() or not _SWITCH.fullmatch(value)


def secrets_in(name: str, value: object) -> Iterator[str]:
    """Yield the names of settings that contain a secret; never its text.

    Args:
        name: Dotted name of a setting.
        value: Its value: text, or lists and tables of it. Names are considered only in tables with user-defined keys:
            there ``API_KEY = "..."`` is a secret whatever its form.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from secrets_in(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        option = ""
        for index, item in enumerate(value):
            place = f"{name}[{index}]" if isinstance(item, str) else name
            if isinstance(item, str) and _is_secret_option(option, item):
                yield place
            else:
                yield from secrets_in(place, item)
            option = item[2:] if isinstance(item, str) and item.startswith("--") else ""
    elif isinstance(value, str) and (carries_secret(value) or _is_secret_setting(name, value)):
        yield name


def _is_secret_setting(name: str, value: str) -> bool:
    section, _, leaf = name.rpartition(".")
    return section in NAMED_BY_USERS and _is_named_secret(leaf, value)


def keyed_hash(value: str, key: bytes) -> str:
    """Short hash for comparing a value without revealing it; without the key, the value cannot be guessed from it."""
    return hmac.new(key, value.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()[:12]

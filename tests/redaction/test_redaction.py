"""Recognition of secrets by name and by form; values that only resemble a secret stay."""

import time

import pytest

from rlhf_core.text.redaction import carries_secret, is_secret_name, keyed_hash, masked, secrets_in

CANARY = "c4nary7Zq9Lw2Xv8Tb3Rn5"

SECRET_NAMES = """
    OPENAI_KEY OPENAI_API_KEY ANTHROPIC_API_KEY GITHUB_PAT GITHUB_TOKEN GH_TOKEN GITLAB_TOKEN HF_TOKEN
    HUGGING_FACE_HUB_TOKEN WANDB_API_KEY COMET_API_KEY NEPTUNE_API_TOKEN MLFLOW_TRACKING_PASSWORD AWS_SECRET_ACCESS_KEY
    AWS_SESSION_TOKEN AZURE_CLIENT_SECRET AZURE_STORAGE_KEY NPM_AUTH REGISTRY_AUTH PGPASSWORD MYSQL_PWD MYSQLPASSWORD
    REDIS_PASSWORD SENTRY_DSN SLACK_WEBHOOK SMTP_PASS VAULT_TOKEN DJANGO_SECRET_KEY SLURM_JWT SSH_PASSPHRASE apiKey
    DB_CREDENTIALS SESSION_COOKIE KAGGLE_KEY
"""
PLAIN_NAMES = """
    PATH PWD OLDPWD HOME LANG HF_HOME HF_TOKEN_PATH TOKENIZERS_PARALLELISM SSH_AUTH_SOCK AWS_SHARED_CREDENTIALS_FILE
    AWS_ACCESS_KEY_ID NCCL_IB_PKEY MAX_TOKENS VLLM_MAX_TOKENS_PER_STEP OMP_NUM_THREADS KEYBOARD MONKEY PYTHONHASHSEED
    XAUTHORITY COMPASS DATABASE_URL HTTPS_PROXY CUDA_VISIBLE_DEVICES SLURM_JOB_ID
"""

SECRET_VALUES = {
    "postgresql://rlhf:hunter2@db/history": "postgresql://***@db/history",
    "postgresql+asyncpg://rlhf:p@ss@db:5432/x": "postgresql+asyncpg://***@db:5432/x",
    "http://anna:hunter2@proxy.example:3128": "http://***@proxy.example:3128",
    "https://1234567890abcdef@o1.ingest.sentry.io/2": "https://***@o1.ingest.sentry.io/2",
    "redis://:hunter2@cache:6379/0": "redis://***@cache:6379/0",
    "host=db user=anna password=hunter2 dbname=x": "host=db user=anna password=*** dbname=x",
    "dbname=x password=12345": "dbname=x password=***",
    "Server=db;Uid=anna;Pwd=hunter2;": "Server=db;Uid=anna;Pwd=***;",
    "https://api.example/v1?token=hunter2&limit=3": "https://api.example/v1?token=***&limit=3",
    "export WANDB_API_KEY='hunter2 x'": "export WANDB_API_KEY=***",
    "--export=ALL,OPENAI_API_KEY=hunter2": "--export=ALL,OPENAI_API_KEY=***",
    "https://hooks.slack.com/services/T0/B0/hunter2": "https://hooks.slack.com/***",
    '{"Authorization": "Bearer hunter2hunter2"}': '{"Authorization": "Bearer ***"}',
    '{"password": "hunter2"}': '{"password": ***}',
    'env={"WANDB_API_KEY": "hunter2"}': 'env={"WANDB_API_KEY": ***}',
    "url=https://api.example/v1?api_key=hunter2&limit=3": "url=https://api.example/v1?api_key=***&limit=3",
    'level=error msg="no login: password=hunter2 user=a"': 'level=error msg="no login: password=*** user=a"',
    "token=$TOKEN?password=hunter2": "token=$TOKEN?password=***",
    "train.py --wandb-key hunter2 --steps 3": "train.py --wandb-key *** --steps 3",
    "login --token hunter2": "login --token ***",
    "psql --password 'hunter2 x' -h db": "psql --password *** -h db",
    "['train.py', '--api-key', 'hunter2', '-v']": "['train.py', '--api-key', ***, '-v']",
    'args: ["--api_key", "hunter2"]': 'args: ["--api_key", ***]',
    "db:\n  user: anna\n  password: hunter2  # of the team\n  port: 1": (
        "db:\n  user: anna\n  password: ***  # of the team\n  port: 1"
    ),
    "- hf_token: 'hunter2'": "- hf_token: ***",
    "X-Api-Key: hunter2hunter2": "X-Api-Key: ***",
    "{'x-amz-security-token': 'hunter2hunter2'}": "{'x-amz-security-token': '***'}",
    f"hf_{CANARY}": "***",
    f"sk-proj-{CANARY}": "***",
    f"ghp_{CANARY}": "***",
    f"glpat-{CANARY}": "***",
    "AKIAIOSFODNN7EXAMPLE": "***",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----": "***",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl": "***",
}
PLAIN_VALUES = (
    "",
    "postgresql://rlhf@db/history",
    "ssh://git@github.com/team/code",
    "git+ssh://git@github.com/team/code",
    "https://huggingface.co",
    "anna@example.com",
    "Question: {question}\nToken: {token}\nAnswer:",
    "password=$PASSWORD",
    "export HF_TOKEN=$(cat ~/.token)",
    "token=/home/anna/.token",
    "max_tokens=512",
    "--eos-token </s> --max-tokens 512 --pad-token pad",
    "--password --user anna",
    "--password $PASSWORD --api-key /run/secrets/key",
    "usage: login [--token TOKEN] [--api-key API_KEY]",
    "eos_token: end\nkey: value\npad-token: <s>",
    "Error in password: it is too short",
    "Basic arithmetic, step by step",
    "sk-learn",
    "module load cuda",
    "ALL",
)


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_usual_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", PLAIN_NAMES.split())
def test_a_name_that_only_sounds_like_one_is_none(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(("value", "shown"), SECRET_VALUES.items(), ids=lambda text: text[:24])
def test_what_is_secret_in_a_value_is_masked_and_the_rest_can_be_read(value: str, shown: str) -> None:
    assert masked(value) == shown
    assert carries_secret(value)
    assert masked(shown) == shown


@pytest.mark.parametrize("value", PLAIN_VALUES)
def test_a_plain_value_is_shown_as_it_is(value: str) -> None:
    assert masked(value) == value
    assert not carries_secret(value)


@pytest.mark.parametrize(
    "part", ["a=", "token=/", 'x="key=/', "--token ", "--token '", "--token  ", "password: ", "x-key-", "\ntoken:  "]
)
def test_a_long_line_of_assignments_takes_no_time(part: str) -> None:
    began = time.process_time()
    masked(part * (1 << 16))
    assert time.process_time() - began < 4.0, "half a minute, if each assignment read the rest of the line"


def test_where_secrets_stand_in_nested_settings() -> None:
    spec = {
        "slurm": {
            "environment": {"OPENAI_KEY": "hunter2", "NCCL_DEBUG": "INFO", "DB": "mysql://a:b@h/d", "API_KEY": "$KEY"},
            "setup": ["module load cuda", "export WANDB_API_KEY=hunter2"],
        },
        "model": {"config": {"eos_token": "<eos>", "bos_token": "begin", "vocab": {"token": "x"}}},
        "trainer": {
            "command": [
                "train.py",
                "--wandb-key",
                "hunter2",
                "--eos-token",
                "end",
                "--token=hunter2",
                "--password",
                "-v",
            ]
        },
        "data": {
            "generator_args": {"token": "hunter2", "tokens": 3, "api_key": ["hunter2"]},
            "prompt_template": "Key: {key}",
        },
    }
    found = [place for section, value in spec.items() for place in secrets_in(section, value)]
    assert found == [
        "slurm.environment.OPENAI_KEY",
        "slurm.environment.DB",
        "slurm.setup[1]",
        "trainer.command[2]",
        "trainer.command[5]",
        "data.generator_args.token",
        "data.generator_args.api_key[0]",
    ]


def test_a_hash_tells_values_apart_and_only_for_those_who_have_the_key() -> None:
    one, other = b"key of one attempt", b"key of another one"
    assert keyed_hash("hunter2", one) == keyed_hash("hunter2", one)
    assert keyed_hash("hunter2", one) != keyed_hash("hunter3", one)
    assert keyed_hash("hunter2", one) != keyed_hash("hunter2", other)

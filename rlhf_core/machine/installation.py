"""Source that this program was installed from: a package index, a folder, a file or a repository."""

import importlib.metadata
import json
import shlex


def pip_install(*extras: str) -> str:
    """``pip install`` of this version with extras from the same source, for another environment.

    Without an entry in ``direct_url.json`` (PEP 610), the source is a package index.
    """
    name = f"rlhf-flows[{','.join(extras)}]"
    try:
        installed = importlib.metadata.distribution("rlhf-flows")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return f"pip install {shlex.quote(name)}"
    text = installed.read_text("direct_url.json")
    if not text:
        return f"pip install {shlex.quote(f'{name}=={installed.version}')}"
    source = json.loads(text)
    repository = source.get("vcs_info", {})
    url = f"{repository['vcs']}+{source['url']}@{repository['commit_id']}" if repository else source["url"]
    return f"pip install {shlex.quote(f'{name} @ {url}')}"

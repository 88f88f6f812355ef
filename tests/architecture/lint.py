"""Run the import contracts on a copy of the packages, once per edit; a program, not a test.

    python lint.py ROOT EDITS.json RESULT.json

``ROOT`` holds ``pyproject.toml`` and the packages. ``EDITS.json`` is ``{name: {"file": ..., "append": ...}}``: each
edit is made, the contracts are checked, the edit is taken back. ``RESULT.json`` gets ``{name: [ids of broken
contracts]}``. It runs in a process of its own because import-linter finds the packages through ``sys.path``, where the
test process has the real ones.
"""

import json
import sys
from pathlib import Path

from importlinter import configuration
from importlinter.application import use_cases


def broken_contracts(root: Path) -> list[str]:
    """Ids of the contracts of ``root/pyproject.toml`` that the packages under ``root`` break.

    Raises:
        RuntimeError: a contract itself is wrong, for instance names a module that does not exist.
    """
    options = use_cases.read_user_options(str(root / "pyproject.toml"))
    use_cases._register_contract_types(options)
    report = use_cases.create_report(options, cache_dir=str(root / ".cache"), verbose=False)
    if report.invalid_contract_options:
        raise RuntimeError(f"contracts that cannot be checked: {report.invalid_contract_options}")
    return sorted(
        contract.contract_options["id"] for contract, check in report.get_contracts_and_checks() if not check.kept
    )


def main() -> None:
    root, edits_path, result_path = (Path(argument).resolve() for argument in sys.argv[1:])
    sys.path.insert(0, str(root))
    configuration.configure()
    result = {}
    for name, edit in json.loads(edits_path.read_text()).items():
        path = root / edit["file"]
        before = path.read_text() if path.exists() else None
        path.write_text((before or "") + edit["append"])
        try:
            result[name] = broken_contracts(root)
        finally:
            if before is None:
                path.unlink()
            else:
                path.write_text(before)
    result_path.write_text(json.dumps(result))


if __name__ == "__main__":
    main()

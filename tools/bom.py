"""Writes the bill of materials of a wheel: `python tools/bom.py dist/NAME.whl bom.cdx.json`, or `make dist`.

It has every package that `pip install -c constraints.txt 'NAME.whl[train]'` would install on this machine in an empty
environment, with the digest of its archive, as CycloneDX 1.6. pip says which these are, and installs nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).parent.parent


def report(wheel: str) -> dict[str, Any]:
    """pip's report of what it would install: the specification of it is a part of pip's documentation."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command = [*pip, "-c", str(ROOT / "constraints.txt"), f"{wheel}[train]"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def component(item: dict[str, Any]) -> dict[str, Any]:
    """A package of a report."""
    name, version = item["metadata"]["name"], item["metadata"]["version"]
    algorithm, _, digest = item["download_info"]["archive_info"]["hash"].partition("=")
    if algorithm != "sha256":
        raise ValueError(f"{name}: pip gives the digest {algorithm}, and not sha256")
    purl = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{quote(version)}"
    hashes = [{"alg": "SHA-256", "content": digest}]
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, "hashes": hashes}


def bill(report: dict[str, Any]) -> dict[str, Any]:
    """The bill of materials of what was asked for in a report."""
    (about,) = [component(item) for item in report["install"] if item["requested"]]
    parts = [component(item) for item in report["install"] if not item["requested"]]
    system = {name: report["environment"][name] for name in ("python_full_version", "sys_platform", "platform_machine")}
    parts.sort(key=lambda part: part["purl"])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([about, system, parts])).urn,
        "version": 1,
        "metadata": {
            "component": about,
            "properties": [{"name": f"pip:{name}", "value": value} for name, value in system.items()],
        },
        "components": parts,
    }


if __name__ == "__main__":
    wheel, out = sys.argv[1:]
    Path(out).write_text(json.dumps(bill(report(wheel)), indent=1) + "\n")

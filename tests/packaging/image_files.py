"""The files of the container image and of the cluster, read as data: the Dockerfile's instructions, YAML, variables.

Does not know: whether the files are right.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from scripts.layout import ROOT

OCI, K8S = ROOT / "packaging" / "oci", ROOT / "packaging" / "k8s"


def instructions(path: Path = OCI / "Dockerfile") -> list[tuple[str, str]]:
    """Return each instruction and the rest of its line, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", "")
    return [
        (word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)
    ]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    return found[max(i for i, (word, _) in enumerate(found) if word == "FROM") :]


def image_environment() -> dict[str, str]:
    """Return the variables that the image sets."""
    pairs = [pair for word, rest in last_stage() if word == "ENV" for pair in shlex.split(rest)]
    return dict(pair.split("=", 1) for pair in pairs)


def healthcheck() -> str:
    """Return the shell command of HEALTHCHECK."""
    [line] = [rest for word, rest in last_stage() if word == "HEALTHCHECK"]
    return line.partition(" CMD ")[2]


def read_yaml(path: Path) -> dict[str, Any]:
    [document] = yaml.safe_load_all(path.read_text())
    found: dict[str, Any] = document
    return found


def pod_spec() -> dict[str, Any]:
    spec: dict[str, Any] = read_yaml(K8S / "base" / "deployment.yaml")["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    [found] = pod_spec()["containers"]
    return dict(found)


def pod_environment(secrets: dict[str, str], namespace: str = "default") -> dict[str, str]:
    """Return the variables that a kubelet sets: literal ones with $(NAME) expanded, and those of the Secret."""
    made: dict[str, str] = {}
    for each in container()["env"]:
        source = each.get("valueFrom", {})
        if "fieldRef" in source:
            made[each["name"]] = namespace
        elif "secretKeyRef" in source:
            if source["secretKeyRef"]["key"] in secrets:
                made[each["name"]] = secrets[source["secretKeyRef"]["key"]]
        else:
            made[each["name"]] = re.sub(r"\$\((\w+)\)", lambda found: made[found[1]], each["value"])
    return made

"""The Dockerfile, the compose files, the manifests and scripts/image, read without building anything."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from localllm.cli import build_parser
from localllm.config.settings import SETTINGS, ServerConfig
from localllm.config.upstreams import read_upstream_flag, split_upstream
from localllm.errors import ConfigError
from localllm.files.folders import cache_folder, config_home, data_folder
from localllm.ranks.placement import CLUSTER_KEY, EXTERNAL
from localllm.serving.phases import DRAIN_S
from localllm.version import __version__
from localllm.web.access.scopes import PROBES
from localllm.web.app import bind
from scripts.layout import ROOT
from tests.packaging.image_files import (
    K8S,
    OCI,
    container,
    healthcheck,
    image_environment,
    instructions,
    last_stage,
    pod_spec,
    read_yaml,
)

USER = 10001
SECRET_WORDS = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.I)
VARIABLES = {each.environment for each in SETTINGS.values() if each.environment}
OVERLAYS = ("cpu", "nvidia")
IMAGE = ROOT / "scripts" / "image"


# ---- the Dockerfile --------------------------------------------------------------------------------------------------


def test_the_image_runs_as_a_user_without_rights() -> None:
    users = [rest for word, rest in last_stage() if word == "USER"]
    assert users == [f"{USER}:{USER}"]
    entry = next(rest for word, rest in last_stage() if word == "RUN")
    assert f"localllm:x:{USER}:{USER}:" in entry  # without an entry in /etc/passwd, getpass.getuser() raises


def test_the_image_holds_no_secret() -> None:
    named = [rest for word, rest in instructions() if word in ("ENV", "ARG", "LABEL") and SECRET_WORDS.search(rest)]
    assert not named
    copied = [rest for word, rest in instructions() if word == "COPY" and "--from" not in rest]
    sources = {source for rest in copied for source in rest.split()[:-1]}
    allowed = {line[1:] for line in ignored() if line.startswith("!")}
    assert {source.rstrip("/") for source in sources} == allowed
    assert all((ROOT / name).exists() for name in allowed - {"packaging/lock"})
    assert ignored()[0] == "*"


def ignored() -> list[str]:
    lines = (OCI / "Dockerfile.dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_variable_of_the_image_is_known_and_leads_into_the_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = image_environment()
    assert {name for name in environ if name.startswith("LOCALLLM_")} <= VARIABLES
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    folders = [data_folder(), cache_folder(), config_home(), Path(environ["HF_HOME"]), Path.home()]
    volumes = [rest for word, rest in last_stage() if word == "VOLUME"]
    assert volumes == ["/data"]
    assert all(folder.is_relative_to("/data") for folder in [*folders, Path(environ["TRITON_CACHE_DIR"])])
    assert environ["PYTHONDONTWRITEBYTECODE"] == "1"  # the rest of the image is read-only
    assert SETTINGS["port"].parse(environ["LOCALLLM_PORT"]) == 8000
    assert ("EXPOSE", "8000") in last_stage()


def test_healthcheck_asks_an_open_probe_and_needs_only_python() -> None:
    asked = re.findall(r"request\('GET', '([^']+)'\)", healthcheck())
    assert asked == ["/health"]
    assert set(asked) <= PROBES
    assert healthcheck().startswith("python -c ")
    assert "LOCALLLM_PORT" in healthcheck()


def test_an_update_changes_only_the_last_layer() -> None:
    """PyTorch, the other packages and localllm have a layer each, and no earlier stage sees localllm's sources."""
    copied = [rest for word, rest in last_stage() if word == "COPY"]
    assert copied == [f"--from={stage} /layer/ /" for stage in ("torch", "packages", "localllm")]
    starts = {rest.rpartition(" AS ")[2]: i for i, (word, rest) in enumerate(instructions()) if word == "FROM"}
    before = " ".join(rest for word, rest in instructions()[: starts["localllm"]] if word == "COPY")
    assert "pyproject.toml" not in before
    assert " localllm" not in before


def test_a_process_gets_the_signal_that_drains() -> None:
    assert ("STOPSIGNAL", "SIGTERM") in last_stage()
    assert ("ENTRYPOINT", '["localllm"]') in last_stage()  # no shell, which would keep the signal to itself
    assert ("CMD", '["serve"]') in last_stage()


def test_the_installer_of_the_layers_is_a_sound_shell_script() -> None:
    subprocess.run(["sh", "-n", str(OCI / "install")], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(OCI / "install")], check=True)


def test_all_installs_use_one_version_of_uv() -> None:
    """packaging/wheelhouse collects the one of install.sh."""
    texts = [(ROOT / name).read_text() for name in ("install.sh", "packaging/oci/install")]
    first, second = (re.findall(r"^uv_version=(\S+)$", text, re.M) for text in texts)
    assert first == second
    assert len(first) == 1


# ---- the refusal without a key ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["KUBERNETES_SERVICE_HOST", "container", "file"])
def test_without_a_key_a_container_is_told_the_variable(
    mark: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from localllm.machine import install_kind

    monkeypatch.setattr(install_kind, "checkout_folder", lambda: None)
    monkeypatch.setattr(install_kind, "CONTAINER_MARKS", (tmp_path / "mark",))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for name in ("KUBERNETES_SERVICE_HOST", "container"):
        monkeypatch.delenv(name, raising=False)
    assert "localllm keys add" in hint_without_a_key()
    if mark == "file":
        (tmp_path / "mark").touch()
    else:
        monkeypatch.setenv(mark, image_environment().get(mark, "10.96.0.1"))
    assert "-e LOCALLLM_API_KEY=" in hint_without_a_key()


def hint_without_a_key() -> str:
    with pytest.raises(ConfigError) as refused:
        bind(ServerConfig(host="0.0.0.0", port=0))
    return refused.value.hint


# ---- compose ---------------------------------------------------------------------------------------------------------


def test_compose_demands_a_key_and_publishes_on_this_machine_only() -> None:
    [service] = read_yaml(OCI / "compose.yaml")["services"].values()
    assert service["environment"]["LOCALLLM_API_KEY"].startswith("${LOCALLLM_API_KEY:?")
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert {name for name in service["environment"] if name.startswith("LOCALLLM_")} <= VARIABLES
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["volumes"] == ["data:/data"]
    assert service["tmpfs"] == ["/tmp"]
    assert seconds(service["stop_grace_period"]) > DRAIN_S + 5


def test_compose_builds_what_it_runs() -> None:
    both = [read_yaml(OCI / name)["services"]["localllm"] for name in ("compose.yaml", "compose.nvidia.yaml")]
    build = both[0]["build"]
    assert ((OCI / build["context"]).resolve(), ROOT / build["dockerfile"]) == (ROOT, OCI / "Dockerfile")
    assert both[0]["image"] == "localllm:cpu"
    assert both[1]["image"] == f"localllm:{both[1]['build']['args']['TORCH_BACKEND']}"
    [device] = both[1]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def test_each_probe_asks_an_open_route_and_only_liveness_ignores_the_load() -> None:
    paths = {name: container()[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/health", "liveness": "/version"}
    assert set(paths.values()) <= PROBES
    startup, liveness = container()["startupProbe"], container()["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 3600  # a download may take an hour
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 120


def test_the_pod_has_no_rights_and_writes_into_its_volumes_only() -> None:
    pod, inside = pod_spec(), container()["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert {pod["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {USER}
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert inside == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert {each["mountPath"] for each in container()["volumeMounts"]} == {"/data", "/tmp"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S + 5


def test_the_services_name_does_not_change_a_setting() -> None:
    """For a Service called localllm, service links would set LOCALLLM_PORT=tcp://ADDRESS:80."""
    service = read_yaml(K8S / "base" / "service.yaml")["metadata"]["name"]
    assert f"{service.upper()}_PORT" in VARIABLES
    assert pod_spec()["enableServiceLinks"] is False
    with pytest.raises(ConfigError):
        SETTINGS["port"].parse("tcp://10.96.12.1:80")


def test_the_key_comes_from_a_secret_and_only_the_token_is_optional() -> None:
    by_name = {each["name"]: each for each in container()["env"]}
    assert {name for name in by_name if name.startswith("LOCALLLM_")} <= VARIABLES
    secrets = {name: each["valueFrom"]["secretKeyRef"] for name, each in by_name.items() if "secretKeyRef" in str(each)}
    assert secrets == {
        "LOCALLLM_API_KEY": {"name": "localllm", "key": "api-key"},
        "HF_TOKEN": {"name": "localllm", "key": "hf-token", "optional": True},
    }


def test_one_pod_replaces_the_other() -> None:
    deployment = read_yaml(K8S / "base" / "deployment.yaml")["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    assert read_yaml(K8S / "base" / "pvc.yaml")["spec"]["accessModes"] == ["ReadWriteOnce"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_names_files_that_exist_and_an_image_that_is_built(overlay: str) -> None:
    folder = K8S / "overlays" / overlay
    kustomization = read_yaml(folder / "kustomization.yaml")
    named = [*kustomization["resources"], *(patch["path"] for patch in kustomization["patches"])]
    assert all((folder / name).exists() for name in named)
    [image] = kustomization["images"]
    assert image["name"] == container()["image"]
    built = run_image("--dry-run", "--with", "docker", "--torch", image["newTag"]).stdout
    assert f"--tag {image['name']}:{image['newTag']}" in built


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_renders_an_overlay_that_the_schemas_accept(overlay: str, tmp_path: Path) -> None:
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(K8S / "overlays" / overlay)]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects: dict[str, Any] = {each["kind"]: each for each in yaml.safe_load_all(rendered)}
    assert set(objects) == {"Deployment", "Service", "PersistentVolumeClaim"}
    pod = objects["Deployment"]["spec"]["template"]
    assert objects["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    [made] = pod["spec"]["containers"]
    limits = made["resources"]["limits"]
    assert ("nvidia.com/gpu" in limits) == (overlay == "nvidia")
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] in [port["name"] for port in made["ports"]]
    validator = shutil.which("kubernetes-validate")
    if validator:
        (tmp_path / "all.yaml").write_text(rendered)
        done = subprocess.run(
            [validator, "--strict", str(tmp_path / "all.yaml")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


# ---- scripts/image ---------------------------------------------------------------------------------------------------


def run_image(*words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = os.environ | ({} if path is None else {"PATH": path})
    return subprocess.run([sys.executable, IMAGE, *words], capture_output=True, text=True, env=environ, check=False)


def test_image_takes_the_builder_that_is_there(tmp_path: Path) -> None:
    for name in ("sh", "uname", "tr", "awk", "cat", "sed"):  # of install.sh
        found = shutil.which(name)
        assert found
        (tmp_path / name).symlink_to(found)
    for name in ("docker", "podman", "buildah"):  # the last one wins
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        said = run_image("--dry-run", "--base", "localhost/base", "--", "--network", "host", path=str(tmp_path)).stdout
        assert said.startswith(f"{name} build --file ")
        assert f"--tag localllm:{__version__}-cpu --tag localllm:cpu --network host " in said
        assert "--build-arg BASE=localhost/base" in said
        assert ("--format docker" in said) == (name != "docker")  # an image in OCI's format has no HEALTHCHECK
    refused = run_image(path=str(tmp_path / "nothing"))
    assert refused.returncode == 2
    assert "Neither buildah nor podman nor docker is installed.\nTry: sudo apt-get install" in refused.stderr


WHEELS = ("uv-0.13.9-py3-none-manylinux_2_28_x86_64.whl", "torch-2.13.0-cp312-none-any.whl", "numpy-2.0-none-any.whl")
OWN_WHEEL = f"localllm-{__version__}-py3-none-manylinux_2_28_x86_64.whl"


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (None, "is not a folder."),
        (WHEELS, "has 0 wheels of localllm, and an image needs exactly one.\nTry: scripts/make_wheels"),
        ((*WHEELS, OWN_WHEEL, "localllm-0.0.1-py3-none-any.whl"), "has 2 wheels of localllm"),
        ((OWN_WHEEL,), "has no wheel of uv and none of torch.\nTry: packaging/wheelhouse --torch cpu"),
    ],
)
def test_image_names_what_a_folder_of_wheels_lacks(names: tuple[str, ...] | None, problem: str, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    if names is not None:
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    refused = run_image("--dry-run", "--with", "buildah", "--wheels", str(folder))
    assert refused.returncode == 2
    assert problem in refused.stderr


def test_image_hands_wheels_over_in_a_copy_with_localllms_apart(tmp_path: Path) -> None:
    """Otherwise a new wheel of localllm would change the layer of PyTorch."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in (*WHEELS, OWN_WHEEL):
        (wheels / name).write_text(name)
    builder = tmp_path / "bin" / "buildah"
    builder.parent.mkdir()
    builder.write_text('#!/bin/sh\nfor last; do :; done\n(cd "$last" && find . -type f) >"$LISTED"\n')
    builder.chmod(0o755)
    listed = tmp_path / "listed"
    environ = os.environ | {"PATH": f"{builder.parent}:{os.environ['PATH']}", "LISTED": str(listed)}
    subprocess.run([sys.executable, IMAGE, "--wheels", str(wheels)], env=environ, check=True, capture_output=True)
    found = set(listed.read_text().split())
    assert {f"./packaging/oci/wheels/{name}" for name in WHEELS} <= found
    assert [name for name in found if "localllm-" in name and name.endswith(".whl")] == [
        f"./packaging/oci/localllm-wheel/{OWN_WHEEL}"
    ]
    assert {"./localllm/version.py", "./packaging/oci/install", "./packaging/oci/Dockerfile.dockerignore"} <= found
    assert not [name for name in found if name.endswith((".so", ".pyc"))]
    assert not list((OCI / "wheels").glob("*.whl"))


# ---- several machines ------------------------------------------------------------------------------------------------


def parsed(words: list[str]) -> argparse.Namespace:
    """Return localllm's own reading of a command line. Exits with a message if a flag does not exist."""
    parser, _ = build_parser()
    return parser.parse_args(words)


def num_ranks(asked: argparse.Namespace) -> int:
    return int(asked.tensor_parallel_size) * int(asked.pipeline_parallel_size)


def test_two_replicas_share_an_address_and_a_key() -> None:
    services = read_yaml(OCI / "compose.replicas.yaml")["services"]
    asked = read_upstream_flag(parsed(services["localllm"]["command"]).upstream)
    assert [split_upstream(each)[0] for each in asked] == [f"{name}:8000" for name in services if name != "localllm"]
    assert services["localllm"]["ports"] == ["127.0.0.1:8000:8000"]
    for name, service in services.items():
        assert {key for key in service["environment"] if key.startswith("LOCALLLM_")} <= VARIABLES
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert name == "localllm" or "ports" not in service
        assert name == "localllm" or name in service["environment"]["LOCALLLM_ALLOWED_HOSTS"].split(",")


def test_a_ray_cluster_has_the_gpus_of_its_ranks() -> None:
    job = read_yaml(K8S / "machines" / "ray.yaml")["spec"]
    program, *words = shlex.split(job["entrypoint"])
    asked, cluster = parsed(words), job["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert program == "localllm"
    assert sum(each.get("replicas", 1) for each in groups) == int(asked.nodes)
    for group in groups:
        [ray] = group["template"]["spec"]["containers"]
        limits = ray["resources"]["limits"]
        assert limits["nvidia.com/gpu"] * int(asked.nodes) == num_ranks(asked)
        assert {each["name"] for each in ray["env"] if each["name"].startswith("LOCALLLM_")} <= VARIABLES


def test_torchrun_starts_a_process_for_each_rank() -> None:
    _, found = yaml.safe_load_all((K8S / "machines" / "torchrun.yaml").read_text())
    [pod] = found["spec"]["template"]["spec"]["containers"]
    asked = parsed(pod["args"])
    flags = dict(word.split("=", 1) for word in pod["command"] if "=" in word)
    assert int(flags["--nnodes"]) == found["spec"]["replicas"]
    assert int(flags["--nnodes"]) * int(flags["--nproc-per-node"]) == num_ranks(asked)
    assert pod["resources"]["limits"]["nvidia.com/gpu"] == int(flags["--nproc-per-node"])
    assert asked.distributed_executor_backend == EXTERNAL
    assert {each["name"] for each in pod["env"] if each["name"].startswith("LOCALLLM_")} <= {*VARIABLES, CLUSTER_KEY}


def test_the_slurm_job_starts_a_process_for_each_rank() -> None:
    path = ROOT / "packaging" / "slurm" / "localllm.sbatch"
    text = path.read_text().replace("\\\n", " ")
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    sizes = dict(re.findall(r"#SBATCH --(\S+)=(\S+)", text))
    [line] = re.findall(r"-m localllm (.*)", text)
    asked = parsed(shlex.split(line))
    assert int(sizes["nodes"]) * int(sizes["gpus-per-node"]) == num_ranks(asked)
    assert int(re.findall(r"--nproc-per-node (\d+)", text)[0]) == int(sizes["gpus-per-node"])
    assert CLUSTER_KEY in text

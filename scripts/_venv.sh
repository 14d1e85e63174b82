# shellcheck shell=bash
# Make .venv in the checkout and install localllm into it. Sourced by scripts/up and scripts/check.
# It only needs Python 3.11 or newer with the venv module. A repeated run takes a fraction of a second: checksums of
# pyproject.toml and of the native library's sources record what was installed.
#
#   PYTHON=...            the interpreter to make the environment with
#   LOCALLLM_TORCH=...    the exact torch requirement to install, e.g. 'torch==2.9.1+cpu'
#   LOCALLLM_NATIVE=none  install without the native library; `require` fails where it cannot be compiled

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
torch_floor=2.9

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

is_usable_python() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14; do
    if is_usable_python "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "localllm needs Python 3.11 or newer with the venv module, and none was found." \
    "Try: sudo apt-get install -y python3 python3-venv   (Debian 12, Ubuntu 24.04)" \
    "     or PYTHON=/path/to/python3.12 $0"
}

make_venv() {
  # An interrupted first run, or a removed Python version, leaves a folder that cannot install anything.
  "$venv/bin/python" -c 'import pip' 2>/dev/null && return
  local python
  python=$(find_python) || exit 1
  echo "Making .venv with $("$python" --version)"
  "$python" -m venv --clear --without-pip "$venv" # ensurepip takes seconds; uv installs pip with the other packages
}

# Set uv to the uv of this machine, or to the one that install.sh downloads into .venv. Fails where there is none.
find_uv() {
  uv=$(sh "$root/install.sh" --uv --dir "$venv/uv" 2>/dev/null)
}

pip_install() {
  "$venv/bin/python" -c 'import pip' 2>/dev/null || "$venv/bin/python" -m ensurepip >/dev/null
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@"
}

# torch_for_machine --torch|--build: print lines of a name and a value: the build, and where PyTorch is (install.sh).
torch_for_machine() {
  sh "$root/install.sh" "$1" --python "$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
}

# Triton compiles a C file against Python.h before it launches the first kernel: say so before PyTorch is downloaded.
require_headers() {
  "$venv/bin/python" - <<'PYTHON' || fail "On a GPU, Triton needs Python's C headers." \
    "Try: sudo apt-get install -y python3-dev   (or PYTHON=/path/to/a/python/with/headers rm -r .venv first)"
import sys, sysconfig
from pathlib import Path
sys.exit(not Path(sysconfig.get_paths(scheme="posix_prefix")["include"], "Python.h").exists())
PYTHON
}

has_torch() {
  "$venv/bin/python" - "$torch_floor" <<'PYTHON' 2>/dev/null
import sys
from importlib.metadata import version
as_numbers = lambda text: [int(part) for part in text.split("+")[0].split(".")[:2]]
sys.exit(as_numbers(version("torch")) < as_numbers(sys.argv[1]))
PYTHON
}

# Set torch to the requirement that installs PyTorch ('' if it is there), and build. uv and pip get the places of PyTorch
# in variables, because an address may have a password.
find_torch() {
  local name value old="" sizes="" place="" ask=--torch answer
  torch="${LOCALLLM_TORCH:-}" build=""
  if has_torch; then torch="" ask=--build; fi
  [ -z "$torch" ] || ask=--build
  answer=$(torch_for_machine $ask) || exit 1
  while read -r name value; do
    case $name in
      build) build=$value ;;
      old) old=$value ;;
      requirement) torch=$value ;;
      sizes) sizes=$value ;;
      from) place=$value ;;
      index-url) [ -z "$value" ] || export PIP_INDEX_URL=$value ;;
      extra-index-url) [ -z "$value" ] || export PIP_EXTRA_INDEX_URL=$value ;;
      find-links) [ -z "$value" ] || export PIP_FIND_LINKS=$value ;;
      UV_* | SSL_CERT_FILE | HTTPS_PROXY) [ -z "$value" ] || export "$name=$value" ;;
    esac
  done <<<"$answer"
  [ $ask = --torch ] || return 0
  case $build in cu*) require_headers ;; esac
  [ -z "$old" ] || echo "NVIDIA driver $old is older than 525, which PyTorch needs: the GPU is not used"
  echo "PyTorch ($build) comes from $place; with localllm's packages: $sizes"
}

# Change with the native library's sources, with what compiles them, and with the user's choice.
native_stamp() {
  { echo "${LOCALLLM_NATIVE:-}"; cat "$root/build_native.py" "$root"/localllm/kernels/cpu/native/*.[ch]; } | cksum
}

# Compile the native library anew. Where no compiler works, pip brings one for the build.
update_native() {
  local stamp
  stamp=$(native_stamp)
  [ "$(cat "$venv/.installed-native" 2>/dev/null)" != "$stamp" ] || return 0
  echo "Compiling the native library: its sources have changed"
  "$venv/bin/python" "$root/build_native.py" >/dev/null 2>&1 || pip_install --quiet --no-deps --editable "$root" ||
    fail "localllm's native library could not be updated; see pip's message above." \
      "Try: LOCALLLM_NATIVE=none $0   (localllm runs on torch alone)"
  echo "$stamp" >"$venv/.installed-native"
}

uv_install() {
  "$uv" pip install --python "$venv/bin/python" "$@"
}

# Install with uv, which is several times as fast as pip, else with pip. pip would compile the bytecode of all of PyTorch,
# which takes longer than everything else; Python compiles what is imported.
install_packages() {
  if find_uv; then
    uv_install pip "$@" && return
    echo "uv did not install localllm; pip is tried."
  fi
  pip_install --no-compile "$@"
}

# Install requirements, and compile the native library meanwhile.
install_and_compile() {
  local compiler
  "$venv/bin/python" "$root/build_native.py" >/dev/null 2>&1 &
  compiler=$!
  LOCALLLM_NATIVE=built install_packages "$@" || { wait $compiler || true; return 1; }
  wait $compiler || pip_install --quiet --no-deps --editable "$root" # brings a compiler for the build
}

# install_localllm [EXTRA]: install localllm (editable) and the packages of the extra into .venv.
install_localllm() {
  local extra=${1:-} stamp extras
  stamp="$root $(cksum <"$root/pyproject.toml")"
  if [ "$(cat "$venv/.installed-${extra:-base}" 2>/dev/null)" = "$stamp" ] && [ -x "$venv/bin/localllm" ]; then
    update_native
    return
  fi
  make_venv
  find_torch
  extras=$extra
  case $build in cu*) extras=gpu${extra:+,$extra} ;; esac # Triton, which only a GPU needs
  echo "Installing localllm${extras:+ with its extra ${extras/,/ and }}"
  install_and_compile ${torch:+"$torch"} --editable "$root${extras:+[$extras]}" ||
    fail "localllm could not be installed; see pip's message above." \
      "Try: LOCALLLM_TORCH=torch $0   (if PyTorch is what failed: the default build of your package index)"
  # Triton needs a C compiler, which not every machine has.
  case $build in cu*) command -v gcc || command -v clang || [ -n "${CC:-}" ] ||
    pip_install "$(sed -n 's/^ZIG = "\(.*\)".*/\1/p' "$root/build_native.py")" ;; esac >/dev/null
  native_stamp >"$venv/.installed-native"
  echo "$stamp" >"$venv/.installed-base"
  [ -z "$extra" ] || echo "$stamp" >"$venv/.installed-$extra"
}

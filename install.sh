#!/bin/sh
# Install localllm for the user who runs this script, with the PyTorch build that suits this machine.
#
#   sh install.sh [--version V] [--cpu | --cuda 12 | --cuda 13] [--offline FOLDER] [--dir D] [--yes] [--look]
#   sh install.sh --uninstall [--dir D] [--yes]
#
#   --cpu, --cuda 12|13  the PyTorch build; default: chosen from the version of the NVIDIA driver
#   --offline FOLDER     install without a network from a folder that packaging/wheelhouse made
#   --dir D              install into D, with the command in D/bin; default: ~/.local/share/localllm and ~/.local/bin
#   --look               print what would be done, and stop
#
# LOCALLLM_SOURCE names where localllm itself is: a clone, a folder of wheels, or an https:// page that links the wheels.
# A clone that contains this script needs no LOCALLLM_SOURCE. Installed chats, keys and settings are never touched.
set -eu

version=0.1.0
python_range='>=3.11,<3.14'
# uv comes from PyPI, where the other packages come from: one host fewer to reach, and the same SHA-256 in every mirror.
uv_version=0.13.9
zig_version=0.15.2 # a C compiler for Triton where this machine has none
uv_files=https://files.pythonhosted.org/packages
root=${LOCALLLM_ROOT:-} # tests put the /proc and /sys of other machines here

say() { printf '%s\n' "$@"; }
refuse() { say "$@" >&2; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }

read_options() {
  asked='' offline='' own_dir='' yes='' action=install source=${LOCALLLM_SOURCE:-} own_version=''
  while [ $# -gt 0 ]; do
    case $1 in
      --version | --cuda | --offline | --dir)
        [ $# -ge 2 ] || refuse "$1 needs a value." "Try: sh install.sh --help" ;;
    esac
    case $1 in
      --version) own_version=$2 version=$2; shift ;;
      --cpu) asked=cpu ;;
      --cuda) asked=$2; shift ;;
      --offline) offline=$2; shift ;;
      --dir) own_dir=$2; shift ;;
      --yes | -y) yes=1 ;;
      --look) action=look ;;
      --torch) action=torch ;; # for scripts/_venv.sh: the build and the driver's version, and nothing else
      --uninstall) action=uninstall ;;
      --help | -h) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;;
      *) refuse "install.sh has no option '$1'." "Try: sh install.sh --help" ;;
    esac
    shift
  done
  case $asked in
    '' | cpu | 12 | 13) ;;
    *) refuse "--cuda is 12 or 13, not '$asked'." "Try: sh install.sh --cuda 12" ;;
  esac
  [ -z "$offline" ] || [ -z "$asked" ] ||
    refuse "--cpu and --cuda do not go with --offline: the folder holds one build of PyTorch." \
      "Try: sh install.sh --offline $offline"
  case $own_dir in '' | /*) ;; *) own_dir=$PWD/$own_dir ;; esac
  dir=${own_dir:-${XDG_DATA_HOME:-$HOME/.local/share}/localllm}
  bin=${own_dir:+$own_dir/bin}
  bin=${bin:-$HOME/.local/bin}
}

# ---- 1. what is here --------------------------------------------------------------------------------------------------

look_at_system() {
  os=$(uname -s) arch=$(uname -m) libc='' wsl=''
  case $os-$arch in
    Linux-x86_64 | Linux-aarch64 | Darwin-arm64) ;;
    MINGW* | MSYS* | CYGWIN*) refuse "On Windows, localllm runs in WSL2." \
      "Try: wsl --install   (then run this script in the terminal of Linux)" ;;
    *) refuse "localllm cannot be installed on $os $arch. It runs on Linux (x86_64, aarch64) and on macOS (arm64)." \
      "Try: another machine, and open its page from this one: localllm up --host 0.0.0.0" ;;
  esac
  [ "$os" = Linux ] || return 0
  libc=$(ldd --version 2>&1 | head -n 1) || true
  case $libc in
    *musl*) refuse "This system's C library is musl; PyTorch needs glibc 2.28 or newer." \
      "Try: docker run -p 127.0.0.1:8000:8000 -v localllm:/data -e LOCALLLM_API_KEY=secret localllm:$version-cpu" ;;
  esac
  libc=${libc##* }
  case $libc in
    [0-9]*.[0-9]*) ;;
    *) libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc=''
      libc=${libc##* } ;;
  esac
  case $libc in
    1.* | 2.[0-9] | 2.1[0-9] | 2.2[0-7]) refuse "This system has glibc $libc; PyTorch needs 2.28 or newer (Debian 10, RHEL 8)." \
      "Try: docker run -p 127.0.0.1:8000:8000 -v localllm:/data -e LOCALLLM_API_KEY=secret localllm:$version-cpu" ;;
  esac
  case $(cat "$root/proc/sys/kernel/osrelease" 2>/dev/null) in *[Mm]icrosoft*) wsl=', WSL2' ;; esac
}

look_at_gpu() {
  driver='' gpu='' smi=nvidia-smi other_gpu=''
  has $smi || smi=$root/usr/lib/wsl/lib/nvidia-smi
  for file in "$root/proc/driver/nvidia/version" "$root/sys/module/nvidia/version"; do
    [ -n "$driver" ] || driver=$(awk '/NVRM/ || NF == 1 { for (i = 1; i <= NF; i++)
      if ($i ~ /^[0-9]+\.[0-9]+(\.[0-9]+)?$/) { print $i; exit } }' "$file" 2>/dev/null) || driver=''
  done
  if has "$smi" && gpu=$("$smi" --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1); then
    case $gpu in *', '[0-9]*) driver=${driver:-${gpu##*, }} gpu=${gpu%, *} ;; *) gpu='' ;; esac
  fi
  if [ -e "$root/etc/nv_tegra_release" ]; then
    driver='' other_gpu="Jetson: its GPU needs NVIDIA's own build of PyTorch; the CPU is used instead."
  fi
  [ -z "$driver$other_gpu" ] || return 0
  for device in "$root"/sys/bus/pci/devices/*; do
    case $(cat "$device/class" "$device/vendor" 2>/dev/null | tr '\n' ' ') in
      0x03*0x10de*) other_gpu='NVIDIA GPU without a driver: the CPU is used. Run this again when the driver is installed.' ;;
      0x03*0x1002*) other_gpu=${other_gpu:-'AMD GPU: not supported yet, the CPU is used.'} ;;
    esac
  done
}

choose_torch() {
  major=${driver%%.*} torch=cpu
  case $asked in
    12) torch=cu129 ;;
    13) torch=cu130 ;;
    '') [ -z "$driver" ] || { torch=cu129; [ "$major" -lt 580 ] || torch=cu130; } ;;
  esac
  [ -z "$offline" ] || torch=$(folder_says torch)
  case $torch in cu130) floor=580 ;; cu*) floor=525 ;; *) floor=0 ;; esac
  [ "${major:-999}" -lt "$floor" ] || return 0
  [ $action != torch ] || { say "old $driver"; exit 0; }
  [ "$major" -lt 525 ] || refuse "PyTorch for CUDA 13 needs NVIDIA driver 580 or newer; this machine has $driver." \
    "Try: sh install.sh --cuda 12   (offline: a folder made by packaging/wheelhouse --torch cu129)"
  refuse "PyTorch for CUDA needs NVIDIA driver 525 or newer; this machine has $driver." \
    "Try: sudo ubuntu-drivers install   (then restart), or without the GPU: sh install.sh --cpu"
}

folder_says() { sed -n "s/^$1 //p" "$offline/wheelhouse.txt"; }

find_source() {
  case $0 in */*) here=$(cd "${0%/*}" && pwd) ;; *) here=$PWD ;; esac
  if [ -n "$offline" ]; then
    make="packaging/wheelhouse --torch cpu --out FOLDER   (in a clone, on a machine with a network)"
    [ -f "$offline/wheelhouse.txt" ] || refuse "$offline is not a folder of wheels: it has no wheelhouse.txt." "Try: $make"
    offline=$(cd "$offline" && pwd) version=$(folder_says version)
    [ -z "$own_version" ] || [ "$own_version" = "$version" ] ||
      refuse "$offline has localllm $version, not $own_version." "Try: sh install.sh --offline $offline"
    for wheel in "localllm-$version" "uv-$uv_version"; do
      set -- "$offline/$wheel"-*.whl
      [ -f "$1" ] || refuse "$offline has no file $wheel-….whl: it was not copied whole." "Try: copy it again, or $make"
    done
    [ "$(folder_says platform)" = "$os-$arch" ] ||
      refuse "The wheels of $offline are for $(folder_says platform); this machine is $os-$arch." "Try: $make"
    return 0
  fi
  [ -n "$source" ] || [ ! -f "$here/packaging/wheelhouse" ] || source=$here
  case $source in
    '') refuse "This script does not know where localllm's wheel is, and was not started from a clone." \
      "Try: LOCALLLM_SOURCE=FOLDER-OR-ADDRESS sh install.sh   (a clone, a folder of wheels, or an https:// page)" ;;
    https://*) source=${source%/} ;;
    *) [ -d "$source" ] || refuse "LOCALLLM_SOURCE is '$source', which is not a folder." \
      "Try: LOCALLLM_SOURCE=/path/to/clone sh install.sh"
      source=$(cd "$source" && pwd) ;;
  esac
  [ ! -f "$source/pyproject.toml" ] || version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$source/localllm/version.py")
  [ -z "$own_version" ] || [ "$own_version" = "$version" ] ||
    refuse "The clone $source has localllm $version, not $own_version." "Try: git -C $source checkout v$own_version"
}

look_at_disk() {
  place=$dir
  while [ ! -d "$place" ]; do place=$(dirname "$place"); done
  [ -w "$place" ] || refuse "$place cannot be written to (read-only, or another user's), and localllm would go to $dir." \
    "Try: sh install.sh --dir /a/folder/of/yours"
  free_mb=$(df -Pk "$place" | awk 'NR == 2 { print int($4 * 1024 / 1000000) }')
  free=$(awk "BEGIN { printf \"%.1f\", $free_mb / 1000 }")
  download='about 3.1 GB' disk='6 GB' needed=9
  [ "$torch" != cpu ] || download='about 290 MB' disk='1.3 GB' needed=2
  [ "$free_mb" -ge $((needed * 1000)) ] || refuse "$place has $free GB free; the install needs $needed GB." \
    "Try: sh install.sh --dir /a/larger/disk/localllm   (df -h lists the disks)"
  link=$(readlink "$bin/localllm" 2>/dev/null) || link=''
  case $link in "$dir"/*) ;; *)
    if [ -e "$bin/localllm" ] || [ -n "$link" ]; then
      refuse "$bin/localllm belongs to another install${link:+ ($link)}." \
        "Try: mv $bin/localllm $bin/localllm.old   (or sh install.sh --dir D)"
    fi ;;
  esac
}

# ---- 2. what will happen ----------------------------------------------------------------------------------------------

short() { case $1 in "$HOME"/*) say "~${1#"$HOME"}" ;; *) say "$1" ;; esac; }

tell_plan() {
  case $torch in cpu) build='for CPUs' ;; cu129) build='for CUDA 12.9' ;; *) build='for CUDA 13.0' ;; esac
  [ -z "$offline" ] || download=nothing
  before=$("$dir/tools/localllm/bin/localllm" --version 2>/dev/null) || before=''
  if [ -n "$driver" ]; then gpu="${gpu:-NVIDIA GPU}, driver $driver"; else gpu='no NVIDIA GPU'; fi
  say "Here: $os $arch${libc:+, glibc $libc}$wsl, $free GB free, $gpu."
  [ -z "$other_gpu" ] || say "$other_gpu"
  [ -z "$before" ] || say "Installed: ${before#localllm }; it is replaced, and your chats, keys and settings stay."
  say "localllm $version with PyTorch $build: $download to download, $disk on disk, in $(short "$dir")."
}

confirm() {
  [ -z "$yes" ] || return 0
  [ -t 0 ] || refuse "There is no terminal to ask at, and nothing was changed." \
    "Try: sh install.sh --yes   (through a pipe: … | sh -s -- --yes)"
  printf '%s [Y/n] ' "$1"
  read -r answer || answer=n
  case $answer in '' | [Yy]*) ;; *) refuse "Nothing was changed." ;; esac
}

# ---- 3. uv ------------------------------------------------------------------------------------------------------------

download() { # URL FILE; the exit status is one of curl's
  if has curl; then
    curl -fsSL --retry 2 -o "$2" "$1"
  elif has wget; then
    wget -q -O "$2" "$1" || case $? in 4) return 6 ;; 5) return 60 ;; *) return 22 ;; esac
  else
    refuse "Neither curl nor wget is installed." "Try: sudo apt-get install -y curl"
  fi
}

refuse_download() { # STATUS HOST: say why the network did not give a file
  proxy=${HTTPS_PROXY:-${https_proxy:-${ALL_PROXY:-${all_proxy:-}}}}
  case $1 in
    23) refuse "$dir could not be written to: its disk is full." \
      "Try: df -h $dir   (then sh install.sh --dir /a/larger/disk)" ;;
    35 | 51 | 58 | 60 | 77) refuse "The certificate of $2 was not accepted: a proxy that reads TLS, or a wrong clock." \
      "Try: SSL_CERT_FILE=/path/to/your-authority.pem UV_SYSTEM_CERTS=1 sh install.sh   (date shows the clock)" ;;
    22) refuse "$2 answers, but not with the file." \
      "Try: pip install uv   (from an index of your own), then sh install.sh" ;;
  esac
  [ -z "$proxy" ] || refuse "$2 cannot be reached through the proxy ${proxy##*@}." \
    "Try: HTTPS_PROXY=http://PROXY:PORT sh install.sh   (or unset HTTPS_PROXY)"
  refuse "No network: $2 cannot be reached." \
    "Try: sh install.sh --offline FOLDER   (packaging/wheelhouse makes it), or the file localllm-VERSION-linux-x86_64-cpu.run"
}

sha256_of() { if has sha256sum; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d ' ' -f 1; }

pinned_uv() { # the file of PyPI and its SHA-256
  case $arch in
    x86_64) address=3d/aa/26d64642d808de4a652579ef950d7cd2d37f080a8babf9c67c6b75fc4c3f
      address=$address/uv-$uv_version-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl
      sha=d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19 ;;
    aarch64) address=fe/2f/51a5de367c602592c018a42a23d57fba5f2689fe6c3bf025dcf043b39c61
      address=$address/uv-$uv_version-py3-none-manylinux_2_28_aarch64.whl
      sha=ecb6028d79dc96fbeafffe5c8af62a7099487ebc05a701e76714eebcffd06375 ;;
    *) address=f3/a7/a8d7b074798c7fb3b26b37584b8fe2e29df2ccdc24ce7902caab2a53edbf
      address=$address/uv-$uv_version-py3-none-macosx_11_0_arm64.whl
      sha=66c512266d633bef48384a1f53003f41f2a8e7b36fe6e7fbfd3e0fd52d96fa63 ;;
  esac
}

find_uv() {
  pinned_uv
  for uv in uv "$dir/bin/uv"; do
    found=$("$uv" --version 2>/dev/null) || continue
    case $found in 'uv 0.'[0-9].* | 'uv 0.1'[0-2].*) ;; 'uv '*) return 0 ;; esac # 0.13 or newer
  done
  uv=$dir/bin/uv wheel=$dir/cache/${address##*/}
  if [ -n "$offline" ]; then wheel=$offline/${address##*/}; else
    say "Downloading uv $uv_version (18 MB)"
    download "$uv_files/$address" "$wheel" || refuse_download $? files.pythonhosted.org
  fi
  [ "$(sha256_of "$wheel")" = "$sha" ] ||
    refuse "The SHA-256 of $wheel is wrong: the file is incomplete or was changed." \
    "Try: rm $wheel   (then run this script again)"
  if has unzip; then
    unzip -q -p "$wheel" "uv-$uv_version.data/scripts/uv" >"$uv"
  elif has python3; then
    python3 -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))' \
      "$wheel" "uv-$uv_version.data/scripts/uv" >"$uv"
  else
    refuse "Neither unzip nor python3 is installed, and uv comes in a zip file." "Try: sudo apt-get install -y unzip"
  fi
  chmod +x "$uv"
  "$uv" --version >/dev/null 2>&1 || refuse_noexec
}

refuse_noexec() {
  refuse "Programs in $dir cannot be started: is its disk mounted with noexec?" \
    "Try: sh install.sh --dir /a/folder/on/another/disk   (findmnt -T $dir shows how it is mounted)"
}

# ---- 4. localllm ------------------------------------------------------------------------------------------------------

use_own_folders() { # uv must neither see an active environment nor write into it
  unset UV_PYTHON VIRTUAL_ENV PYTHONPATH PYTHONHOME
  export UV_TOOL_DIR="$dir/tools" UV_TOOL_BIN_DIR="$bin" UV_PYTHON_INSTALL_DIR="$dir/python"
  export UV_CACHE_DIR="$dir/cache" UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"
}

# Triton compiles a C file against Python.h before it launches the first kernel. A Python that uv manages has this header,
# the system's often has not. Choose before PyTorch is downloaded.
choose_python() { # WHAT THE WHEELS NEED: a version or a range
  python=$1
  case $torch in cu*) ;; *) return 0 ;; esac
  if [ -z "$offline" ]; then
    say "Looking for a Python with headers, which Triton needs (uv may download one, 30 MB)"
    if "$uv" python install --quiet --no-bin "$python" >/dev/null 2>&1; then
      python=$("$uv" python find --managed-python "$python") && return 0
    fi
  fi
  python=$("$uv" python find "$1") || refuse "No Python $1 was found, and uv could not download one." \
    "Try: sudo apt-get install -y python3 python3-dev"
  has_headers "$python" || refuse "$python has no C headers ($header is missing), and Triton needs them on a GPU." \
    "Try: sudo apt-get install -y ${header_package}   (then this script again), or without the GPU: sh install.sh --cpu"
}

has_headers() { # PYTHON: find Python.h where Triton looks, and name the system's package that has it
  header=$("$1" -c 'import sysconfig; print(sysconfig.get_paths(scheme="posix_prefix")["include"] + "/Python.h")') || return 1
  header_package=${header%/Python.h}
  header_package=${header_package##*/}-dev
  [ -e "$header" ]
}

install_localllm() {
  set -- --compile-bytecode
  if [ -n "$offline" ]; then
    python=$(folder_says python)
    "$uv" python find --offline "$python" >/dev/null 2>&1 ||
      refuse "The wheels of $offline are for Python $python, which is not installed." \
      "Try: sudo apt-get install -y python$python   (or the .run file, which contains Python)"
    choose_python "$python"
    set -- "$@" --offline --no-index --find-links "$offline" --python "$python"
    set -- "$@" --constraints "$offline/lock.txt" "localllm==$version"
  else
    choose_python "$python_range"
    set -- "$@" --python "$python"
    [ "$os" != Linux ] || set -- "$@" --torch-backend "$torch"
    lock=$source/$torch.txt
    [ ! -f "$source/pyproject.toml" ] || lock=$source/packaging/lock/$torch.txt
    case $libc in
      2.28 | 2.29 | 2.30) say "glibc $libc is older than the tested packages need (2.31): uv chooses older ones." ;;
      *) set -- "$@" --constraints "$lock" ;;
    esac
    if [ -f "$source/pyproject.toml" ]; then set -- "$@" "$source"; else
      set -- "$@" --find-links "$source" "localllm==$version"
    fi
  fi
  case $torch in cu*) has gcc || has clang || [ -n "${CC:-}" ] || set -- --with "ziglang==$zig_version" "$@" ;; esac
  # uv keeps a torch that satisfies localllm: another build needs a new environment.
  [ "$(cat "$dir/torch" 2>/dev/null)" = "$torch" ] || [ ! -d "$dir/tools/localllm" ] || set -- --force "$@"
  case $link in */app/*) rm "$bin/localllm" ;; esac # of the .run file; uv replaces its own link only
  if ! "$uv" tool install "$@"; then
    [ -e "$bin/localllm" ] || [ -z "$link" ] || ln -s "$link" "$bin/localllm"
    explain_failure
  fi
  say "$torch" >"$dir/torch"
  "$bin/localllm" --version >/dev/null || refuse_noexec
  rm -rf "$dir/cache"
}

explain_failure() {
  [ "$(df -Pk "$dir" | awk 'NR == 2 { print $4 }')" -gt 100000 ] || refuse_download 23 ''
  [ -n "$offline" ] || download https://pypi.org/simple/uv/ /dev/null 2>/dev/null || refuse_download $? pypi.org
  refuse "localllm was not installed; uv's message is above. What was downloaded is kept in $dir/cache." \
    "Try: sh install.sh   (continues)"
}

# ---- 5. what now ------------------------------------------------------------------------------------------------------

tell_next() {
  "$bin/localllm" doctor --brief 2>/dev/null || "$bin/localllm" doctor || true
  case ${SHELL:-} in
    */bash | */zsh | */fish) "$bin/localllm" completion "${SHELL##*/}" --install 2>/dev/null || true ;;
  esac
  say ''
  case :$PATH: in
    *":$bin:"*) ;;
    *) say "$(short "$bin") is not in PATH." "Try: echo 'export PATH=\"$bin:\$PATH\"' >>~/.profile && . ~/.profile" ;;
  esac
  say "Start:   localllm up          (a page with a small demo model; localllm up MODEL serves another)" \
    "Models:  localllm doctor      (names the models that fit this machine)" \
    "Place:   $(short "$dir")   (remove: localllm uninstall)"
}

uninstall() {
  set -- "$dir/tools" "$dir/python" "$dir/cache" "$dir/bin/uv" "$dir/torch"
  [ -d "$dir/tools" ] || [ -d "$dir/cache" ] || refuse "localllm is not installed in $dir." "Try: localllm uninstall   (for another kind of install)"
  say "To be removed: $(short "$bin/localllm") and, in $(short "$dir"): tools, python, cache, bin/uv." \
    "Kept: chats, keys, settings and models."
  confirm 'Remove?'
  case $(readlink "$bin/localllm" 2>/dev/null) in
    "$dir"/tools/*)
      # Its own command also removes the service and the completions. A broken environment is just deleted.
      ! "$bin/localllm" --version >/dev/null 2>&1 || "$bin/localllm" uninstall --keep-data --yes || exit 1
      rm -f "$bin/localllm" ;;
  esac
  rm -rf "$@"
  rmdir "$dir/bin" "$dir" "$bin" 2>/dev/null || true
  say "localllm is removed."
}

main() {
  read_options "$@"
  [ $action != uninstall ] || { uninstall; return; }
  [ $action != torch ] || { look_at_gpu; choose_torch; say "$torch $driver"; return; }
  look_at_system
  find_source
  look_at_gpu
  choose_torch
  look_at_disk
  tell_plan
  [ $action != look ] || return 0
  confirm 'Go on?'
  trap 'refuse "" "Interrupted. What was downloaded is kept in $dir/cache." "Try: sh install.sh   (continues)"' INT TERM HUP
  [ -n "$own_dir" ] || (umask 077 && mkdir -p "$dir" 2>/dev/null) || true # chats and keys will be here, too
  mkdir -p "$dir/bin" "$dir/cache" "$bin" 2>/dev/null ||
    refuse "$dir and $bin cannot be created." "Try: sh install.sh --dir /a/folder/of/yours"
  use_own_folders
  find_uv
  install_localllm
  tell_next
}

main "$@"

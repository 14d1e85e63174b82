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
# Packages come from where uv or pip of this machine are configured to take them, else from PyPI; PyTorch too, else from
# its own index or a mirror of it: LOCALLLM_TORCH_INDEX=https://mirror/whl/cpu.
set -eu

version=0.1.0
python_range='>=3.11,<3.14'
# The tested versions of PyTorch, one for each build. packaging/make_lock reads them here, and scripts/up, the folder of
# wheels and the image ask `install.sh --torch`. On PyPI, the builds for ARM have CUDA from 2.11 on.
torch_cpu=2.13.0 torch_cu129=2.13.0 torch_cu130=2.13.0 torch_pypi_arm=2.10.0
torch_site=https://download.pytorch.org/whl
pypi=https://pypi.org/simple
# uv comes from PyPI, where the other packages come from: one host fewer to reach, and the same SHA-256 in every mirror.
uv_version=0.13.9
zig_version=0.15.2 # a C compiler for Triton where this machine has none
uv_files=https://files.pythonhosted.org/packages
root=${LOCALLLM_ROOT:-} # tests put the /proc and /sys of other machines here

say() { printf '%s\n' "$@"; }
refuse() { say "$@" >&2; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }

read_options() {
  asked='' offline='' own_dir='' yes='' action=install source=${LOCALLLM_SOURCE:-} own_version='' own_python=''
  while [ $# -gt 0 ]; do
    case $1 in
      --version | --cuda | --offline | --dir | --python)
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
      --build) action=build ;; # for scripts: print the build of PyTorch and this machine's package indexes
      --torch) action=torch ;; # the same, and where PyTorch comes from, for the Python of --python
      --python) own_python=$2; shift ;;
      --uv) action=uv ;; # for scripts: find uv, or download it into the folder of --dir; print its path
      --uninstall) action=uninstall ;;
      --help | -h) sed -n '2,16s/^# \{0,1\}//p' "$0"; exit 0 ;;
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
  marker=$dir/.localllm-install
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
  major=${driver%%.*} torch=cpu old_driver=''
  case $asked in
    12) torch=cu129 ;;
    13) torch=cu130 ;;
    '') [ -z "$driver" ] || { torch=cu129; [ "$major" -lt 580 ] || torch=cu130; } ;;
  esac
  [ -z "$offline" ] || torch=$(folder_says torch)
  case $torch in cu130) floor=580 ;; cu*) floor=525 ;; *) floor=0 ;; esac
  [ "${major:-999}" -lt "$floor" ] || return 0
  if [ $action = torch ] || [ $action = build ]; then # a build that was asked for may be for another machine
    [ -n "$asked" ] || torch=cpu old_driver=$driver
    return 0
  fi
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
  needed=9
  [ "$size" != cpu ] || needed=2
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

# ---- 2. where PyTorch and the packages come from ----------------------------------------------------------------------

pip_says() { # KEY: its value in pip's configuration, which uv does not read: variables first, then files
  eval "value=\${PIP_$(printf %s "$1" | tr 'a-z-' 'A-Z_'):-}"
  [ -z "$value" ] || { say "$value"; return; }
  [ "${PIP_CONFIG_FILE:-}" != /dev/null ] || return 0
  mac='Library/Application Support/pip/pip.conf'
  for section in install global; do
    for file in "${PIP_CONFIG_FILE:-}" "$HOME/$mac" "${XDG_CONFIG_HOME:-$HOME/.config}/pip/pip.conf" \
      "$HOME/.pip/pip.conf" "$root/etc/xdg/pip/pip.conf" "$root/etc/pip.conf" "$root/$mac"; do
      [ -f "$file" ] || continue
      value=$(awk -v section="[$section]" -v key="$1" '
        /^[ \t]*([#;]|$)/ { next }
        /^\[/ { inside = index($0, section) == 1; found = 0; next }
        /^[ \t]/ { if (found) print; next }
        { name = tolower($0); sub(/[ \t]*[=:].*/, "", name); gsub(/_/, "-", name)
          found = inside && name == key
          if (found) { sub(/^[^=:]*[=:]/, ""); print } }' "$file" | tr -s ' \t\n' ' ')
      value=${value# }
      [ -z "$value" ] || { say "${value% }"; return; }
    done
  done
}

look_at_indexes() { # set default, extra, links and insecure from uv's configuration; if there is none, from pip's
  whose='' no_index='' insecure=${UV_INSECURE_HOST:-} links=$(printf %s "${UV_FIND_LINKS:-}" | tr , ' ')
  default=${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-}} extra="${UV_INDEX:-} ${UV_EXTRA_INDEX_URL:-}"
  for file in "${UV_CONFIG_FILE:-${XDG_CONFIG_HOME:-$HOME/.config}/uv/uv.toml}" "$root/etc/uv/uv.toml"; do
    [ -f "$file" ] || continue
    found=$(awk '/^ *(url|index-url|extra-index-url|find-links) *=/ {
      sub(/[^=]*=/, ""); gsub(/[]["\047,]/, " "); print }' "$file")
    for place in $found; do
      if [ -d "${place#file://}" ]; then links="$links $place"
      elif [ -z "$default" ]; then default=$place
      else extra="$extra $place"; fi
    done
  done
  if [ -n "$default$links${extra# }" ]; then whose="uv's configuration"; else
    default=$(pip_says index-url) extra=$(pip_says extra-index-url) links=$(pip_says find-links)
    [ -z "$default$links$extra" ] || whose="pip's configuration"
    insecure=${insecure:-$(pip_says trusted-host)}
    case $(pip_says no-index) in 1 | [Tt]rue | yes | on) no_index=1 ;; esac
  fi
  default=${default%/} package_index=${default:-$pypi}
  cert=$(pip_says cert) proxy=$(pip_says proxy)
  [ -z "$cert" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}" CURL_CA_BUNDLE="${CURL_CA_BUNDLE:-$cert}"
  [ -z "$proxy" ] || [ -n "${HTTPS_PROXY:-${https_proxy:-${ALL_PROXY:-${all_proxy:-}}}}" ] ||
    export HTTPS_PROXY="$proxy" https_proxy="$proxy"
}

pythons_at() { # FOLDER-OR-PAGE: set tags to the Pythons for which the wanted wheel is there, as 'cp311 cp312'
  status=0
  case $1 in
    http://* | https://*) names=$(download "$1" - 2>/dev/null) || status=$? ;;
    *) place=${1#file://}
      if [ -f "$place/index.html" ]; then names=$(cat "$place/index.html"); else names=$(ls "$place" 2>/dev/null) || status=$?; fi ;;
  esac
  tags='cp31[123]'
  [ -z "$own_python" ] || tags=cp$(printf %s "$own_python" | tr -d .)
  tags=$(say "$names" | sed 's/%2[Bb]/+/g' | tr '"<>/#?' '\n' |
    sed -n "s/^torch-$wanted-\($tags\)-\1-[a-z0-9_.]*_$arch\.whl\$/\1/p" | sort -u | tr '\n' ' ')
  torch_page=$1
  [ -n "$tags" ]
}

find_torch() { # in this machine's own places, on PyTorch's index, on the package index; set torch_from to own, torch or index
  torch_from=index tags='' torch_page='' size=$torch
  [ "$os" = Linux ] || { wanted=$torch_cpu; return 0; }
  case $torch in cpu) wanted=$torch_cpu ;; cu129) wanted=$torch_cu129 ;; *) wanted=$torch_cu130 ;; esac
  wanted=$wanted+$torch
  for place in $links; do
    ! pythons_at "$place" || { torch_from=own; return 0; }
  done
  for place in $extra $default; do
    case $place in [A-Za-z0-9]*=*://*) place=${place#*=} ;; esac # uv's NAME=ADDRESS
    ! pythons_at "${place%/}/torch/" || { torch_from=own; return 0; }
  done
  torch_index=${LOCALLLM_TORCH_INDEX:-$torch_site/$torch}
  torch_index=${torch_index%/}
  for _ in 1 2; do # a probe that fails by chance would cost 2.5 GB
    ! pythons_at "$torch_index/torch/" || { torch_from=torch; return 0; }
  done
  case $status in
    0 | 22) why="$(shown "$torch_index") has no torch $wanted for $arch${own_python:+ and Python $own_python}" ;;
    *) why="PyTorch's index ($(host_of "$torch_index")) cannot be reached" ;;
  esac
  [ -z "${LOCALLLM_TORCH_INDEX:-}" ] || refuse "$why. LOCALLLM_TORCH_INDEX names it." \
    "Try: curl -I $(shown "$torch_index")/torch/   (then sh install.sh without LOCALLLM_TORCH_INDEX, or with another)"
  find_torch_on_package_index
}

find_torch_on_package_index() { # its build for x86_64 is that for CUDA 13; PyTorch's index could not give another one
  mirror="LOCALLLM_TORCH_INDEX=https://your-mirror/whl/$torch sh install.sh"
  case $arch-$torch in
    *-cu129) refuse "$why, and only it has PyTorch for CUDA 12.9${driver:+, which driver $driver needs}." \
      "Try: $mirror" "     sudo ubuntu-drivers install   (driver 580 or newer: package indexes have PyTorch for it)" ;;
    aarch64-cpu) wanted=$torch_pypi_arm ;;
    x86_64-cpu)
      [ "$asked" != cpu ] || refuse "$why, and only it has PyTorch without CUDA." \
        "Try: sh install.sh   (PyTorch with CUDA from your package index: $(sizes cu130))" \
        "     $mirror --cpu" \
        "     pip download 'torch==$wanted' on another machine, then PIP_FIND_LINKS=FOLDER sh install.sh --cpu"
      wanted=$torch_cu130 size=cu130 ;;
    *) wanted=$torch_cu130 ;;
  esac
  [ -z "$no_index" ] || refuse "$why, and pip's configuration (no-index) forbids package indexes." "Try: $mirror"
  pythons_at "$package_index/torch/" || {
    [ "$status" = 0 ] || [ "$status" = 22 ] || { say "$why." >&2; refuse_download "$status" "$(host_of "$package_index")"; }
    refuse "$why, and $(shown "$package_index") has no torch $wanted for $arch." "Try: $mirror"
  }
}

# The install takes a Python of this machine, or one that uv downloads. Where PyTorch's wheels are not there for all
# versions in the range, they decide: for another version, uv would silently take another build of PyTorch.
narrow_python() {
  python_range=${own_python:-$python_range}
  case $tags in '' | 'cp311 cp312 cp313 ') return 0 ;; esac
  for tag in $tags; do
    python_range=3.${tag#cp3}
    ! has "python$python_range" || return 0
  done
}

sizes() { # BUILD: to download and on disk, as measured
  case $1 in
    cpu) say 'about 280 MB to download, 1.3 GB on disk' ;;
    cu130) say 'about 2.8 GB to download, 6 GB on disk' ;;
    *) say 'about 3.1 GB to download, 6 GB on disk' ;;
  esac
}

host_of() { host=${1#*://}; host=${host%%/*}; say "${host##*@}"; }
shown() { say "$1" | sed 's#//[^/@]*@#//#'; } # an address without its password

tell_scripts() { # lines of a name and a value, which are pip's names and uv's variables at the end
  os=$(uname -s) arch=$(uname -m)
  look_at_gpu
  choose_torch
  look_at_indexes
  if [ $action = torch ]; then
    find_torch
    say "requirement torch==$wanted" "sizes $(sizes "$size")" "from $(torch_place)"
  fi
  use_indexes
  extra=$(for place in $extra; do say "$place"; done | sed 's#^[A-Za-z0-9_-]*=\([a-z]*://\)#\1#' | tr '\n' ' ') # uv's names
  say "build $torch" "driver $driver" "old $old_driver"
  say "index-url $default" "extra-index-url $extra" "find-links $links" "trusted-host $insecure"
  for name in FIND_LINKS INSECURE_HOST DEFAULT_INDEX INDEX NO_INDEX INDEX_STRATEGY; do
    eval "say \"UV_$name \${UV_$name:-}\""
  done
  say "SSL_CERT_FILE ${SSL_CERT_FILE:-}" "HTTPS_PROXY ${HTTPS_PROXY:-${https_proxy:-}}"
}

tell_uv() {
  look_at_system
  look_at_indexes
  mkdir -p "$dir/bin" "$dir/cache" || refuse "$dir cannot be created."
  find_uv >&2
  rm -rf "$dir/cache"
  say "$uv"
}

torch_place() {
  case $torch_from in
    own) say "$(shown "${torch_page%/torch/}") ($whose)" ;;
    torch) shown "$torch_index" ;;
    *) case $package_index in "$pypi") say PyPI ;; *) shown "$package_index" ;; esac ;;
  esac
}

# ---- 3. what will happen ----------------------------------------------------------------------------------------------

short() { case $1 in "$HOME"/*) say "~${1#"$HOME"}" ;; *) say "$1" ;; esac; }

tell_plan() {
  case $torch-$size in
    cpu-cpu) build='for CPUs' ;;
    cpu-*) build='for CUDA (it runs on CPUs, too)' ;;
    cu129-*) build='for CUDA 12.9' ;;
    *) build='for CUDA 13.0' ;;
  esac
  what=$(sizes "$size")
  [ -z "$offline" ] || what="nothing to download,${what##*,}"
  before=$("$dir/tools/localllm/bin/localllm" --version 2>/dev/null) || before=''
  if [ -n "$driver" ]; then gpu="${gpu:-NVIDIA GPU}, driver $driver"; else gpu='no NVIDIA GPU'; fi
  say "Here: $os $arch${libc:+, glibc $libc}$wsl, $free GB free, $gpu."
  [ -z "$other_gpu" ] || say "$other_gpu"
  [ -z "$before" ] || say "Installed: ${before#localllm }; it is replaced, and your chats, keys and settings stay."
  [ -n "$offline" ] || tell_places
  say "localllm $version with PyTorch $build: $what, in $(short "$dir")."
}

tell_places() { # where that is not PyPI and PyTorch's own index
  [ "$torch_from $os" != 'index Linux' ] || say "$why: PyTorch comes from $(torch_place)."
  [ $torch_from != own ] || say "PyTorch comes from $(torch_place)."
  [ -z "${LOCALLLM_TORCH_INDEX:-}" ] || [ $torch_from != torch ] || say "PyTorch comes from $(torch_place) (LOCALLLM_TORCH_INDEX)."
  [ -z "$whose" ] || say "Packages come from $(for place in $default $extra $links; do shown "$place"; done | tr '\n' ' ')($whose)."
}

confirm() {
  [ -z "$yes" ] || return 0
  [ -t 0 ] || refuse "There is no terminal to ask at, and nothing was changed." \
    "Try: sh install.sh --yes   (through a pipe: … | sh -s -- --yes)"
  printf '%s [Y/n] ' "$1"
  read -r answer || answer=n
  case $answer in '' | [Yy]*) ;; *) refuse "Nothing was changed." ;; esac
}

# ---- 4. the folder of the install -------------------------------------------------------------------------------------

# What is made in $dir; uv makes most of it. $marker holds this list, and only what it lists is ever removed.
made='tools/localllm
tools/.lock
tools/.gitignore
python/cpython-*
python/.lock
python/.temp
python/.gitignore
cache/archive-v*
cache/builds-v*
cache/environments-v*
cache/flat-index-v*
cache/git-v*
cache/interpreter-v*
cache/sdists-v*
cache/simple-v*
cache/wheels-v*
cache/.lock
cache/.gitignore
cache/.tmp*
cache/CACHEDIR.TAG
cache/uv-*.whl
cache/all.txt
cache/lock.txt
bin/uv
torch'

look_at_folder() { # refuse a folder with files of others, before anything is changed
  foreign=''
  for name in tools python cache bin torch; do
    is_ours $name || foreign="$foreign $name"
  done
  if ! has_marker && { [ -e "$marker" ] || [ -L "$marker" ]; }; then foreign="$foreign .localllm-install"; fi
  if [ -n "$own_dir" ] && ! has_marker && ! is_older tools && ! has_bundle; then
    foreign=$(contents_of "$dir") # a folder that was named has to be new
  fi
  [ -z "$foreign" ] || refuse "$dir has files that localllm did not make: ${foreign# }" \
    "Try: sh install.sh --dir ${own_dir:-/a/folder/of/yours}/localllm   (a new folder; or move these files away)"
}

contents_of() { # FOLDER: the first ten names
  for path in "$1"/* "$1"/.[!.]*; do
    if [ -e "$path" ] || [ -L "$path" ]; then say "${path##*/}"; fi
  done | head -n 10 | tr '\n' ' '
}

is_ours() { # NAME: it does not exist, the marker lists it, or a version from before there was a marker made it
  [ ! -L "$dir/$1" ] || return 1
  [ -e "$dir/$1" ] || return 0
  if has_marker; then grep -q "^$1\(/\|\$\)" "$marker"; else is_older "$1"; fi
}

has_marker() { [ ! -L "$marker" ] && [ -f "$marker" ] && grep -q '^localllm [0-9]' "$marker"; }

is_older() {
  case $1 in
    tools) grep -q '^\(cpu\|cu1[0-9]*\)$' "$dir/torch" 2>/dev/null &&
      grep -q '^requirements = .*"localllm"' "$dir/tools/localllm/uv-receipt.toml" 2>/dev/null ;;
    cache) [ -z "$own_dir" ] && [ -f "$dir/cache/CACHEDIR.TAG" ] ;; # of uv, when an install was interrupted
    *) is_older tools || is_older cache ;;
  esac
}

has_bundle() { # an offline file was unpacked here
  for file in "$dir"/app/*/BUNDLE; do [ ! -f "$file" ] || return 0; done
  return 1
}

claim_folder() { # write the marker, before anything else is made
  [ -n "$own_dir" ] || (umask 077 && mkdir -p "$dir" 2>/dev/null) || true # chats and keys will be here, too
  mkdir -p "$dir/bin" "$dir/cache" "$bin" 2>/dev/null ||
    refuse "$dir and $bin cannot be created." "Try: sh install.sh --dir /a/folder/of/yours"
  { say "localllm $version"; { sed 1d "$marker" 2>/dev/null || true; say "$made"; } | sort -u; } >"$marker.$$"
  mv "$marker.$$" "$marker"
}

remove_made() { # NAME...: remove what the marker lists of these folders of $dir; a folder with other files stays
  for name in "$@"; do
    [ ! -L "$dir/$name" ] || continue
    grep "^$name\(/\|\$\)" "$marker" | while IFS= read -r pattern; do
      case $pattern in *..*) continue ;; esac
      for path in "$dir"/$pattern; do rm -rf "$path"; done
    done
    rmdir "$dir/$name" 2>/dev/null || true
  done
}

# ---- 5. uv ------------------------------------------------------------------------------------------------------------

download() { # ADDRESS FILE; the exit status is one of curl's
  host=$(host_of "$1") trusted=''
  case " $insecure " in *" $host "* | *" ${host%%:*} "*) trusted=1 ;; esac
  if has curl; then
    curl -fsSL ${trusted:+-k} --connect-timeout 8 --speed-time 20 --retry 1 -o "$2" "$1"
  elif has wget; then
    wget -q ${trusted:+--no-check-certificate} -T 8 -O "$2" "$1" ||
      case $? in 4) return 6 ;; 5) return 60 ;; *) return 22 ;; esac
  elif has python3; then
    python3 -c 'import shutil, sys, urllib.request
to = sys.stdout.buffer if sys.argv[2] == "-" else open(sys.argv[2], "wb")
shutil.copyfileobj(urllib.request.urlopen(sys.argv[1], timeout=8), to)' "$1" "$2" || return 6
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
    download "$uv_files/$address" "$wheel" || uv_of_pip || refuse_download "$uv_status" files.pythonhosted.org
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

uv_of_pip() { # a mirror has the same file, and the machine's pip may know a mirror
  uv_status=$?
  has python3 && python3 -m pip download --quiet --no-deps --dest "$dir/cache" "uv==$uv_version" && [ -f "$wheel" ]
}

refuse_noexec() {
  refuse "Programs in $dir cannot be started: is its disk mounted with noexec?" \
    "Try: sh install.sh --dir /a/folder/on/another/disk   (findmnt -T $dir shows how it is mounted)"
}

# ---- 6. localllm ------------------------------------------------------------------------------------------------------

use_own_folders() { # uv must neither see an active environment nor write into it
  unset UV_PYTHON VIRTUAL_ENV PYTHONPATH PYTHONHOME
  export UV_TOOL_DIR="$dir/tools" UV_TOOL_BIN_DIR="$bin" UV_PYTHON_INSTALL_DIR="$dir/python"
  export UV_CACHE_DIR="$dir/cache" UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"
}

use_indexes() { # in variables: an address may have a password, and others can read command lines
  [ "${torch_from:-}" != torch ] || links="$links $torch_page"
  links=${links# }
  UV_FIND_LINKS=$(printf %s "$links" | tr -s ' ' ,)
  export UV_FIND_LINKS UV_INSECURE_HOST="$insecure"
  case $whose in pip*)
    export UV_DEFAULT_INDEX="$default" UV_INDEX="$extra"
    [ -z "$no_index" ] || export UV_NO_INDEX=1 ;;
  esac
  # uv takes a package from the first index that knows its name; pip, the best version of all.
  [ -z "$whose" ] || export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
}

find_lock() { # the tested versions of the packages
  lock=$source/$torch.txt
  [ ! -f "$source/pyproject.toml" ] || lock=$source/packaging/lock/$torch.txt
  if [ "$wanted" = "$torch_pypi_arm" ]; then # another PyTorch than the lock has
    case $lock in https://*)
      download "$lock" "$dir/cache/all.txt" || refuse_download $? "$(host_of "$lock")"
      lock=$dir/cache/all.txt ;;
    esac
    sed '/^torch==/d; /^triton==/d' "$lock" >"$dir/cache/lock.txt"
    lock=$dir/cache/lock.txt
  fi
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
    use_indexes
    choose_python "$python_range"
    set -- "$@" --python "$python"
    [ "$os" != Linux ] || set -- "$@" --with "torch==$wanted"
    find_lock
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
  [ "$(cat "$dir/torch" 2>/dev/null)" = "$size" ] || [ ! -d "$dir/tools/localllm" ] || set -- --force "$@"
  case $link in */app/*) rm "$bin/localllm" ;; esac # of the .run file; uv replaces its own link only
  if ! PATH="$bin:$PATH" "$uv" tool install "$@"; then # uv would warn of a PATH without $bin, of which tell_next speaks
    [ -e "$bin/localllm" ] || [ -z "$link" ] || ln -s "$link" "$bin/localllm"
    explain_failure
  fi
  say "$size" >"$dir/torch"
  "$bin/localllm" --version >/dev/null || refuse_noexec
  remove_made cache
}

explain_failure() {
  [ "$(df -Pk "$dir" | awk 'NR == 2 { print $4 }')" -gt 100000 ] || refuse_download 23 ''
  if [ -z "$offline" ]; then
    for page in "$torch_page" "$package_index/uv/"; do
      case $page in http*) download "$page" /dev/null 2>/dev/null || refuse_download $? "$(host_of "$page")" ;; esac
    done
    "$uv" python find --no-python-downloads "$python_range" >/dev/null 2>&1 || download https://github.com /dev/null 2>/dev/null ||
      refuse "Python $python_range is not installed, and github.com, where uv downloads Python, cannot be reached." \
        "Try: sudo apt-get install -y python3   (or PATH=/folder/of/python:\$PATH sh install.sh)"
  fi
  refuse "localllm was not installed; uv's message is above. What was downloaded is kept in $dir/cache." \
    "Try: sh install.sh   (continues)"
}

# ---- 7. what now ------------------------------------------------------------------------------------------------------

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
  if ! has_marker; then
    is_older tools || is_older cache ||
      refuse "localllm is not installed in $dir." "Try: localllm uninstall   (for another kind of install)"
    for name in tools python cache bin torch; do
      is_ours $name || made=$(say "$made" | grep -v "^$name\(/\|\$\)")
    done
  fi
  say "To be removed: $(short "$bin/localllm") and, in $(short "$dir"), what $(short "$marker") lists: tools, python, cache, bin/uv." \
    "Kept: chats, keys, settings and models."
  confirm 'Remove?'
  has_marker || say "localllm $version" "$made" >"$marker"
  case $(readlink "$bin/localllm" 2>/dev/null) in
    "$dir"/tools/*)
      # Its own command also removes the service and the completions. A broken environment is just deleted.
      ! "$bin/localllm" --version >/dev/null 2>&1 || "$bin/localllm" uninstall --keep-data --yes || exit 1
      rm -f "$bin/localllm" ;;
  esac
  if [ -f "$marker" ]; then
    remove_made tools python cache bin torch
    grep -q '^app/' "$marker" || rm -f "$marker"
  fi
  rmdir "$dir" "$bin" 2>/dev/null || true
  say "localllm is removed."
}

main() {
  read_options "$@"
  [ $action != uninstall ] || { uninstall; return; }
  case $action in
    build | torch) tell_scripts; return ;;
    uv) tell_uv; return ;;
  esac
  look_at_system
  find_source
  look_at_gpu
  choose_torch
  size=$torch torch_from=offline wanted=''
  look_at_folder
  [ -n "$offline" ] || { look_at_indexes; find_torch; narrow_python; }
  look_at_disk
  tell_plan
  [ $action != look ] || return 0
  confirm 'Go on?'
  trap 'refuse "" "Interrupted. What was downloaded is kept in $dir/cache." "Try: sh install.sh   (continues)"' INT TERM HUP
  claim_folder
  use_own_folders
  find_uv
  install_localllm
  tell_next
}

main "$@"

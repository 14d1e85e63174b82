#!/bin/sh
# localllm @VERSION@ with Python and PyTorch for CPUs, in one file that needs no network.
#
#   sh @NAME@ [--dir D] [COMMAND …]   unpack, then run localllm COMMAND, for example: up
#   sh @NAME@ [--dir D] --back        use the older version again
#   sh @NAME@ --check                 only compare the SHA-256 of the content
#
# It unpacks into ~/.local/share/localllm/app/@VERSION@, beside an older version, of which one is kept, and links
# ~/.local/bin/localllm to it. With --dir D the folders are D/app and D/bin.
set -eu

version=@VERSION@ platform=@PLATFORM@ glibc=@GLIBC@
sha256=@SHA256@
unpacked_mb=@UNPACKED_MB@ lines=@LINES@

say() { printf '%s\n' "$@"; }
refuse() { say "$@" >&2; exit 1; }

self=$0 own_dir='' action=unpack
while [ $# -gt 0 ]; do
  case $1 in
    --dir) [ $# -ge 2 ] || refuse "--dir needs a folder." "Try: sh $self --dir /a/folder"
      own_dir=$2; shift ;;
    --back) action=back ;;
    --check) action=check ;;
    --help | -h) sed -n '2,9s/^# \{0,1\}//p' "$self"; exit 0 ;;
    -*) refuse "$self has no option '$1'." "Try: sh $self --help" ;;
    *) break ;;
  esac
  shift
done
case $own_dir in '' | /*) ;; *) own_dir=$PWD/$own_dir ;; esac
dir=${own_dir:-${XDG_DATA_HOME:-$HOME/.local/share}/localllm}
app=$dir/app marker=$dir/.localllm-install
bin=${own_dir:+$own_dir/bin}
bin=${bin:-$HOME/.local/bin}

check_machine() {
  [ "$(uname -s)-$(uname -m)" = "$platform" ] ||
    refuse "This file is for $platform; this machine is $(uname -s)-$(uname -m)." "Try: sh install.sh   (of the same release)"
  libc=$(ldd --version 2>&1 | head -n 1) || true
  case $libc in
    *musl*) refuse "This system's C library is musl; PyTorch needs glibc." "Try: the container image, docs/guides/docker.md" ;;
  esac
  libc=${libc##* }
  case $libc in
    2.*[!0-9.]* | [!2]* | '') ;; # unknown: the interpreter says more
    *) minor=${libc#2.}
      [ "${minor%%.*}" -ge "${glibc#2.}" ] ||
        refuse "This file needs glibc $glibc or newer; this system has $libc." "Try: the container image, docs/guides/docker.md" ;;
  esac
}

check_content() {
  found=$(tail -n +"$lines" "$self" | { sha256sum 2>/dev/null || shasum -a 256; } | cut -d ' ' -f 1)
  [ "$found" = "$sha256" ] || refuse "$self is damaged: the SHA-256 of its content is $found" \
    "                   instead of $sha256." "Try: copy or download the file again"
}

check_place() {
  place=$app
  while [ ! -d "$place" ]; do place=$(dirname "$place"); done
  [ -w "$place" ] || refuse "$place cannot be written to." "Try: sh $self --dir /a/folder/of/yours"
  free_mb=$(df -Pk "$place" | awk 'NR == 2 { print int($4 * 1024 / 1000000) }')
  [ "$free_mb" -ge $((unpacked_mb + 100)) ] || refuse "$place has $free_mb MB free; localllm needs $((unpacked_mb + 100)) MB." \
    "Try: sh $self --dir /a/larger/disk/localllm   (df -h lists the disks)"
}

current_version() { # of the link; empty: there is none
  target=$(readlink "$bin/localllm" 2>/dev/null) || target=''
  case $target in
    "$app"/*/localllm) target=${target#"$app"/}; say "${target%/localllm}" ;;
    "$dir"/tools/*) ;; # of install.sh
    *)
      if [ -n "$target" ] || [ -e "$bin/localllm" ]; then
        refuse "$bin/localllm belongs to another install${target:+ ($target)}." \
          "Try: mv $bin/localllm $bin/localllm.old   (or sh $self --dir D)"
      fi ;;
  esac
}

is_bundle() { # FOLDER of a version: this file, or another one like it, unpacked it
  [ ! -L "$1" ] && [ -f "$1/BUNDLE" ] && grep -q "^${1##*/} " "$1/BUNDLE"
}

has_marker() { [ ! -L "$marker" ] && [ -f "$marker" ] && grep -q '^localllm [0-9]' "$marker"; }

is_ours() { # of this file or of install.sh, also from before there was a marker
  ! has_marker || return 0
  for folder in "$app"/*; do ! is_bundle "$folder" || return 0; done
  grep -q '^\(cpu\|cu1[0-9]*\)$' "$dir/torch" 2>/dev/null && [ -f "$dir/tools/localllm/uv-receipt.toml" ]
}

contents_of() { # FOLDER: the first ten names
  for path in "$1"/* "$1"/.[!.]*; do
    if [ -e "$path" ] || [ -L "$path" ]; then say "${path##*/}"; fi
  done | head -n 10 | tr '\n' ' '
}

look_at_folder() { # refuse a folder with files of others, before anything is changed
  foreign=''
  if ! is_ours; then
    [ ! -e "$app" ] || foreign=app
    [ -z "$own_dir" ] || foreign=$(contents_of "$dir") # a named folder has to be new
  fi
  [ ! -L "$app" ] || foreign=app
  is_bundle "$app/$version" || [ ! -e "$app/$version" ] || foreign=app/$version
  if ! has_marker && { [ -e "$marker" ] || [ -L "$marker" ]; }; then foreign="$foreign ${marker##*/}"; fi
  [ -z "$foreign" ] || refuse "$dir has files that localllm did not make: ${foreign# }" \
    "Try: sh $self --dir ${own_dir:-/a/folder/of/yours}/localllm   (a new folder; or move these files away)"
}

claim() { # NAME: list it in the marker, without which nothing is removed
  has_marker || say "localllm $version" >"$marker"
  grep -qx "$1" "$marker" || say "$1" >>"$marker"
}

unpack() {
  [ -n "$own_dir" ] || (umask 077 && mkdir -p "$dir") || true # chats and keys will be here, too
  { mkdir -p "$app" "$bin" && scratch=$(mktemp -d "$app/.$version.XXXXXX"); } ||
    refuse "$app and $bin cannot be created." "Try: sh $self --dir /a/folder/of/yours"
  trap 'rm -rf "$scratch"' EXIT
  trap 'exit 1' INT TERM HUP
  claim "app/$version"
  new=$scratch/new
  mkdir "$new"
  say "Unpacking localllm $version into $app/$version ($unpacked_mb MB)"
  tail -n +"$lines" "$self" | gzip -dc | tar -x -f - -C "$new" --no-same-owner ||
    refuse "localllm could not be unpacked into $app." "Try: df -h $app   (then sh $self --dir /a/larger/disk)"
  say "$version $sha256" >"$new/BUNDLE"
  "$new/localllm" --version >/dev/null || refuse "Programs in $app cannot be started: is its disk mounted with noexec?" \
    "Try: sh $self --dir /a/folder/on/another/disk   (findmnt -T $app shows how it is mounted)"
  [ ! -d "$app/$version" ] || mv "$app/$version" "$scratch/old" # the same version, built anew
  mv "$new" "$app/$version"
  rm -rf "$scratch"
}

link() { # VERSION: the rename replaces an old link at once
  ln -s "$app/$1/localllm" "$bin/.localllm.$$"
  mv -f "$bin/.localllm.$$" "$bin/localllm"
}

remove_all_but() { # VERSION VERSION
  for folder in "$app"/*; do
    case ${folder##*/} in "$1" | "$2") continue ;; esac
    ! is_bundle "$folder" || rm -rf "$folder"
  done
}

go_back() {
  current=$(current_version) || exit 1
  for folder in "$app"/*; do
    if [ "${folder##*/}" != "$current" ] && is_bundle "$folder"; then
      link "${folder##*/}"
      say "localllm is ${folder##*/} again; ${current:-no other version} is kept."
      return
    fi
  done
  refuse "There is no older version in $app." "Try: localllm --version"
}

if [ $action = back ]; then go_back; exit 0; fi
[ $action != check ] || { check_content; say "$self is complete."; exit 0; }
check_machine
before=$(current_version) || exit 1
check_content
if [ "$(cat "$app/$version/BUNDLE" 2>/dev/null)" = "$version $sha256" ]; then
  say "localllm $version is unpacked already, in $app/$version."
  mkdir -p "$bin"
else
  look_at_folder
  check_place
  unpack
fi
link "$version"
[ "${before:-$version}" = "$version" ] || remove_all_but "$version" "$before"
[ $# -eq 0 ] || exec "$bin/localllm" "$@"
case :$PATH: in
  *":$bin:"*) ;;
  *) say "$bin is not in PATH." "Try: echo 'export PATH=\"$bin:\$PATH\"' >>~/.profile && . ~/.profile" ;;
esac
say "Start:   localllm up          (a page with a small demo model; localllm up MODEL serves another)" \
  "Models:  localllm doctor      (names the models that fit this machine)" \
  "Place:   $app   (remove: localllm uninstall)"
exit 0

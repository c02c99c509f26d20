#!/usr/bin/env bash
# Installs the Debian packages of compilers, emulators and browsers where their commands are missing.
#
#   tests/support/tools.sh web      WebAssembly: clang, its linker, and Node
#   tests/support/tools.sh browser  the same, and Chromium
#   tests/support/tools.sh cross    Cortex-M, AArch64 and RISC-V: compilers and emulators
set -euo pipefail

WEB="clang:clang wasm-ld:lld node:nodejs"
BROWSER="$WEB chromium:chromium"
CROSS="arm-none-eabi-gcc:gcc-arm-none-eabi,libnewlib-arm-none-eabi qemu-system-arm:qemu-system-arm
  aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu,libc6-dev-arm64-cross
  riscv64-linux-gnu-gcc:gcc-riscv64-linux-gnu,libc6-dev-riscv64-cross
  qemu-aarch64:qemu-user qemu-riscv64:qemu-user"

case "${1:-}" in
  web) wanted=$WEB ;;
  browser) wanted=$BROWSER ;;
  cross) wanted=$CROSS ;;
  *) echo "usage: ${0##*/} web|browser|cross" >&2; exit 2 ;;
esac

packages=()
for pair in $wanted; do
  if ! command -v "${pair%%:*}" > /dev/null; then
    IFS=, read -ra own <<< "${pair#*:}"
    packages+=("${own[@]}")
  fi
done
if [ ${#packages[@]} -eq 0 ]; then
  echo "all tools are installed"
  exit
fi
echo "installing ${packages[*]}"
sudo=""
[ "$(id -u)" -eq 0 ] || sudo=sudo
$sudo apt-get update --quiet
$sudo apt-get install --yes --no-install-recommends "${packages[@]}"

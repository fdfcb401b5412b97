#!/usr/bin/env bash
# Runs a command on the kernel's own RDMA verbs, on a host whose kernel has none: Debian's kernel in qemu,
# emulated, so that neither KVM nor a module of the host is needed, with soft-RoCE devices.
#
#   tests/rdma/vm.sh [--topo NAME] [--smp N] [--timeout S] [--env NAME[=VALUE]]… [--] COMMAND [ARGUMENT…]
#     --topo     devices and wires that are there before the command runs: pair (as if not given), bond or
#                quad; vm-guest.sh says what they are
#     --smp      virtual CPUs (2)
#     --timeout  of the whole run, in seconds (600)
#     --env      passes a variable; several times
#
# In: a command. It runs as root in the caller's directory; every file of the host is there, below an overlay
# in memory, so that what it writes is gone afterwards. It reads nothing. Its environment is PATH, HOME,
# KVLANE_RDMA (the topology) and what --env names.
# Out: what it printed, and its exit status; 124 if it ran out of time, 125 if the machine itself failed.
# Needs root on Debian 12: it installs what is missing, and downloads the kernel (70 MB, never installed) into
# KVLANE_RDMA_VM_CACHE (/var/cache/kvlane-rdma-vm), where it stays.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

say() { echo "vm.sh: $*" >&2; }
die() {
    say "$*"
    exit 125
}

# A failure before the command runs is not the command's.
set -E
trap '[ $? -eq 125 ] || say "line $LINENO failed"; exit 125' ERR

here=$(realpath "$(dirname "$0")")
cache=${KVLANE_RDMA_VM_CACHE:-/var/cache/kvlane-rdma-vm}
topology=pair cpus=2 limit_s=600 variables=()
while [ $# -gt 0 ]; do
    case $1 in
    --topo | --smp | --timeout | --env)
        [ $# -gt 1 ] || die "$1 needs a value"
        case $1 in
        --topo) topology=$2 ;;
        --smp) cpus=$2 ;;
        --timeout) limit_s=$2 ;;
        --env) variables+=("$2") ;;
        esac
        shift 2
        ;;
    --) shift && break ;;
    -*) die "unknown option $1" ;;
    *) break ;;
    esac
done
[ $# -gt 0 ] || die "no command"
case $topology in pair | bond | quad) ;; *) die "unknown topology $topology: pair, bond or quad" ;; esac

install_packages() {
    local missing=() file package
    # A file, and the Debian package that has it.
    while read -r file package; do
        [ -e "$file" ] || missing+=("$package")
    done <<'END'
/usr/bin/qemu-system-x86_64 qemu-system-x86
/usr/bin/cpio cpio
/usr/bin/python3 python3
/usr/sbin/depmod kmod
/usr/share/doc/busybox-static busybox-static
/usr/lib/x86_64-linux-gnu/libibverbs.so.1 libibverbs1
/etc/libibverbs.d/rxe.driver ibverbs-providers
END
    { [ -e /usr/bin/rdma ] || [ -e /usr/sbin/rdma ]; } || missing+=(iproute2)
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing ${missing[*]}"
    apt-get update -qq >&2 || die "apt-get update failed"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2 ||
        die "cannot install ${missing[*]}"
}

# Makes $cache/kernel: `root` (the package's files), `version`, `vmlinux`.
fetch_kernel() {
    local new=$cache/new package version
    rm -rf "$new" "$cache/kernel"
    mkdir -p "$new/deb"
    # Lists that are too old name a package that the mirror no longer has.
    apt-get update -qq >&2 || die "apt-get update failed"
    package=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ { print $2; exit }')
    [ -n "$package" ] || die "the package lists have no linux-image-amd64: is this Debian on amd64?"
    say "downloading $package"
    (cd "$new/deb" && apt-get download -qq -o APT::Sandbox::User=root "$package" >&2) ||
        die "cannot download $package"
    dpkg-deb -x "$new"/deb/*.deb "$new/root"
    rm -r "$new/deb"
    version=$(ls "$new/root/lib/modules")
    depmod -b "$new/root" "$version"
    # The kernel's own decompressor takes some 15 s when emulated; qemu also boots a plain ELF file.
    python3 - "$new/root/boot/vmlinuz-$version" "$new/vmlinux" <<'END' || die "$package: no vmlinux in it"
import lzma, sys

packed = open(sys.argv[1], "rb").read()
at = packed.find(b"\xfd7zXZ\0")
while at >= 0:
    try:
        plain = lzma.LZMADecompressor().decompress(packed[at:])
    except lzma.LZMAError:
        plain = b""
    if plain.startswith(b"\x7fELF"):
        open(sys.argv[2], "wb").write(plain)
        sys.exit(0)
    at = packed.find(b"\xfd7zXZ\0", at + 1)
sys.exit(1)
END
    echo "$version" >"$new/version"
    mv "$new" "$cache/kernel"
}

# make_initrd FILE: busybox, the modules in the order in which they are loaded, and vm-init.sh; not compressed, as
# that too is slow.
make_initrd() {
    local kernel=$cache/kernel module
    rm -rf "$cache/initrd"
    mkdir -p "$cache/initrd"/{bin,dev,host,modules,proc,root,sys,up}
    cp /bin/busybox "$cache/initrd/bin/busybox"
    cp "$here/vm-init.sh" "$cache/initrd/init"
    for module in virtio_pci virtio_console 9p 9pnet_virtio overlay veth bonding crc32_generic ib_uverbs \
        rdma_rxe; do
        modprobe -d "$kernel/root" -S "$(cat "$kernel/version")" --show-depends "$module"
    done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r module; do
        cp "$module" "$cache/initrd/modules"
        basename "$module" >>"$cache/initrd/modules/order"
    done
    (cd "$cache/initrd" && find . | cpio -o -H newc --quiet) >"$1.new"
    rm -r "$cache/initrd"
    mv "$1.new" "$1"
}

install_packages
mkdir -p "$cache"
initrd=$cache/initrd-$(cat "$0" "$here/vm-init.sh" | sha256sum | cut -c1-16)
(
    flock 9
    [ -e "$cache/kernel/version" ] || fetch_kernel
    [ -e "$initrd" ] || make_initrd "$initrd"
) 9>"$cache/lock"

# What the machine is told, in a folder of its own; vm-guest.sh runs it.
control=$(mktemp -d)
qemu=
# Not before the machine has ended.
trap '[ -z "$qemu" ] || { kill "$qemu" && wait "$qemu"; } 2>/dev/null; rm -rf "$control"' EXIT
cp "$here/vm-guest.sh" "$control/guest"
{
    printf 'cd %q || exit 125\n' "$PWD"
    printf 'export KVLANE_RDMA=%q\n' "$topology"
    for variable in "${variables[@]}"; do
        name=${variable%%=*}
        if [ "$name" != "$variable" ]; then
            printf 'export %s=%q\n' "$name" "${variable#*=}"
        elif [ -n "${!name+set}" ]; then
            printf 'export %s=%q\n' "$name" "${!name}"
        fi
    done
    printf 'exec'
    printf ' %q' "$@"
    echo
} >"$control/command"

# A pipe, as qemu would truncate what it writes to if that is a file.
mkfifo "$control/out"
cat "$control/out" &
cat=$!
touch "$control/status" "$control/console"
timeout --foreground -k 5 "$limit_s" qemu-system-x86_64 \
    -machine q35 -accel tcg,thread=multi -cpu max -smp "$cpus" -m 2048 \
    -nodefaults -no-user-config -display none -no-reboot \
    -kernel "$cache/kernel/vmlinux" -initrd "$initrd" \
    -append "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off random.trust_cpu=on no_timer_check \
tsc=reliable clocksource=tsc" \
    -serial "file:$control/console" \
    -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
    -virtfs "local,path=$control,mount_tag=control,security_model=none,readonly=on" \
    -device virtio-rng-pci -device virtio-serial-pci \
    -chardev "file,id=out,path=$control/out" -device virtserialport,chardev=out,name=out \
    -chardev "file,id=status,path=$control/status" -device virtserialport,chardev=status,name=status \
    </dev/null 2>"$control/errors" &
qemu=$!
ended=0
wait "$qemu" || ended=$?
qemu=
# Opened and closed once more, in case that qemu never did: then cat ends.
: 7<>"$control/out"
wait "$cat"

status=$(tr -dc 0-9 <"$control/status")
[ -z "$status" ] || exit "$status"
tail -n 5 "$control/errors" >&2
tail -n 30 "$control/console" >&2
if [ "$ended" -eq 124 ]; then
    say "not done after $limit_s s"
    exit 124
fi
die "the machine failed (qemu: $ended)"

#!/bin/sh
# Runs a separate systemd, as in a container: `unshare ... boot.sh BINARIES SOURCE PLACE`. It has its own processes, mounts and
# network, and its own /run, /tmp, /etc, /usr/local, /var/lib and /var/log. Everything else is the host's.
set -eu
binaries=$1 source=$2 place=$3

mount --make-rprivate /
mount -t proc proc /proc
mkdir -p "$place/etc" "$place/lib" "$place/control"
cp -a /etc/. "$place/etc"
rm -rf "$place/etc/systemd/system"
mkdir -p "$place/etc/systemd/system"
mount --bind "$place/etc" /etc
# /var/lib is on a disk, so that direct I/O works as usual.
mount --bind "$place/lib" /var/lib
mount -t tmpfs -o mode=755 tmpfs /usr/local
# /var/log has the journal of this boot only.
mount -t tmpfs -o mode=755 tmpfs /var/log
for program in ginneld ginnel ginnel-volume ginnel-cache; do install -D -t /usr/local/bin "$binaries/$program"; done
for unit in "$source"/packaging/systemd/*; do
    # As scripts/install does.
    sed 's|/usr/bin/ginnel|/usr/local/bin/ginnel|g' "$unit" > "/etc/systemd/system/$(basename "$unit")"
done
install -D -m 644 -t /usr/local/lib/sysusers.d "$source"/packaging/sysusers.d/*
printf '[Unit]\nDefaultDependencies=no\n' > /etc/systemd/system/test.target
# Unmounts everything below the places that are mounted anew, because mounts that no path leads to confuse systemd.
while read -r _ _ _ _ at _; do
    case $at in /run | /run/* | /tmp | /tmp/* | /dev/shm | /sys/fs/cgroup | /sys/fs/cgroup/*) umount -l "$at" 2>/dev/null || true ;; esac
done < /proc/self/mountinfo
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
# A new mount shows only this systemd's part of the hierarchy.
mount -t cgroup2 cgroup2 /sys/fs/cgroup
systemd-sysusers
exec env -i container=ginnel PATH="$PATH" /lib/systemd/systemd --system --unit=test.target --show-status=no --log-target=console

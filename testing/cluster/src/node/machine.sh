# The first process of a node: it makes what the others see, and while it lives they do. Its stdin is held by the test's
# process; when that ends, however it ends, this one does, and the kernel kills all that is left in its pid namespace, takes
# away the mounts and the network. Arguments: its folder, that of its logs, name, own address, the host's address.
set -eu
folder=$1 log=$2 name=$3 own=$4 host=$5

# Still the host's /proc: who we are to those outside, who put one end of a wire in here and then say so.
read -r pid _ < /proc/self/stat
echo "$pid"
read -r _

mount -t proc proc /proc
# The places where kubelet, runtime and CNI keep things by custom: Pods that mount them find what they expect, and nothing of
# this machine's own is touched.
mount --bind "$folder/lib" /var/lib
mount --bind "$log" /var/log
mount -t tmpfs tmpfs /run
# A kubelet demands these and sets what differs, for the whole machine. This one finds them set.
while read -r setting value; do
    echo "$value" > "$folder/settings/${setting//\//-}"
    mount --bind "$folder/settings/${setting//\//-}" "/proc/sys/$setting"
done <<END
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
END

# In a UTS namespace of its own.
echo "$name" > /proc/sys/kernel/hostname
ip link set lo up
ip address add "$own/24" dev eth0
ip link set eth0 up
ip route add default via "$host"
echo ready

# bash reaps what is orphaned meanwhile.
read -r _ || true

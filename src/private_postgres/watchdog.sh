# Waits for the end of the process that started a private Postgres, then stops the server and removes its files.
#
# That process holds the only write end of our standard input, so `read` fails when it is gone, however it went: by
# itself, by a panic, by kill -9. Until then it tells us by lines what there is to do then:
#   watch PID    this server (or initdb) is to be stopped; without PID: none
#   tie PID      first wait for the end of that other process
# $1 is the signal that stops the server, all further arguments are files and directories to remove.
trap '' INT TERM HUP
stop_signal=$1
shift
server=
runner=
while read -r word pid; do
    case $word in
        watch) server=$pid ;;
        tie) runner=$pid ;;
    esac
done

# A process that has ended but was not collected by its parent still takes signals; on Linux its state is Z.
lives() {
    kill -0 "$1" 2>/dev/null || return 1
    case $(cat "/proc/$1/stat" 2>/dev/null) in
        *') Z '*) return 1 ;;
    esac
}

while [ -n "$runner" ] && lives "$runner"; do
    sleep 1
done
if [ -n "$server" ] && kill "-$stop_signal" "$server" 2>/dev/null; then
    tenths=0
    while lives "$server" && [ "$tenths" -lt 200 ]; do
        tenths=$((tenths + 1))
        sleep 0.1
    done
    lives "$server" && kill -KILL "$server" 2>/dev/null
fi
[ "$#" -eq 0 ] && exit 0
# A server that was killed hard may still have children that write for a moment.
for try in 1 2 3 4 5; do
    rm -rf -- "$@" && exit 0
    sleep 1
done
